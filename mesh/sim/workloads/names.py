"""Ids of content and seeds of chance, both made from names.

Who makes a workload names what it makes ("doc", 17) and gets the id that this content has in
every run and process. 63 bits of a hash: among a hundred million segments two that should differ
are equal once in two thousand runs. Chance is seeded by names too, so a client's random numbers
are its own and don't shift when another client asks more.

Rejected: counting ids up. Two makers would count through each other's numbers.
"""

import random

import xxhash

from mesh.sim.workload import Segment

ID_MAX = 2**63 - 1


def segment_id(*names: str | int) -> int:
    """The id of the content with these names, 0 to ID_MAX."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode()) & ID_MAX


def segment(tokens: int, *names: str | int) -> Segment:
    """The content with these names, at least a token long. A name has one length: the caller's."""
    return Segment(segment_id(*names), max(1, tokens))


def seeded(*names: str | int) -> random.Random:
    """A source of chance for what has these names, the same under any PYTHONHASHSEED."""
    return random.Random(segment_id("chance", *names))
