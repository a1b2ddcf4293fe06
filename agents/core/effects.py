"""What the core may ask of the world. The runtime performs these in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass

from agents.core.routers import RouterName
from schemas.exchange import BodyWanted, Outcome, Refused
from schemas.ids import ModelId
from schemas.state import Heartbeat


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send a REFUSED frame: the only frame of that answer. `detail` is for the log."""

    inbox: str
    message: Refused
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AskBody:
    """Send a BODY_WANTED frame."""

    inbox: str
    message: BodyWanted


@dataclass(frozen=True, slots=True)
class Hand:
    """Hand a request to the engine and relay its answer; report `AnswerEnded` exactly once."""

    inbox: str
    path: str
    request_id: str
    body: bytes
    headers: Mapping[str, str]  # of the work message: they carry the trace


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a running relay; its END frame and `AnswerEnded` carry this outcome.

    `refused`: sent instead of END if no byte of the answer has come.
    """

    inbox: str
    outcome: Outcome
    detail: str
    refused: Refused | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Send the END frame of an answer that never reached the engine."""

    inbox: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class SpeakUp:
    """Say again to this router which answers have ended, and of the others that they go on: by
    the numbers of these frames it sees what it has missed."""

    router: RouterName


@dataclass(frozen=True, slots=True)
class OwnerChanged:
    """Log that this router's sign of life has given the replica to its region, under this term."""

    router: RouterName
    term: int


@dataclass(frozen=True, slots=True)
class Beat:
    """Publish this heartbeat."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class LookNow:
    """Read the engine at once, its models too: something says that it changed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the engine for one token, of this model; report `ProbeEnded` exactly once."""

    path: str
    model: ModelId


Effect = Refuse | AskBody | Hand | Abort | Finish | SpeakUp | OwnerChanged | Beat | LookNow | Probe
