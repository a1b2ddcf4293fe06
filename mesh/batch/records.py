"""What the store takes and gives, and its errors."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.batch import Purpose

T = TypeVar("T")


class StoreError(Exception):
    """The store did not do it; the message says why."""


class StoreUnavailable(StoreError):
    """nats-server is away or did not answer in time, or its streams were not made.

    Whether something was stored is unknown. Every call may be repeated once the bus is back.
    """


class StreamsMissing(StoreUnavailable):
    """The streams were not made, or somebody has deleted some."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: run `mesh infra streams`")


class StoreFull(StoreError):
    """Nothing was stored: a limit of `[batch]` in mesh.toml is reached. Nothing else was lost."""


class StreamFull(StoreFull):
    """The stream has as many bytes as it may have."""


class TooLarge(StoreError):
    """A file, line, result or job is larger than one may be; nothing of it is kept."""


class FileUnknown(StoreError):
    """No such file, or it was deleted while it was read."""


class JobUnknown(StoreError):
    """No such job."""


class JobExists(StoreError):
    """There is a job of this id."""


class FileExists(StoreError):
    """There is another file of this id."""


class LinesGone(StoreError):
    """The job's lines were removed, or were never made ready to be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file to be put."""

    filename: str
    purpose: Purpose
    tenant: str = ""
    expires_at: int | None = None
    """Seconds since 1970; None for a file that is kept until it is deleted."""
    id: str = ""
    """Empty: a new one. An output that has this id already is replaced, at once and as a whole; an
    upload is compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file that is stored as a whole. Times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    tenant: str
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of a list, in its order."""

    items: list[T]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a job that is to be computed."""

    job: str
    number: int
    """In its file, from 1."""
    custom_id: str
    url: str
    body: bytes
    """The request's body: JSON, as the engine gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHead:
    """That a line is answered, and how."""

    job: str
    number: int
    status: int
    """Of HTTP, or 0 where there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The one result of a line."""

    job: str
    number: int
    status: int
    custom_id: str
    body: bytes
    """What the runner wrote; the store doesn't read it."""


@dataclass(frozen=True, slots=True)
class Queued:
    """How many of a job's lines are not answered."""

    waiting: int
    taken: int
    """By runners, and not yet acknowledged."""


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_job_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def repeated_id(prefix: str, tenant: str, key: str) -> str:
    """The id of what a tenant creates under its idempotency key: the same for each repetition."""
    made_from = f"{len(tenant)} {tenant} {key}".encode()
    return (
        prefix + hashlib.blake2b(made_from, digest_size=16, person=b"idempotency-key").hexdigest()
    )


def derived_file_id(job: str, kind: str) -> str:
    """The id of a job's output file: the same each time, so that `finish` can be repeated."""
    return f"file-{hashlib.blake2b(f'{job} {kind}'.encode(), digest_size=16).hexdigest()}"
