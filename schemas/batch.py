"""Batch jobs and files, as a region keeps them: names, records, limits.

A region keeps them in an account of its nats-server of their own (`BATCH`), which no leaf link
reaches: uploads never leave the region, only single lines do, by the rules of residency. There are

- the object store `files`: uploaded files, output files and error files, by file id;
- the key-value bucket `files`: one small record a file, so that a list of files reads no contents;
- the key-value bucket `batches`: one `BatchJob` a job, by its id, written by compare-and-set;
- the stream BATCH_TASKS, a work queue: `check` a new job and queue its lines, `finish` one whose
  lines are all answered. Any batch runner of the region takes a task; a task that its runner does
  not acknowledge is delivered to another one, so both can be repeated without harm;
- the stream BATCH_LINES, a work queue with a durable consumer for each job: one message a line,
  acknowledged when its result is stored;
- the stream BATCH_RESULTS: one message a line, and one only: the server refuses a second one for
  the same subject, so a line that was computed twice is answered once.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import orjson
from pydantic import Field

from schemas.exchange import BODY_BYTES_MAX
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS
from schemas.json_messages import decoder
from schemas.numbers import Count
from schemas.residency import Labels

ENDPOINTS = frozenset({CHAT, COMPLETIONS, EMBEDDINGS})  # that a job's lines may ask for

BUCKET_FILES, BUCKET_JOBS = "files", "batches"
STREAM_TASKS, STREAM_LINES, STREAM_RESULTS = "BATCH_TASKS", "BATCH_LINES", "BATCH_RESULTS"
STREAM_FILES, STREAM_JOBS = f"OBJ_{BUCKET_FILES}", f"KV_{BUCKET_JOBS}"
STREAM_FILE_RECORDS = f"KV_{BUCKET_FILES}"

FILE_ID_PATTERN = re.compile(r"file-[0-9a-f]{32}")
JOB_ID_PATTERN = re.compile(r"batch_[0-9a-f]{32}")
WINDOW_PATTERN = re.compile(r"([1-9][0-9]{0,4})(m|h|d)")
WINDOW_S_MAX = 30 * 86_400
METADATA_MAX, METADATA_KEY_CHARS_MAX, METADATA_CHARS_MAX = 16, 64, 512  # OpenAI's
CUSTOM_ID_CHARS_MAX = 512
LINE_BYTES_MAX = BODY_BYTES_MAX
ERRORS_MAX = 100  # of a job's input file that are listed
JOB_BYTES_MAX = 256 * 1024

# Headers of messages in BATCH_LINES and BATCH_RESULTS.
H_CUSTOM_ID = "Batch-Custom-Id"  # as JSON, in ASCII
H_URL = "Batch-Url"
H_STATUS = "Batch-Status"  # of a result: the HTTP status, or 0 where there was no answer


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class Task(StrEnum):
    """What a batch runner does with a whole job."""

    CHECK = "check"  # read its input file and queue its lines
    FINISH = "finish"  # write its output files


class JobStatus(StrEnum):
    """OpenAI's."""

    VALIDATING = "validating"
    FAILED = "failed"  # its input file can't be used
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({JobStatus.FAILED, JobStatus.COMPLETED, JobStatus.EXPIRED, JobStatus.CANCELLED})


def task_subject(task: Task | str, job: str) -> str:
    return f"batch.task.{task}.{job}"


def line_subject(job: str, number: int | str) -> str:
    """`number`: of the line in its file, from 1; `*` for all of the job's."""
    return f"batch.line.{job}.{number}"


def result_subject(job: str, number: int | str) -> str:
    return f"batch.result.{job}.{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """What is wrong with an input file, or with one line of it."""

    code: str
    message: str
    line: Count | None = None
    """From 1; null where the file as a whole is wrong."""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """One job, as the bucket `batches` keeps it. Times are seconds since 1970."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    """As the client wrote it, like 24h."""
    status: JobStatus
    created_at: Count
    expires_at: Count
    tenant: str = ""
    """Whose API key created it; only that tenant sees it. Empty for none."""
    residency: Labels = ()
    """Its lines are computed only where one of these labels is carried; none: anywhere."""
    metadata: dict[str, str] | None = None
    in_progress_at: Count | None = None
    finalizing_at: Count | None = None
    completed_at: Count | None = None
    failed_at: Count | None = None
    expired_at: Count | None = None
    cancelling_at: Count | None = None
    cancelled_at: Count | None = None
    total: Count = 0
    """Lines, those with an error included; 0 until the file is checked."""
    completed: Count = 0
    """Lines that were answered with a status below 400."""
    failed: Count = 0
    """Lines that have an error."""
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: Count | None = None
    """How long its output files are kept, where its client chose."""
    estimated_end_at: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """When its last line will be answered, by its pace; null before it is known."""
    late: bool = False
    """Whether that is after `expires_at`."""
    input_tokens: Count = 0
    """Of prompts, as engines reported them for its lines so far."""
    output_tokens: Count = 0
    """Of answers, likewise."""

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.input_tokens + self.output_tokens

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    @property
    def answered(self) -> int:
        return self.completed + self.failed


def encode_job(job: BatchJob) -> bytes:
    return orjson.dumps(job)


decode_job = decoder(BatchJob)


def window_s(text: str) -> int:
    """Seconds of a completion window like 30m, 24h, 7d. Raises ValueError for anything else."""
    found = WINDOW_PATTERN.fullmatch(text)
    seconds = int(found[1]) * {"m": 60, "h": 3600, "d": 86_400}[found[2]] if found else 0
    if not 60 <= seconds <= WINDOW_S_MAX:
        raise ValueError(f"completion_window {text!r:.40} is no time from 1m to 30d, like 24h")
    return seconds
