"""What requests for files and batches have in common.

Whose they are, the bytes of their bodies as they come, their queries, and the store's errors as
answers.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Protocol

from infra.process import LimitedLog
from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.batch.records import FileUnknown, JobUnknown, StoreError, StoreUnavailable, StreamsMissing
from mesh.batch.store import BatchStore
from mesh.http.callers import owner
from mesh.http.http_request import HttpRequest, Query
from mesh.http.request_body import H_CONTENT_ENCODING, UPLOAD_S_MAX, WINDOW_BYTES, arriving
from schemas.http import H_IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_CHARS_MAX, Fault
from schemas.problems import did_you_mean
from schemas.residency import Labels

NOT_MADE = (
    "the region's store of files and batches lacks streams: its operator has to run `mesh infra "
    "streams`"
)
_limited = LimitedLog(logging.getLogger(__name__))
AWAY = "the region's store of files and batches does not answer; try again"


class BatchDoor(Protocol):
    """What requests for files and batches need from the router behind them."""

    def batch_store(self) -> BatchStore:
        """The region's. Raises RequestRefused where there is none, or it is away at present."""

    def residency(self, wanted: Labels, caller: Caller | None) -> Labels:
        """The labels that limit its request. Raises RequestRefused if they exclude all."""

    def refuse_new(self) -> None:
        """Raise RequestRefused while the router takes nothing new."""


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """The store's errors that no caller has an answer of its own for, as RequestRefused."""
    try:
        yield
    except StoreUnavailable as error:
        _limited.warning("store", type(error).__name__, "files and batches: %s", error)
        why = NOT_MADE if isinstance(error, StreamsMissing) else AWAY
        raise RequestRefused(Fault.STORE_AWAY, why) from error
    except StoreError as error:
        raise RequestRefused(Fault.INTERNAL, f"the store: {error}") from error


@contextlib.contextmanager
def unknown_as(fault: Fault, param: str | None = None) -> Iterator[None]:
    """A file or a job that the store does not know, as RequestRefused with that fault."""
    try:
        yield
    except (FileUnknown, JobUnknown) as error:
        raise RequestRefused(fault, str(error), param) from error


def owner_of(request: HttpRequest) -> str:
    """Whose files and batches it makes and sees. Raises RequestRefused."""
    return owner(request.caller, request.headers)


def id_in(path: str) -> str:
    """The id in a path of one file or one batch."""
    return path.split("/")[3]


async def upload(
    request: HttpRequest, whole_s: float = UPLOAD_S_MAX, window_bytes: int = WINDOW_BYTES
) -> AsyncGenerator[bytes]:
    """The body as `arriving` gives it. Raises RequestRefused for one that is encoded, too."""
    if request.headers.get(H_CONTENT_ENCODING, "identity").lower() != "identity":
        message = f"send it without {H_CONTENT_ENCODING}"
        raise RequestRefused(Fault.INVALID, message, H_CONTENT_ENCODING)
    if request.waits_for_continue():
        request.say_continue()
    async with contextlib.aclosing(arriving(request, whole_s, window_bytes)) as pieces:
        async for piece in pieces:
            yield piece


async def small_body(request: HttpRequest, bytes_max: int) -> bytes:
    """A body of at most so many bytes. Raises RequestRefused."""
    refused = RequestRefused(Fault.BODY_TOO_LARGE, f"the body has more than {bytes_max} bytes")
    if (request.length or 0) > bytes_max:
        raise refused
    body = bytearray()
    async with contextlib.aclosing(upload(request)) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > bytes_max:
                raise refused
    return bytes(body)


def idempotency_key(request: HttpRequest) -> str | None:
    """What makes all requests with it one. Raises RequestRefused for one that is no key."""
    given = request.lines.get(H_IDEMPOTENCY_KEY)
    if not given:
        return None
    key = given[0]
    if len(given) > 1 or not key.isprintable() or not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX:
        message = f"one {H_IDEMPOTENCY_KEY} of 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters"
        raise RequestRefused(Fault.INVALID, message, H_IDEMPOTENCY_KEY)
    return key


def key_of_another(what: str) -> RequestRefused:
    """The error for an idempotency key that was sent with something else before."""
    message = f"this {H_IDEMPOTENCY_KEY} was sent with another {what}; use a new one"
    return RequestRefused(Fault.INVALID, message, H_IDEMPOTENCY_KEY)


def checked_query(query: Query, known: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters. Raises RequestRefused for an unknown one, or one given twice."""
    for name, values in query.items():
        if name not in known:
            message = f"unknown query parameter {name!r:.60}{did_you_mean(name, known)}"
            raise RequestRefused(Fault.INVALID, message, name[:60])
        if len(values) > 1:
            raise RequestRefused(Fault.INVALID, f"{name} is given more than once", name)
    return {name: values[0] for name, values in query.items()}


def limit_of(query: Mapping[str, str], usual: int, most: int) -> int:
    """How many objects a list may have. Raises RequestRefused."""
    given = query.get("limit")
    if given is None:
        return usual
    is_plain = given.isascii() and given.isdigit() and len(given) <= len(str(most))
    if not is_plain or not 1 <= int(given) <= most:
        raise RequestRefused(Fault.INVALID, f"limit must be from 1 to {most}", "limit")
    return int(given)
