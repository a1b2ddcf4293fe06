"""Segments as block keys: what engines and routers compare instead of text.

A key names a block by everything up to its last token, as chained hashes of text do. All keys of
one segment are consecutive numbers from a base that is a hash of the segments before it and of
its own name, so a prompt of 12,000 tokens costs one hash a segment and a `range`, some ten
microseconds. Two bases that fall nearer to each other than a segment is long would make equal
keys of unequal content: with a million segments of thousands of tokens in 2^63 numbers, that
happens once in thousands of runs.

Engines cache blocks of 16 tokens, routers compare blocks of 64 (256 bytes of text, live). A
router's hashes are every fourth of the engine's keys, over the prompt alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from xxhash import xxh3_64_intdigest

from agents.sim.blocks import BLOCK_TOKENS
from mesh.core.prefixes.prompt import BLOCKS_MAX, Prompt
from mesh.sim.workload import Node, Segment

HASH_TOKENS = 64
_EVERY = HASH_TOKENS // BLOCK_TOKENS
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Keys:
    """One request's content: `blocks` over prompt and answer, `hashes` over the prompt."""

    blocks: Sequence[int]
    hashes: tuple[int, ...]


def keys_of(node: Node) -> Keys:
    """The keys of a request's full blocks."""
    blocks = block_keys((*node.prompt, node.answer))
    full = min(node.prompt_tokens // HASH_TOKENS, BLOCKS_MAX)
    return Keys(blocks, tuple(blocks[_EVERY - 1 : full * _EVERY : _EVERY]))


def block_keys(segments: Sequence[Segment]) -> list[int]:
    """The keys of the full blocks of these segments in a row."""
    keys: list[int] = []
    path, start = 0, 0  # hash of what lies before, tokens before
    for name, tokens in segments:
        base = xxh3_64_intdigest((name & _MASK).to_bytes(8, "little"), path) >> 1
        first = -start % BLOCK_TOKENS or BLOCK_TOKENS  # tokens of this segment in the first block
        keys.extend(range(base + first, base + tokens + 1, BLOCK_TOKENS))
        path = xxh3_64_intdigest(tokens.to_bytes(8, "little"), base)
        start += tokens
    return keys


def estimate(hashes: tuple[int, ...], tokens: int, error: float, dice: Random) -> Prompt:
    """The prompt as a router sees it. `error`: standard deviation of its estimate's logarithm."""
    if not error:
        return Prompt(tokens, hashes, HASH_TOKENS)
    factor = dice.lognormvariate(0.0, error)
    return Prompt(max(1, round(tokens * factor)), hashes, HASH_TOKENS * factor)
