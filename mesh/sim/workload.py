"""What clients of the twin ask: prompts as segments of content, and who asks when.

A prompt's content is named, not written: a *segment* is an id and a number of tokens, and two
prompts that begin with the same segments begin with the same tokens. An answer is a segment
too, so the next turn of a chat is the last prompt, its answer and what the user says next.

Work comes as trees of nodes. A node is one request; when its answer is complete its children
are asked, each after its own pause. A chat is a chain, a tree of thoughts is a tree, a trace is
a list of single nodes with times. So one driver plays them all, open loop (arrivals at fixed
times, whatever the mesh does) or closed loop (a client begins its next tree when the last one
is complete, as SkyWalker's load generators do, section 5).

Rejected: making text. Hashing names gives the same matches as hashing text, a thousand times
faster; where real text matters there is `mesh replay`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.ids import RegionId


class Segment(NamedTuple):
    """A piece of content. Equal ids mean equal tokens; `tokens` is 1 or more."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One request, and those that follow from its answer.

    `answer`: the answer's own segment, which children's prompts may contain. `pause_s`: from the
    parent's complete answer to this request (user's reading, tool's running).
    """

    prompt: tuple[Segment, ...]
    answer: Segment
    pause_s: float = 0.0
    children: tuple["Node", ...] = ()
    session: int = 0  # nodes of one conversation or tree carry one number
    priority: str = "normal"  # x-mesh-priority
    slo_ttft_s: float | None = None  # x-mesh-slo-ttft-ms

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return sum(segment.tokens for segment in self.prompt)


class Arrival(NamedTuple):
    """Open loop: this tree begins at `at_s` whatever the mesh does."""

    at_s: float
    region: RegionId
    node: Node


@dataclass(frozen=True, slots=True)
class Client:
    """Closed loop: one user who begins the next tree when the last one is complete."""

    region: RegionId
    trees: Iterator[Node]
    starts_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that is asked in one run. Either list may be empty.

    `arrivals` is in order of time. `until_s` ends a closed loop: no tree begins after it; None
    means that clients end by themselves.
    """

    name: str
    arrivals: tuple[Arrival, ...] = ()
    clients: tuple[Client, ...] = ()
    until_s: float | None = None
    facts: dict[str, object] = field(default_factory=dict)  # how it was made, for the out file
