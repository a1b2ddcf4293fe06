"""One candidate's price, for the `mesh` policy, and what is read off it."""

from collections.abc import Mapping
from typing import NamedTuple

from mesh.core.policies.base import FirstToken, Score, Target


class HeldPrefix(NamedTuple):
    """Leading part of a prompt that a candidate holds; of a peer, at `replica` if it names one."""

    blocks: int
    tokens: int
    replica: str = ""


HELD_NOTHING = HeldPrefix(0, 0)


class PromptHolders(NamedTuple):
    """Candidates that hold a part of a prompt, by name; others hold nothing of it.

    `named`: of a peer, what the replicas hold that it names.
    """

    replicas: Mapping[str, HeldPrefix]
    peers: Mapping[str, HeldPrefix]
    named: Mapping[str, Mapping[str, HeldPrefix]] = {}


class Price(NamedTuple):
    """One candidate's. All in seconds; `seconds` is the sum, others' cost included."""

    seconds: float
    target: Target
    held: HeldPrefix
    tokens: float  # to compute there before the first one comes, those queued included
    running: float
    rtt_s: float
    line_s: float
    queue_s: float
    prefill_s: float
    base_s: float
    memory_s: float
    load_s: float
    others_s: float


# A `Price` as a plain tuple: naming a thousand takes longer than pricing them.
PriceRow = tuple[
    float, Target, HeldPrefix, float, float, float, float, float, float, float, float, float, float
]
TERMS = Price._fields[5:]


def own_s(row: PriceRow) -> float:
    """Until the request's own first token: without what others pay."""
    return row[0] - row[12]


def first_token(row: PriceRow) -> FirstToken:
    """When it is expected there."""
    return FirstToken(own_s(row), row[6] + row[7])


def score(row: PriceRow) -> Score:
    """For the receipt: the terms that `seconds` adds up from."""
    target, terms = row[1], dict(zip(TERMS, row[5:], strict=True))
    pair = target.prefill
    return Score(target, row[0], terms if pair is None else pair.terms, row[2].blocks)
