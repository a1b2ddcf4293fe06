"""What an endpoint says of files and batch jobs: OpenAI's objects, and what a mesh adds to them.

Another server's answer may leave everything out but the ids and the status.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from schemas.batch import ENDED, JobStatus
from schemas.problems import problem_of

UnixTime = Annotated[int, Field(ge=0)]
T = TypeVar("T")
MESSAGE_CHARS_MAX = 2000


class AnswerInvalid(Exception):
    """The endpoint's answer is not what OpenAI's API defines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCounts:
    """Of a job's lines."""

    total: Annotated[int, Field(ge=0)] = 0
    completed: Annotated[int, Field(ge=0)] = 0
    failed: Annotated[int, Field(ge=0)] = 0

    @property
    def answered(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a job failed, or what is wrong with a line of its input file."""

    code: str | None = None
    message: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.message or self.code or 'no reason given'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobErrors:
    data: tuple[JobError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPart:
    """What a mesh says of a job and OpenAI does not."""

    estimated_end_at: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    late: bool = False
    tokens: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """A batch job. Times are seconds since 1970."""

    id: str
    status: JobStatus
    endpoint: str = ""
    input_file_id: str = ""
    completion_window: str = ""
    created_at: UnixTime = 0
    expires_at: UnixTime | None = None
    in_progress_at: UnixTime | None = None
    finalizing_at: UnixTime | None = None
    completed_at: UnixTime | None = None
    failed_at: UnixTime | None = None
    expired_at: UnixTime | None = None
    cancelled_at: UnixTime | None = None
    request_counts: LineCounts | None = None
    errors: JobErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] | None = None
    mesh: MeshPart | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    @property
    def lines(self) -> LineCounts:
        return self.request_counts or LineCounts()

    @property
    def ended_at(self) -> float | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    @property
    def listed_errors(self) -> tuple[JobError, ...]:
        return self.errors.data if self.errors is not None else ()

    @property
    def estimated_end_at(self) -> float | None:
        return self.mesh.estimated_end_at if self.mesh is not None else None

    @property
    def is_late(self) -> bool:
        return self.mesh is not None and self.mesh.late


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAnswer:
    id: str
    bytes: Annotated[int, Field(ge=0)]
    created_at: UnixTime = 0
    expires_at: UnixTime | None = None
    filename: str = ""
    purpose: str = ""


ItemT = TypeVar("ItemT", JobAnswer, FileAnswer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[ItemT]):
    """A part of the list of jobs, or of files, the newest first."""

    data: tuple[ItemT, ...]
    has_more: bool = False


def _reader(kind: type[T], what: str) -> Callable[[bytes], T]:
    """What reads such an answer. It raises AnswerInvalid."""
    adapter = TypeAdapter(kind)

    def read(data: bytes) -> T:
        try:
            return adapter.validate_json(data)
        except ValidationError as error:
            problem = f"that is no {what} of OpenAI's API: {problem_of(error)}"
            raise AnswerInvalid(problem) from error

    return read


read_job = _reader(JobAnswer, "batch job")
read_file = _reader(FileAnswer, "file")
read_jobs = _reader(Page[JobAnswer], "list of batch jobs")
read_files = _reader(Page[FileAnswer], "list of files")


def error_message(data: bytes) -> str:
    """The message of an error in OpenAI's shape; else the beginning of the text."""
    try:
        text = str(orjson.loads(data)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = data.decode(errors="replace")
    shown = "".join(c if c.isprintable() else " " for c in text[:MESSAGE_CHARS_MAX])
    return " ".join(shown.split()) or "no reason given"
