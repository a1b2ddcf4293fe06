"""OpenAI's Files and Batch API as data: the shapes of its requests and answers.

Of a request that the router itself acts on, an unknown field is an error: ignored, it would leave a
client without what it asked for.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from schemas.batch import (
    METADATA_CHARS_MAX,
    METADATA_KEY_CHARS_MAX,
    METADATA_MAX,
    BatchJob,
    JobStatus,
    Purpose,
    window_s,
)
from schemas.numbers import Count

BATCHES_MAX = 100  # in one list
BATCHES_LISTED = 20  # where the client does not say
FILES_MAX = 10_000
EXPIRES_AFTER_S_MIN, EXPIRES_AFTER_S_MAX = 3600, 30 * 86_400
_ID_CHARS_MAX = 64


def _checked_window(text: str) -> str:
    window_s(text)
    return text


Window = Annotated[str, AfterValidator(_checked_window)]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[str, StringConstraints(max_length=METADATA_CHARS_MAX)],
    ],
    Field(max_length=METADATA_MAX),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiresAfter:
    """When a file is deleted."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=True, ge=EXPIRES_AFTER_S_MIN, le=EXPIRES_AFTER_S_MAX)]
    """After the file was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUpload:
    """The form of an upload, in any order. Each field once."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    """JSON lines, each a request of a batch."""
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
    """As `expires_after[anchor]` and `expires_after[seconds]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    """A file that is stored as a whole. Times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: Count
    expires_at: Count | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList:
    """Files of the API key's tenant."""

    object: Literal["list"] = "list"
    data: tuple[FileObject, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDeleted:
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A job to be made of an uploaded file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, Field(min_length=1, max_length=_ID_CHARS_MAX)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    """Of every line of the file."""
    completion_window: Window
    """From 1m to 30d, like 24h: lines that are not answered by then get an error."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """Of the output file and the error file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchError:
    """What is wrong with the input file, or with one line of it."""

    code: str
    message: str
    param: str | None
    line: Count | None
    """From 1; null where the file as a whole is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchErrors:
    """Why a job failed."""

    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """How many lines there are, and how many are done."""

    total: Count
    completed: Count
    failed: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTokensDetails:
    """Not counted for batches."""

    cached_tokens: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTokensDetails:
    """Not counted for batches."""

    reasoning_tokens: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUsage:
    """Tokens of the lines answered so far, as engines reported them."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: Count
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """What the mesh says besides OpenAI's fields."""

    estimated_end_at: float | None
    """When the last line will be answered, by the job's pace; null before that is known."""
    late: bool
    """Whether that is after `expires_at`."""
    tokens: Count
    """Prompt and answer tokens of the lines answered so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A job, in OpenAI's form. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: JobStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    in_progress_at: Count | None
    expires_at: Count
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    mesh: BatchProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchList:
    """Jobs of the API key's tenant, the newest first."""

    object: Literal["list"] = "list"
    data: tuple[Batch, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_of(job: BatchJob) -> Batch:
    """The job as clients see it."""
    errors = tuple(
        BatchError(code=each.code, message=each.message, param=each.param, line=each.line)
        for each in job.errors
    )
    return Batch(
        id=job.id,
        endpoint=job.endpoint,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=job.input_file_id,
        completion_window=job.completion_window,
        status=job.status,
        output_file_id=job.output_file_id,
        error_file_id=job.error_file_id,
        created_at=job.created_at,
        in_progress_at=job.in_progress_at,
        expires_at=job.expires_at,
        finalizing_at=job.finalizing_at,
        completed_at=job.completed_at,
        failed_at=job.failed_at,
        expired_at=job.expired_at,
        cancelling_at=job.cancelling_at,
        cancelled_at=job.cancelled_at,
        request_counts=RequestCounts(total=job.total, completed=job.completed, failed=job.failed),
        usage=BatchUsage(
            input_tokens=job.input_tokens,
            output_tokens=job.output_tokens,
            total_tokens=job.tokens,
        ),
        metadata=job.metadata,
        mesh=BatchProgress(estimated_end_at=job.estimated_end_at, late=job.late, tokens=job.tokens),
    )
