"""OpenAI's Files API: uploads that stream into the region's store, downloads that can be resumed.

A file belongs to the tenant of the API key that uploaded it; to anybody else it does not exist.
Between two pieces of an upload or a download other requests have their turn. At most UPLOADS_MAX
and DOWNLOADS_MAX are under way in one process, each with less than a mebibyte in memory.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from infra.batch_table import BatchTable
from mesh.adapters.metrics import BatchMetrics
from mesh.adapters.refused import RequestRefused
from mesh.batch.records import (
    FileExists,
    FileInfo,
    FileUnknown,
    NewFile,
    Page,
    StoreError,
    StoreFull,
    TooLarge,
    repeated_id,
)
from mesh.batch.store import BatchStore
from mesh.http.batch_requests import (
    BatchDoor,
    checked_query,
    id_in,
    idempotency_key,
    key_of_another,
    limit_of,
    owner_of,
    store_errors,
    unknown_as,
    upload,
)
from mesh.http.form_parts import STEP_BYTES, FormInvalid, FormParts, broken, form_text
from mesh.http.http_request import Answer, HttpRequest
from schemas import http
from schemas.batch import Purpose
from schemas.batch_http import FILES_MAX, ExpiresAfter, FileDeleted, FileObject
from schemas.http import Fault
from schemas.problems import did_you_mean, problem_of
from schemas.request_headers import CONTENT_TYPE

log = logging.getLogger(__name__)

UPLOADS_MAX = 16
DOWNLOADS_MAX = 64
UPLOAD_S_MAX = 3600.0  # 512 MiB at 1.2 Mbit/s
# The least of an upload in each WINDOW_S (10 s), 64 KiB/s: a client that sends less would keep one
# of UPLOADS_MAX from others for up to UPLOAD_S_MAX.
UPLOAD_WINDOW_BYTES = 640 * 1024
STALL_S = 60.0  # of a download whose client takes nothing
# That a router waits for the client of one download, which may then ask for the rest: clients that
# take a little now and then would keep others from DOWNLOADS_MAX for days.
DOWNLOAD_S_MAX = 3600.0
# Of all uploads and downloads of one process together: at this rate they take a quarter of a core,
# and a request of another client waits less than a millisecond for them.
TRANSFER_BYTES_PER_S = 32 * 1024 * 1024
PIECE_BYTES = 64 * 1024  # carried at once
TURN_S = 0.001  # of reading a form, after which others have theirs
DAY_S = 86_400
MEBIBYTE = 1024 * 1024
EXPIRES_AFTER = "expires_after"
FILE, PURPOSE = "file", "purpose"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
NAMES = (FILE, PURPOSE, ANCHOR, SECONDS)
VALUE_BYTES_MAX = 256
FILENAME_CHARS_MAX = 255
BESIDE_BYTES_MAX = 64 * 1024  # of a form: all that is not the file
_ONE = re.compile(r"bytes=\s*(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))\s*", re.IGNORECASE)
_EXPIRES_AFTER: TypeAdapter[ExpiresAfter] = TypeAdapter(ExpiresAfter)


@dataclass(slots=True)
class Transfers:
    """Uploads, downloads or lists that are under way, so many at most."""

    most: int
    what: str
    open: int = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises RequestRefused where there are as many as may be."""
        if self.open >= self.most:
            message = f"{self.most} {self.what} are under way in this router; try again later"
            raise RequestRefused(Fault.TRANSFERS_FULL, message)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Pace:
    """Spreads the bytes of all transfers evenly over time."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_at = 0.0  # for the next piece, on the loop's clock

    async def wait(self, count: int) -> None:
        """Wait until so many more bytes may be carried; others have their turn in any case."""
        now = asyncio.get_running_loop().time()
        starts_at = max(now, self._due_at)
        self._due_at = starts_at + count / self._bytes_per_s
        await asyncio.sleep(starts_at - now)


class ByteRange(NamedTuple):
    """From `start` up to, not including, `end`."""

    start: int
    end: int


class RangeOutside(ValueError):
    """The file has none of the bytes."""


def byte_range(header: str | None, size: int) -> ByteRange | None:
    """The range of that header (RFC 9110, 14) in a file of `size` bytes; None for the whole file.

    The whole is the answer to several ranges too, and to what can't be read: a server may ignore
    either. Raises RangeOutside.
    """
    found = _ONE.fullmatch(header or "")
    if found is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        start, end = max(0, size - int(suffix)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise RangeOutside(f"the file has {size} bytes")
    return ByteRange(start, end)


class UploadForm:
    """The form of an upload (RFC 7578), step by step: one file, of which nothing is kept, and short
    fields. Every method raises RequestRefused for what it can't take."""

    def __init__(self, content_type: str | None) -> None:
        self._beside_bytes = 0
        try:
            self._parts = _UploadParts(content_type)
        except FormInvalid as error:
            raise _refused(error) from error

    @property
    def fields(self) -> dict[str, str]:
        """Those that are whole."""
        return self._parts.fields

    @property
    def filename(self) -> str | None:
        """Once the file has begun."""
        return self._parts.filename

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in the next ones of the form: STEP_BYTES at most, or the caller
        takes too long at once."""
        try:
            self._parts.write(data)
            of_file = self._parts.taken()
            self._beside_bytes += len(data) - len(of_file)
            if self._beside_bytes > BESIDE_BYTES_MAX:
                message = f"the form has more than {BESIDE_BYTES_MAX} bytes beside its file"
                raise FormInvalid(message)
        except FormInvalid as error:
            raise _refused(error) from error
        return of_file

    def end(self) -> None:
        """No more bytes come."""
        if not self._parts.is_whole:
            raise _refused(broken())
        for name in (FILE, PURPOSE):
            if name not in self._parts.names:
                raise _refused(FormInvalid(f"the form has no part {name!r}; add it", name))


class _UploadParts(FormParts):
    """The file's bytes until they are taken, and the fields."""

    def __init__(self, content_type: str | None) -> None:
        super().__init__(content_type)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.names: set[str] = set()
        self._name = ""  # of the part that is read
        self._value = bytearray()
        self._of_file: list[bytes] = []

    def taken(self) -> bytes:
        of_file = b"".join(self._of_file)
        self._of_file.clear()
        return of_file

    def began(self, name: str, options: Mapping[bytes, bytes]) -> None:
        if name not in NAMES:
            message = f"unknown field {name!r:.60}{did_you_mean(name, NAMES)}"
            raise FormInvalid(message, name[:60])
        if name in self.names:
            raise FormInvalid(f"{name} is given twice; give it once", name)
        self._name = name
        self._value.clear()
        self.names.add(name)
        if name == FILE:
            self.filename = _filename(options)

    def came(self, data: bytes) -> None:
        if self._name == FILE:
            self._of_file.append(data)
            return
        self._value += data
        if len(self._value) > VALUE_BYTES_MAX:
            raise FormInvalid(f"{self._name} has more than {VALUE_BYTES_MAX} bytes", self._name)

    def ended(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = form_text(bytes(self._value))


def _filename(options: Mapping[bytes, bytes]) -> str:
    name = form_text(options.get(b"filename", b"")) or FILE
    if len(name) > FILENAME_CHARS_MAX:
        raise FormInvalid(f"the filename has more than {FILENAME_CHARS_MAX} characters", FILE)
    return name


def _refused(error: FormInvalid) -> RequestRefused:
    return RequestRefused(Fault.INVALID, str(error), error.param)


class FilesApi:
    """The handlers of one router; they raise RequestRefused."""

    def __init__(self, door: BatchDoor, limits: BatchTable, metrics: BatchMetrics) -> None:
        self._door, self._limits, self._metrics = door, limits, metrics
        self.uploads = Transfers(UPLOADS_MAX, "uploads")
        self.downloads = Transfers(DOWNLOADS_MAX, "downloads")
        self._pace = Pace(TRANSFER_BYTES_PER_S)

    async def create(self, request: HttpRequest) -> FileObject:
        """Store the file of a form as it comes; nothing is left of one that breaks off."""
        self._door.refuse_new()
        checked_query(request.query, ())
        store, owner = self._door.batch_store(), owner_of(request)
        form = UploadForm(request.headers.get(CONTENT_TYPE))
        if (request.length or 0) > self._limits.file_mib_max * MEBIBYTE + BESIDE_BYTES_MAX:
            raise self._too_large()
        key = idempotency_key(request)
        file_id = "" if key is None else repeated_id("file-", owner, key)
        new = NewFile(filename=FILE, purpose=Purpose.BATCH, tenant=owner, id=file_id)
        with self.uploads.one_more(), store_errors():
            try:
                async with contextlib.aclosing(self._pieces(request, form)) as pieces:
                    info = await store.files.put(
                        new,
                        pieces,
                        announced_bytes=_announced(request),
                        at_end=lambda new: self._described(new, form, store.unix_s()),
                    )
            except TooLarge as error:
                raise self._too_large() from error
            except FileExists as error:
                raise key_of_another("file") from error
            except StoreFull as error:
                message = f"there is no room for the file: {error}"
                raise RequestRefused(Fault.STORE_FULL, message) from error
        return _object(info)

    async def list(self, request: HttpRequest) -> Page[FileObject]:
        """The tenant's files, the newest first unless `order` is asc."""
        store, owner = self._door.batch_store(), owner_of(request)
        query = checked_query(request.query, ("purpose", "limit", "order", "after"))
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise RequestRefused(Fault.INVALID, "order must be asc or desc", "order")
        if purpose is not None and purpose not in set(Purpose):
            message = f"purpose must be {' or '.join(Purpose)}"
            raise RequestRefused(Fault.INVALID, message, PURPOSE)
        limit = limit_of(query, FILES_MAX, FILES_MAX)
        with store_errors(), unknown_as(Fault.FILE_UNKNOWN, "after"):
            page = await store.files.list(
                tenant=owner,
                purpose=None if purpose is None else Purpose(purpose),
                after=query.get("after", ""),
                limit=limit,
                newest_first=order == "desc",
            )
        return Page([_object(info) for info in page.items], page.has_more)

    async def retrieve(self, request: HttpRequest) -> FileObject:
        """What is known of one."""
        return _object(await self._own(self._door.batch_store(), request))

    async def delete(self, request: HttpRequest) -> FileDeleted:
        """Delete it; a batch that has read it goes on."""
        store = self._door.batch_store()
        info = await self._own(store, request)
        with store_errors(), unknown_as(Fault.FILE_UNKNOWN):
            await store.files.delete(info.id)
        return FileDeleted(id=info.id)

    async def content(self, request: HttpRequest, headers: Mapping[str, str]) -> Answer:
        """Its bytes, or the range of them that is asked for."""
        store = self._door.batch_store()
        with self.downloads.one_more():
            info = await self._own(store, request)
            etag = f'"{info.id}-{info.created_at:x}-{info.bytes:x}"'
            wanted = _wanted(request, info, etag)
            part = wanted or ByteRange(0, info.bytes)
            own = {http.H_ETAG: etag, http.H_ACCEPT_RANGES: "bytes"}
            if wanted:
                content_range = f"bytes {part.start}-{part.end - 1}/{info.bytes}"
                own[http.H_CONTENT_RANGE] = content_range
            own[CONTENT_TYPE] = http.JSON_LINES
            answer = Answer(206 if wanted else 200, {**headers, **own})
            request.begin(answer, part.end - part.start)
            if request.method != "HEAD":
                await self._send(store, info, part, request)
        return answer

    async def _send(
        self, store: BatchStore, info: FileInfo, part: ByteRange, request: HttpRequest
    ) -> None:
        """Send that part as fast as the client takes it; one that can't go on is cut."""
        clock, waited_s = asyncio.get_running_loop().time, 0.0
        try:
            async for stored in store.files.read(info.id, *part):
                for at in range(0, len(stored), PIECE_BYTES):
                    piece = stored[at : at + PIECE_BYTES]
                    await self._pace.wait(len(piece))
                    self._door.batch_store()  # the next read would wait for one that is away
                    began_at = clock()
                    async with asyncio.timeout(min(STALL_S, DOWNLOAD_S_MAX - waited_s)):
                        await request.write(piece)
                    waited_s += clock() - began_at
                    self._metrics.bytes_sent.inc(len(piece))
        except (RequestRefused, StoreError, TimeoutError) as error:
            # The client sees that bytes are missing, and may ask for the rest.
            why = str(error) or f"its client is too slow ({waited_s:.0f} s)"
            log.warning("the download of %s is cut: %s", info.id, why)
            request.cut()

    async def _pieces(self, request: HttpRequest, form: UploadForm) -> AsyncGenerator[bytes]:
        """The file's bytes as they come. Raises RequestRefused for a form that is of no use."""
        async with contextlib.aclosing(upload(request, UPLOAD_S_MAX, UPLOAD_WINDOW_BYTES)) as body:
            async for arrived in body:
                self._metrics.bytes_received.inc(len(arrived))
                for at in range(0, len(arrived), PIECE_BYTES):
                    piece = arrived[at : at + PIECE_BYTES]
                    await self._pace.wait(len(piece))
                    self._door.batch_store()  # bytes would wait for one that is away
                    yield await _fed(form, piece)
                    _check_fields(form)
        form.end()

    def _described(self, new: NewFile, form: UploadForm, now: float) -> NewFile:
        """What the whole form says of the file. Raises RequestRefused."""
        expires_after = _expires_after(form)
        kept_s = expires_after.seconds if expires_after else self._limits.output_days * DAY_S
        filename = form.filename or FILE
        return replace(new, filename=filename, expires_at=int(now) + kept_s)

    async def _own(self, store: BatchStore, request: HttpRequest) -> FileInfo:
        """The file that the path names, if it is the tenant's. Raises RequestRefused."""
        checked_query(request.query, ())
        owner = owner_of(request)
        info = await find_file(store, id_in(request.path), owner)
        if info is None:
            raise RequestRefused(Fault.FILE_UNKNOWN, f"no file {id_in(request.path):.64}")
        return info

    def _too_large(self) -> RequestRefused:
        message = f"a file may have {self._limits.file_mib_max} MiB (file_mib_max); split it"
        return RequestRefused(Fault.FILE_TOO_LARGE, message, FILE)


async def find_file(store: BatchStore, file_id: str, owner: str) -> FileInfo | None:
    """The owner's file of that id, if there is one. Raises RequestRefused."""
    with store_errors():
        try:
            info = await store.files.info(file_id)
            is_over = info.expires_at is not None and info.expires_at <= store.unix_s()
        except FileUnknown:
            return None
    return None if is_over or info.tenant != owner else info


async def _fed(form: UploadForm, piece: bytes) -> bytes:
    """The file's bytes in a piece of its form; a form that is hard to read has many turns."""
    clock = asyncio.get_running_loop().time
    of_file, began_at = [], clock()
    for at in range(0, len(piece), STEP_BYTES):
        of_file.append(form.feed(piece[at : at + STEP_BYTES]))
        if clock() - began_at > TURN_S:
            await asyncio.sleep(0)
            began_at = clock()
    return b"".join(of_file)


def _announced(request: HttpRequest) -> int:
    """The file's size, less what its form has besides; 0 where the client does not say."""
    return max(0, (request.length or 0) - BESIDE_BYTES_MAX)


def _wanted(request: HttpRequest, info: FileInfo, etag: str) -> ByteRange | None:
    """The range that is asked for; None for the whole. Raises RequestRefused."""
    if request.method != "GET" or request.headers.get(http.H_IF_RANGE, etag) != etag:
        return None
    try:
        return byte_range(request.headers.get(http.H_RANGE), info.bytes)
    except RangeOutside as error:
        headers = {http.H_CONTENT_RANGE: f"bytes */{info.bytes}"}
        raise RequestRefused(Fault.RANGE_WRONG, str(error), http.H_RANGE, headers) from error


def _check_fields(form: UploadForm) -> None:
    """Raise RequestRefused for a field that came and is wrong, before the whole file has come."""
    if form.fields.get(PURPOSE, Purpose.BATCH) != Purpose.BATCH:
        message = f"purpose must be {Purpose.BATCH}: no other files are kept here"
        raise RequestRefused(Fault.INVALID, message, PURPOSE)
    if ANCHOR in form.fields and SECONDS in form.fields:
        _expires_after(form)


def _expires_after(form: UploadForm) -> ExpiresAfter | None:
    """Raises RequestRefused."""
    given: dict[str, str | int] = {}
    for name, field in (("anchor", ANCHOR), ("seconds", SECONDS)):
        text = form.fields.get(field)
        if text is not None:
            given[name] = int(text) if text.isascii() and text.isdigit() else text
    if not given:
        return None
    try:
        return _EXPIRES_AFTER.validate_python(given)
    except ValidationError as error:
        message = f"{EXPIRES_AFTER}.{problem_of(error)}"
        raise RequestRefused(Fault.INVALID, message, EXPIRES_AFTER) from error


def _object(info: FileInfo) -> FileObject:
    return FileObject(
        id=info.id,
        bytes=info.bytes,
        created_at=info.created_at,
        expires_at=info.expires_at,
        filename=info.filename,
        purpose=info.purpose,
    )
