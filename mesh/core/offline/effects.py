"""Effects of a batch runner beside those that a session performs (`mesh.core.model.effects`)."""

from dataclasses import dataclass
from enum import StrEnum

from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.offline.forecast import ForecastState
from schemas.state import OfflineState


@dataclass(frozen=True, slots=True)
class FetchLines:
    """Fetch so many lines of the job's at most, of so many bytes together (of bodies) at most.

    Answer each with one LinesFetched of the same number, within FETCH_S_MAX. One is under way for a
    job at a time.
    """

    job: str
    lines_max: int
    bytes_max: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenLine:
    """An attempt begins: open a request with this and the line's body. Dispatch or Forward follows.

    `request.key` is the line's. `request.offline` says whether it goes as offline work
    (`Mesh-Offline`, a peer's `offline` subject) or as an online request (a peer's `ingress`).
    """

    request: Request


@dataclass(frozen=True, slots=True)
class CloseLine:
    """That attempt is over: close the request. The line and its body stay."""

    key: int


class Settlement(StrEnum):
    """What the result of a line is made from."""

    ANSWER = "answer"  # the answer of the open request: its head's status and its bytes
    ENGINE_ERROR = "engine_error"  # the error answer of the open request's engine
    ERROR = "error"  # the code and message of SettleLine


@dataclass(frozen=True, slots=True)
class SettleLine:
    """Store the line's result, then acknowledge it, then report LineStored.

    It comes before the CloseLine of its attempt, where one was under way.
    """

    key: int
    job: str
    number: int
    settlement: Settlement
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseLine:
    """Put the line back to the store (nak), and forget its body."""

    key: int
    job: str
    number: int


@dataclass(frozen=True, slots=True)
class JobPaced:
    """When the job will end, on the runner's clock; None: unknown. Sent when it has changed.

    `late`: after its deadline, even with online priority.
    """

    job: str
    end_at: float | None
    late: bool


@dataclass(frozen=True, slots=True)
class PublishOffline:
    """Publish this to peers, and to other runners of this region."""

    state: OfflineState


@dataclass(frozen=True, slots=True)
class SaveForecast:
    """Keep this (`write_forecast`) for the next start."""

    state: ForecastState


OfflineEffect = (
    fx.Effect
    | FetchLines
    | OpenLine
    | CloseLine
    | SettleLine
    | ReleaseLine
    | JobPaced
    | PublishOffline
    | SaveForecast
)
