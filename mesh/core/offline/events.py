"""Events of a batch runner beside those of a session (`mesh.core.model.events`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.offline.forecast import ForecastState
from schemas.engine_routes import ANY_TOKEN_LIMIT
from schemas.ids import ModelId, RequestId
from schemas.residency import Labels
from schemas.state import OfflineState

ANSWER_TOKENS_DEFAULT = 2048  # where the body names no limit: engines would go on to their own
ANSWER_TOKENS_MAX = 2**20  # a body that names more is taken to mean this
CHOICES_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineJob:
    """A batch job that is in progress. Times are seconds on the runner's clock (`now`)."""

    id: str
    began_at: float  # of its completion window
    deadline: float  # the window's end
    total: int  # lines
    answered: int = 0  # lines with a result or an error, by all runners of the region
    residency: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a job, as it was fetched; its body stays with the host.

    `key`: a number that no request of this runner has had. `answer_tokens`: the most that it may
    generate (`answer_tokens_max`).
    """

    key: int
    job: str
    number: int  # in its file, from 1
    request_id: RequestId
    model: ModelId
    prompt: Prompt
    answer_tokens: int
    body_bytes: int

    @property
    def tokens(self) -> int:
        """Of its prompt and the longest answer: what it takes of a replica's offline room."""
        return self.prompt.tokens + self.answer_tokens


def answer_tokens_max(body: Mapping[str, Any]) -> int:
    """The most that this body's answer may have, all choices together; never below 1.

    What is no positive number counts as not named: the engine will refuse it.
    """
    most = answer_tokens_said(body, ANY_TOKEN_LIMIT) or ANSWER_TOKENS_DEFAULT * _answers(body)
    return min(ANSWER_TOKENS_MAX, most)


def answer_tokens_said(body: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The same, where the body names it; by the first of these fields."""
    limits = (_positive(body.get(name)) for name in names)
    limit = next(filter(None, limits), None)
    return None if limit is None else min(ANSWER_TOKENS_MAX, limit * _answers(body))


def _answers(body: Mapping[str, Any]) -> int:
    choices = max(_positive(body.get("n")) or 1, _positive(body.get("best_of")) or 1)
    answers = min(choices, CHOICES_MAX)
    prompt = body.get("prompt")  # of the completions endpoint: several prompts, or one of token ids
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        answers *= len(prompt)
    return answers


def _positive(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else None


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job is in progress, or its record has changed: report each revision."""

    job: OfflineJob


@dataclass(frozen=True, slots=True)
class JobEnded:
    """No line of the job is to be computed any more: it was cancelled, has expired, or is done."""

    job: str


@dataclass(frozen=True, slots=True)
class LinesFetched:
    """The answer to one FetchLines, whatever became of it; no lines where there were none.

    `number`: of that FetchLines; None: of the job's last. Lines that nobody asked for are put back
    if there is no room.
    """

    job: str
    lines: tuple[Line, ...] = ()
    number: int | None = None


@dataclass(frozen=True, slots=True)
class LineStored:
    """The result of a settled line is stored and the line is acknowledged: its place is free."""

    key: int


@dataclass(frozen=True, slots=True)
class OfflineStateSeen:
    """A batch runner's state: of a peer region, or of another runner of this one."""

    state: OfflineState


@dataclass(frozen=True, slots=True)
class ForecastRestored:
    """What an earlier SaveForecast wrote, as `read_forecast` reads it."""

    state: ForecastState


OfflineEvent = (
    ev.Event | JobSeen | JobEnded | LinesFetched | LineStored | OfflineStateSeen | ForecastRestored
)
