"""What may happen to an agent. The runtime makes these; `AgentCore.handle` takes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.core.reading import NO_USAGE, EngineReading, Usage
from schemas.exchange import Outcome
from schemas.ids import ModelId, RegionId, RouterId
from schemas.state import ModelCard


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """A message on the work subject; `inbox` is its reply subject."""

    inbox: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class BodyPartArrived:
    """A part of a body that was asked for in parts."""

    inbox: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CancelArrived:
    """The router no longer wants this answer."""

    inbox: str


@dataclass(frozen=True, slots=True)
class AliveArrived:
    """A router's sign of life."""

    region: RegionId
    router: RouterId
    epoch: int
    term: int | None = None  # of the lease by which it owns this replica, if it says that it does


@dataclass(frozen=True, slots=True)
class BusLost:
    """Nobody is heard any more."""


@dataclass(frozen=True, slots=True)
class BusReturned:
    """Whoever is there can be heard again."""


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The first byte of an answer's body came from the engine.

    `good`: of an answer, and not of an error, which its HTTP server may send by itself.
    """

    inbox: str
    good: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnded:
    """A relay is over and its END frame is out. Comes exactly once for every `Hand`."""

    inbox: str
    outcome: Outcome
    usage: Usage = NO_USAGE
    streamed: bool = False  # an SSE answer: its first byte marks its first token


@dataclass(frozen=True, slots=True)
class EngineRead:
    """The engine answered. `models` is None when only its metrics were read this time."""

    began_at: float  # when the reading began: what was handed over later may not be in it
    reading: EngineReading
    models: tuple[ModelId, ...] | None
    cards: Mapping[ModelId, ModelCard] = field(default_factory=dict)  # read with the models
    heard_at: float = float("-inf")  # when any good answer last brought a byte
    # Inboxes of answers that are not read further because their clients read slowly.
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine could not be read. `heard_at`: when any good answer last brought a byte."""

    began_at: float
    heard_at: float
    timed_out: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A probe was answered, or was not in its time. Comes exactly once for every `Probe`."""

    answered: bool


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new; finish what is running."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Waiting is over: abort whatever still runs."""


@dataclass(frozen=True, slots=True)
class Left:
    """The answers have ended and no more work comes: say the last word."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; wanted at `AgentCore.wake_at` at the latest."""


Event = (
    WorkArrived
    | BodyPartArrived
    | CancelArrived
    | AliveArrived
    | BusLost
    | BusReturned
    | AnswerBegan
    | AnswerEnded
    | EngineRead
    | EngineFailed
    | ProbeEnded
    | DrainAsked
    | StopAsked
    | Left
    | Tick
)
