"""What may happen to an agent, and what an engine reports. The host makes these events;
`AgentCore.handle` takes them. None in a reading means that this kind of engine does not report the
number; it never means zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.core.engine_results import NOTHING_SAID, Verdict
from agents.core.loaded_models import States
from schemas.exchange import Outcome
from schemas.ids import ModelId, RegionId, RouterId
from schemas.state import KnownRoutes, ModelCard


class RouterKey(NamedTuple):
    """A router's identity; names of routers are unique inside a region only."""

    region: RegionId
    router: RouterId


class DrainOrder(NamedTuple):
    """Whether operators have drained the replica, by the record of that number in the stream."""

    seq: int
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One scrape of an engine's metrics page. Counts are requests unless the name says tokens."""

    waiting: int | None = None  # accepted, not in the running batch
    running: int | None = None
    batch_max: int | None = None
    kv_used_ratio: float | None = None
    kv_capacity_tokens: int | None = None
    prefix_hit_ratio: float | None = None  # since the engine's start
    # At least one of these rises with every computed step, and none without a step.
    progress: tuple[float, ...] = ()
    is_asleep: bool | None = None  # it was put to sleep: its memory holds no weights and no cache


NOTHING_KNOWN = EngineReading()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts that an engine reported for one answer; -1 where it reported none."""

    prompt_tokens: int = -1
    cached_tokens: int = -1
    completion_tokens: int = -1

    def or_else(self, other: "TokenUsage") -> "TokenUsage":
        """These counts, and where one is not known the other's."""
        return TokenUsage(
            _known(self.prompt_tokens, other.prompt_tokens),
            _known(self.cached_tokens, other.cached_tokens),
            _known(self.completion_tokens, other.completion_tokens),
        )


def _known(count: int, other: int) -> int:
    return count if count >= 0 else other


NO_USAGE = TokenUsage()


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """A message on the work subject; `inbox` is its reply subject."""

    inbox: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class BodyPartArrived:
    inbox: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CancelArrived:
    inbox: str


@dataclass(frozen=True, slots=True)
class AliveArrived:
    """A router's keep-alive. `order`: None from one that has not read the stream of orders.
    `next_within_s`: of its next one; 0 from one that does not read this of heartbeats either."""

    region: RegionId
    router: RouterId
    epoch: int
    term: int | None = None  # of the lease by which its region owns this replica, if it holds one
    order: DrainOrder | None = None
    next_within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BusDisconnected:
    """The connection to the bus is lost."""


@dataclass(frozen=True, slots=True)
class BusReconnected:
    """The connection to the bus is back."""


@dataclass(frozen=True, slots=True)
class RelayBegan:
    """The engine sent the first byte of a response body. `good`: with a 2xx status."""

    inbox: str
    good: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEnded:
    """A relay is over and its END frame is out. Comes exactly once for every `StartRelay`."""

    inbox: str
    outcome: Outcome
    usage: TokenUsage = NO_USAGE
    streamed: bool = False  # an SSE response: its first byte marks its first token
    verdict: Verdict = NOTHING_SAID  # on the engine


class PagesSeen(NamedTuple):
    """Of an engine that is up: what is wrong with its pages (`agents.core.engine_pages`)."""

    problem: str | None = None  # "metrics: HTTP 503"; None while all can be read
    is_blind: bool = False  # its page of metrics can't be read: the agent counts by itself
    wants_proof: bool = False  # nothing but answers shows that it is up, and none came lately


PAGES_GOOD = PagesSeen()


@dataclass(frozen=True, slots=True)
class EngineScraped:
    """The engine answered a scrape. `models` is None when only its metrics were read this time."""

    began_at: float  # when the scrape began: requests sent to the engine later may not be in it
    reading: EngineReading
    models: tuple[ModelId, ...] | None
    # Read with the models: their cards, and the optional paths that the engine answers.
    cards: Mapping[ModelId, ModelCard] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    last_content_at: float = float("-inf")  # when any good response last brought content
    # Inboxes of responses that the agent has paused because their clients read slowly.
    held: frozenset[str] = frozenset()
    adapters: frozenset[ModelId] = frozenset()  # of the models, those that have a parent
    # Read with the models: what else is known of paths, and what the engine says is loaded.
    routes: KnownRoutes | None = None
    states: States = field(default_factory=dict)
    pages: PagesSeen = PAGES_GOOD
    states_unknown: bool = False  # the engine may say what is loaded, and could not be asked yet
    system_first: bool = False  # it moves system turns of `/v1/messages`


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFailed:
    """A scrape failed. `last_content_at`: when any good response last brought content."""

    began_at: float
    last_content_at: float
    timed_out: bool
    detail: str
    is_up: bool = False  # the engine answers; only its load is not known
    wants_proof: bool = False  # it answers scrapes, badly: a good answer would show that it is up


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A probe was answered or timed out. Comes exactly once for every `ProbeEngine`."""

    answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMeasured:
    """A measured prompt was answered, stopped, or failed. Comes exactly once for every
    `MeasurePrompt`. `problem`: why there is no answer, empty if there is one or it was stopped."""

    seconds: float = 0.0  # from sending it to its one token
    usage: TokenUsage = NO_USAGE
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AdapterLoadEnded:
    """The engine has loaded an adapter, or has not. `load_s`: how long it took."""

    adapter: ModelId
    good: bool
    load_s: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse new work; finish what runs."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The drain's time is over: abort what still runs."""


@dataclass(frozen=True, slots=True)
class DrainFinished:
    """All requests have ended and no more work comes: publish the last heartbeat."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Time passed; due at `AgentCore.wake_at` at the latest."""


AgentEvent = (
    WorkArrived
    | BodyPartArrived
    | CancelArrived
    | AliveArrived
    | BusDisconnected
    | BusReconnected
    | RelayBegan
    | RelayEnded
    | EngineScraped
    | ScrapeFailed
    | ProbeEnded
    | PromptMeasured
    | AdapterLoadEnded
    | DrainRequested
    | StopRequested
    | DrainFinished
    | TimerFired
)
