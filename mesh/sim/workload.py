"""The requests that clients of the twin send: prompts as segments of content, in trees.

A *segment* is an id and a number of tokens; two prompts that begin with the same segments begin
with the same tokens. An answer is a segment too, so the next turn of a chat is the last prompt,
its answer and the user's next message.

A node is one request; when its answer is complete its children are sent, each after its own pause.
A chat is a chain, a tree of thoughts is a tree, a trace is a list of single nodes with times. One
driver plays them all, as an open loop (arrivals at fixed times) or a closed loop (a client begins
its next tree when the last one is complete, as SkyWalker's load generators do, section 5).

Engines and routers compare block keys instead of text. A key names a block by everything up to its
last token, as chained hashes of text do. All keys of one segment are consecutive numbers from a
base, the hash of the segments before it and its own id, so a prompt of 12,000 tokens costs one hash
a segment and a `range`: some ten microseconds. Two bases nearer than a segment's length would make
equal keys of unequal content: with a million segments in 2^63 numbers, once in thousands of runs.
Engines cache blocks of 16 tokens, routers compare blocks of 64 (256 bytes of text, live): a
router's hashes are every fourth of the engine's keys, over the prompt alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.core.model.prompt import BLOCKS_MAX, Prompt
from mesh.replay.tally import RequestOutcome
from schemas.ids import RegionId, ReplicaId, RequestId

HASH_TOKENS = 64
_EVERY = HASH_TOKENS // BLOCK_TOKENS
_MASK = 2**64 - 1
_ID_PREFIX = "twin-"


class Segment(NamedTuple):
    """A piece of content. Equal ids mean equal tokens; `tokens` is 1 or more."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNode:
    """One request, and those that follow from its answer.

    `answer`: the answer's own segment, which children's prompts may contain. `pause_s`: from the
    parent's complete answer to this request (the user reads, a tool runs).
    """

    prompt: tuple[Segment, ...]
    answer: Segment
    pause_s: float = 0.0
    children: tuple["RequestNode", ...] = ()
    session: int = 0  # nodes of one conversation or tree have the same number
    priority: str = "normal"  # x-mesh-priority
    slo_ttft_s: float | None = None  # x-mesh-slo-ttft-ms
    adapter: str = ""  # asked for; empty: the model
    tenant: str = ""  # whose request it is

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


def chain(
    turns: Sequence[tuple[tuple[Segment, ...], Segment]], session: int, pause_s: float = 0.0
) -> RequestNode:
    """A conversation of these prompts and answers (one or more), each after the one before."""
    after: tuple[RequestNode, ...] = ()
    for turn in reversed(range(len(turns))):
        prompt, answer = turns[turn]
        node = RequestNode(
            prompt=prompt,
            answer=answer,
            pause_s=pause_s if turn else 0.0,
            children=after,
            session=session,
        )
        after = (node,)
    return after[0]


class Arrival(NamedTuple):
    """Open loop: this tree begins at `at_s`."""

    at_s: float
    region: RegionId
    node: RequestNode


@dataclass(frozen=True, slots=True)
class ClosedLoopClient:
    """One user who begins the next tree when the last one is complete."""

    region: RegionId
    trees: Iterator[RequestNode]
    starts_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one run. Either list may be empty.

    `arrivals` is in order of time. `until_s` ends a closed loop: no tree begins after it; None
    means that clients end by themselves.
    """

    name: str
    arrivals: tuple[Arrival, ...] = ()
    clients: tuple[ClosedLoopClient, ...] = ()
    until_s: float | None = None
    facts: dict[str, object] = field(default_factory=dict)  # how it was made, for the out file


@dataclass(frozen=True, slots=True)
class ContentKeys:
    """One request's content: `blocks` over prompt and answer, `hashes` over the prompt."""

    blocks: Sequence[int]
    hashes: tuple[int, ...]


@dataclass(slots=True)
class OpenTree:
    """A tree of requests that is being played. `left`: nodes that are open or will be."""

    client: ClosedLoopClient | None  # whose it is, in a closed loop
    left: int = 1


@dataclass(slots=True)
class SentRequest:
    """A request that a client has sent. Times are the client's own, in seconds of the world.

    Work messages of the twin have a live one's headers and this object in place of a body.
    """

    number: int
    region: RegionId
    node: RequestNode
    tree: OpenTree
    keys: ContentKeys
    prompt: Prompt  # as its router sees it
    sent_at: float
    first_at: float | None = None
    ended: bool = False

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"{_ID_PREFIX}{self.number}")

    @property
    def session(self) -> str | None:
        return str(self.node.session) if self.node.session else None


def number_of(request_id: RequestId) -> int:
    """The number of the `SentRequest` with this id."""
    return int(request_id.removeprefix(_ID_PREFIX))


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended, as its client sees it."""

    outcome: RequestOutcome
    reason: str = ""
    retry_after_s: float | None = None
    replica: ReplicaId | None = None
    cached_tokens: int = 0
    hops: int = 0
    attempts: int = 0


def keys_of(node: RequestNode) -> ContentKeys:
    blocks = block_keys((*node.prompt, node.answer), node.adapter)
    full = min(node.prompt_tokens // HASH_TOKENS, BLOCKS_MAX)
    return ContentKeys(blocks, tuple(blocks[_EVERY - 1 : full * _EVERY : _EVERY]))


def block_keys(segments: Sequence[Segment], adapter: str = "") -> list[int]:
    """The keys of the full blocks of these segments in a row, as that adapter computes them."""
    keys: list[int] = []
    path = xxh3_64_intdigest(adapter.encode()) if adapter else 0  # hash of the segments before
    start = 0  # tokens before
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
