"""What the host must do. It performs these in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass

from agents.core.events import RouterKey
from agents.core.work_message import WorkRequest
from schemas.exchange import BodyWanted, Outcome, Refused
from schemas.ids import ModelId
from schemas.state import Heartbeat


@dataclass(frozen=True, slots=True)
class DropWork:
    """Count and log a work message whose reply subject no response may go to."""

    inbox: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send a REFUSED frame: the only frame of that response. `detail` is for the log."""

    inbox: str
    message: Refused
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """Send a BODY_WANTED frame."""

    inbox: str
    message: BodyWanted


@dataclass(frozen=True, slots=True)
class HoldWork:
    """Report to its router from time to time that this request waits here. Its body is held by the
    core; a StartRelay or a SendEnd follows."""

    inbox: str


@dataclass(frozen=True, slots=True)
class StartRelay:
    """Send a request to the engine and relay its response; report `RelayEnded` exactly once."""

    inbox: str
    work: WorkRequest
    headers: Mapping[str, str]  # of the work message: they carry the trace
    body: bytes  # whole; empty of a call about a response


@dataclass(frozen=True, slots=True)
class AbortRelay:
    """Abort a running relay; its END frame and `RelayEnded` carry this outcome.

    `refused`: sent instead of END if no byte of the response has come.
    """

    inbox: str
    outcome: Outcome
    detail: str
    refused: Refused | None = None


@dataclass(frozen=True, slots=True)
class SendEnd:
    """Send the END frame of a request that never reached the engine."""

    inbox: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class ResyncRouter:
    """Send this router again the END frames that it may have missed, and WORKING frames of the
    responses that go on: by their numbers it notices which frames it lacks."""

    router: RouterKey


@dataclass(frozen=True, slots=True)
class LogOwnerChange:
    """Log that this router's keep-alive gave the replica to its region, under this term."""

    router: RouterKey
    term: int


@dataclass(frozen=True, slots=True)
class PublishHeartbeat:
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class ScrapeNow:
    """Scrape the engine at once, its models too: it may have changed."""


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """Request one token of this model from the engine; report `ProbeEnded` exactly once."""

    path: str
    model: ModelId


@dataclass(frozen=True, slots=True)
class MeasurePrompt:
    """Request one token of this model after that prompt; report `PromptMeasured` exactly once.
    `limit_s`: for the whole answer."""

    model: ModelId
    prompt: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class StopMeasuring:
    """Close the connection of the prompt that is measured now, if one is."""


@dataclass(frozen=True, slots=True)
class LogSpeedProbe:
    """Log how the probe of the engine's speed ended. `known`: with a speed."""

    text: str
    known: bool


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Have the engine unload one adapter, if any, and load another; report `AdapterLoadEnded`
    exactly once."""

    adapter: ModelId
    path: str
    instead_of: ModelId | None = None


AgentEffect = (
    DropWork
    | Refuse
    | RequestBody
    | HoldWork
    | StartRelay
    | AbortRelay
    | SendEnd
    | ResyncRouter
    | LogOwnerChange
    | PublishHeartbeat
    | ScrapeNow
    | ProbeEngine
    | MeasurePrompt
    | StopMeasuring
    | LogSpeedProbe
    | LoadAdapter
)
