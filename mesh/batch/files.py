"""Files in the object store `files`, in NATS' own layout: `nats object ls|get files` works on it.

An object is its chunks, messages of one subject, and one message of metadata. Our own record of the
file is in the bucket `files`, where a list of all files reads no contents: in the object store the
server would load every block on disk, which is all of it. The record is written last and removed
first, so a file is there as a whole or not at all. What has no record is of an upload that goes on,
or broke off: who broke off removes it, and `delete_expired` what is left of a process that died.

The record has the numbers of some chunks in the stream, so that a download is resumed at any byte
without reading what is before it.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from nats.nuid import NUID

from infra.batch_table import OUTPUT_SHARE, BatchTable
from infra.bus import H_EXPECTED
from mesh.batch.connection import ChangedMeanwhile, Connection, Stored, Window
from mesh.batch.records import (
    FileExists,
    FileInfo,
    FileUnknown,
    NewFile,
    Page,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StreamFull,
    TooLarge,
    new_file_id,
)
from schemas.batch import BUCKET_FILES, FILE_ID_PATTERN, STREAM_FILE_RECORDS, STREAM_FILES, Purpose

log = logging.getLogger(__name__)

MEBIBYTE = 1024 * 1024
CHUNK_BYTES = 128 * 1024  # NATS' default
ROOM_CHECK_BYTES = 4 * 1024 * 1024  # of an upload between two checks of the store's room
CHUNKS_AT_ONCE = 4  # written or read without waiting
MARKS_MAX = 128  # chunks whose number is in the record
# A part of an upload comes every few seconds, or its client is cut off. What is older and has no
# record is of no upload that goes on.
ORPHANED_S = 900.0
UPLOAD_STALL_S = ORPHANED_S / 3
_ALL_RECORDS = f"$KV.{BUCKET_FILES}.>"


@dataclass(frozen=True, slots=True)
class _Object:
    """A file and where it is. `marks`: chunk → number in the stream, of some chunks, ascending."""

    info: FileInfo
    record: Stored
    nuid: str
    chunks: int
    marks: tuple[tuple[int, int], ...]

    def number_near(self, chunk: int) -> tuple[int, int]:
        """A number in the stream from which to read, and how many chunks to leave out there."""
        at = bisect_right(self.marks, chunk, key=lambda mark: mark[0]) - 1
        marked, number = self.marks[at]
        if at + 1 < len(self.marks):
            next_marked, next_number = self.marks[at + 1]
            if next_number - number == next_marked - marked:  # nothing of others is between
                return number + chunk - marked, 0
        return number, chunk - marked


class Files:
    """The region's files."""

    def __init__(self, connection: Connection, limits: BatchTable) -> None:
        self._connection = connection
        self._limits = limits
        self._cleaning: set[asyncio.Task[None]] = set()

    async def put(
        self,
        new: NewFile,
        chunks: AsyncIterable[bytes],
        *,
        announced_bytes: int = 0,
        at_end: Callable[[NewFile], NewFile] = lambda new: new,
    ) -> FileInfo:
        """Store a file as its bytes come; what breaks off leaves nothing behind.

        `announced_bytes`: the size of an upload, where it is known before. `at_end` is called when
        all have come, and adds to `new` what is known only then.
        Raises StoreFull, TooLarge (an upload over `file_mib_max`), StoreUnavailable,
        ChangedMeanwhile (somebody else has put the file of that id), FileExists (an upload whose id
        has other bytes), and what `chunks` does.
        """
        assert not new.id or FILE_ID_PATTERN.fullmatch(new.id), new.id
        connection = self._connection
        is_output = new.purpose is Purpose.BATCH_OUTPUT
        replaced = await self._find(new.id) if new.id else None
        if replaced is not None and not is_output:
            return await self._compared(replaced, chunks)
        files_max = self._limits.files_max
        if not is_output and await self._count() >= files_max:
            raise StoreFull(f"there are {files_max} files (files_max); delete some")
        upload = self._upload(is_output=is_output)
        there = None if replaced is None else replaced.record
        described = await connection.last(STREAM_FILES, _metadata(new.id)) if new.id else None
        try:
            await upload.check_room(announced_bytes)
            async for part in chunks:
                await upload.add(part)
            info = await upload.finish(at_end(new), _number(described), _number(there))
        except StreamFull as error:
            await self._clean(upload)
            limit = f"files_mib = {self._limits.files_mib}"
            if not is_output:
                limit += f", of which {OUTPUT_SHARE:.0%} is for outputs of jobs"
            raise StoreFull(
                f"the region's store is full ({limit}): delete files, or raise it in mesh.toml"
            ) from error
        except ChangedMeanwhile as error:
            await self._clean(upload)
            if is_output:
                raise
            raise StoreUnavailable(f"{new.id} was uploaded twice at once") from error
        except BaseException:
            await self._clean(upload)
            raise
        if replaced is not None:
            await connection.purge(STREAM_FILES, _chunks(replaced.nuid))
        return info

    async def _compared(self, known: _Object, chunks: AsyncIterable[bytes]) -> FileInfo:
        """The file, if these are its bytes; else FileExists."""
        digest, size = hashlib.sha256(), 0
        async for part in chunks:
            size += len(part)
            if size > self._limits.file_mib_max * MEBIBYTE:
                raise TooLarge("a file may have file_mib_max")
            digest.update(part)
        metadata = await self._connection.last(STREAM_FILES, _metadata(known.info.id))
        fields = {} if metadata is None else orjson.loads(metadata.data)
        if size != known.info.bytes or fields.get("digest") != _digest(digest.digest()):
            raise FileExists(f"{known.info.id} has other bytes")
        return known.info

    async def _count(self) -> int:
        return int((await self._connection.state(STREAM_FILE_RECORDS))["messages"])

    def _upload(self, *, is_output: bool) -> "_Upload":
        """An output is as long as its job's answers are."""
        limits = self._limits
        nuid = NUID().next().decode()
        mib_max = limits.files_mib if is_output else limits.file_mib_max
        full_mib = limits.files_mib if is_output else limits.uploads_mib
        full_bytes = int(full_mib * MEBIBYTE)
        return _Upload(self._connection, nuid, mib_max * MEBIBYTE, full_bytes)

    async def info(self, file_id: str) -> FileInfo:
        """Raises FileUnknown, StoreUnavailable."""
        return (await self._get(file_id)).info

    async def list(
        self,
        *,
        tenant: str,
        purpose: Purpose | None = None,
        after: str = "",
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[FileInfo]:
        """The tenant's files by their time, those behind the file `after`.

        Raises FileUnknown (`after`), StoreUnavailable.
        """
        async with self._connection.reading_all:
            found = [
                each.info
                async for each in self._all()
                if each.info.tenant == tenant and purpose in (None, each.info.purpose)
            ]
        found.sort(key=lambda info: (info.created_at, info.id), reverse=newest_first)
        start = 0
        if after:
            places = [place for place, info in enumerate(found) if info.id == after]
            if not places:
                raise FileUnknown(f"no file {after}")
            start = places[0] + 1
        return Page(found[start : start + limit], has_more=len(found) > start + limit)

    async def read(
        self, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Its bytes from `start` up to, not including, `end`.

        Raises FileUnknown (also when it is deleted meanwhile), StoreUnavailable: then go on with
        the `start` that is reached.
        """
        file = await self._get(file_id)
        stop = file.info.bytes if end is None else min(end, file.info.bytes)
        while start < stop:
            chunk, skipped = divmod(start, CHUNK_BYTES)
            async for data in self._chunks(file, chunk):
                piece = data[skipped : skipped + stop - start]
                skipped = 0
                start += len(piece)
                yield piece
                if start >= stop:
                    return

    async def delete(self, file_id: str) -> None:
        """Raises FileUnknown, StoreUnavailable."""
        file = await self._get(file_id)
        await self._connection.purge(STREAM_FILE_RECORDS, _record(file_id))
        await self._connection.purge(STREAM_FILES, _metadata(file_id))
        await self._connection.purge(STREAM_FILES, _chunks(file.nuid))

    async def delete_expired(self, now: float) -> int:
        """Delete files whose time is over, and what died processes left of uploads; how many
        files. `now`: seconds since 1970. Raises StoreUnavailable."""
        subjects = set(await self._connection.subjects(STREAM_FILES, f"$O.{BUCKET_FILES}.>"))
        files = [each async for each in self._all()]
        over = 0
        for file in files:
            if file.info.expires_at is not None and file.info.expires_at <= now:
                with contextlib.suppress(FileUnknown):  # somebody else deleted it
                    await self.delete(file.info.id)
                    over += 1
            elif file.chunks and _chunks(file.nuid) not in subjects and _is_old(file.record, now):
                log.warning("%s was deleted by hand: removing its record", file.info.id)
                await self._connection.purge(STREAM_FILE_RECORDS, _record(file.info.id))
        await self._delete_orphans(subjects, files, now)
        return over

    async def _delete_orphans(
        self, subjects: set[str], files: Sequence[_Object], now: float
    ) -> None:
        whole = {_chunks(file.nuid) for file in files} | {_metadata(file.info.id) for file in files}
        for subject in subjects - whole:
            last = await self._connection.last(STREAM_FILES, subject)
            if last is not None and _is_old(last, now):
                log.warning("removing what was left of an upload that broke off: %s", subject)
                await self._connection.purge(STREAM_FILES, subject)

    async def _all(self) -> AsyncIterator[_Object]:
        async for stored in self._connection.last_of_all(STREAM_FILE_RECORDS, _ALL_RECORDS):
            file = _decode(stored)
            if file is not None:
                yield file

    async def _get(self, file_id: str) -> _Object:
        file = await self._find(file_id)
        if file is None:
            raise FileUnknown(f"no file {file_id:.64}")
        return file

    async def _find(self, file_id: str) -> _Object | None:
        if FILE_ID_PATTERN.fullmatch(file_id) is None:
            return None
        stored = await self._connection.last(STREAM_FILE_RECORDS, _record(file_id))
        return None if stored is None else _decode(stored)

    async def _chunks(self, file: _Object, first: int) -> AsyncIterator[bytes]:
        """The file's chunks from that one. Raises FileUnknown where one is missing."""
        number, skipped = file.number_near(first)
        left = file.chunks - first
        while left:
            request = {"seq": number, "next_by_subj": _chunks(file.nuid), "batch": CHUNKS_AT_ONCE}
            some = await self._connection.read(STREAM_FILES, request)
            if not some.found:
                raise FileUnknown(f"no file {file.info.id}: it was deleted meanwhile")
            for stored in some.found:
                number = stored.seq + 1
                if skipped:
                    skipped -= 1
                    continue
                left -= 1
                yield stored.data

    async def _clean(self, upload: "_Upload") -> None:
        """Remove what is left of an upload, also if the caller is cancelled; it does not wait for a
        server that is away."""
        task = asyncio.create_task(upload.remove())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        if self._connection.is_connected:
            await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for uploads that broke off to be removed."""
        if self._cleaning:
            await asyncio.wait(self._cleaning)


class _Upload:
    """One file on its way into the store."""

    def __init__(self, connection: Connection, nuid: str, bytes_max: int, full_bytes: int) -> None:
        """`full_bytes`: of all files together, beyond which this one is refused."""
        self._connection, self._nuid, self._bytes_max = connection, nuid, bytes_max
        self._full_bytes = full_bytes
        self._checked_bytes = 0
        self._window = Window(connection, messages=CHUNKS_AT_ONCE)
        self._digest = hashlib.sha256()
        self._rest = bytearray()
        self._bytes = 0
        self._last_part_at = time.monotonic()

    async def add(self, part: bytes) -> None:
        """The next bytes. Raises TooLarge, StoreFull, StoreUnavailable."""
        self._still_mine()
        self._bytes += len(part)
        if self._bytes > self._bytes_max:
            raise TooLarge(f"a file may have {self._bytes_max} bytes (file_mib_max)")
        if self._bytes - self._checked_bytes >= ROOM_CHECK_BYTES:
            await self.check_room()
        self._rest += part
        while len(self._rest) >= CHUNK_BYTES:
            await self._send(bytes(self._rest[:CHUNK_BYTES]))
            del self._rest[:CHUNK_BYTES]

    async def check_room(self, more_bytes: int = 0) -> None:
        """Raise StreamFull if so many more bytes would be too many for the store. An upload is
        checked again and again, as several at once fill it together, and when all of it is
        stored: so those that finish keep to the limit."""
        self._checked_bytes = self._bytes
        used_bytes = int((await self._connection.state(STREAM_FILES))["bytes"])
        if used_bytes + more_bytes > self._full_bytes:
            raise StreamFull(f"{used_bytes} of {self._full_bytes} bytes are used")

    async def finish(self, new: NewFile, described: int = 0, recorded: int = 0) -> FileInfo:
        """Write the record, by which the file is there. Raises as `add` does, and ChangedMeanwhile.

        The numbers of the messages that metadata and record replace; 0 for none.
        """
        if self._rest:
            await self._send(bytes(self._rest))
        await self._window.settle()
        await self.check_room()
        self._still_mine()
        info = FileInfo(
            id=new.id or new_file_id(),
            bytes=self._bytes,
            created_at=int(self._connection.unix_s()),
            filename=new.filename,
            purpose=new.purpose,
            tenant=new.tenant,
            expires_at=new.expires_at,
        )
        numbers = self._window.numbers
        metadata = _object_metadata(info, self._nuid, len(numbers), self._digest.digest())
        headers = {"Nats-Rollup": "sub", H_EXPECTED: str(described)}
        await self._connection.publish(_metadata(info.id), metadata, headers)
        record = _encode(info, self._nuid, numbers)
        await self._connection.publish(_record(info.id), record, {H_EXPECTED: str(recorded)})
        return info

    async def remove(self) -> None:
        """Take all of it out again; `delete_expired` does it where the bus is gone."""
        await self._window.give_up()
        try:
            await self._connection.purge(STREAM_FILES, _chunks(self._nuid))
        except StoreError as error:
            log.warning("an upload that broke off stays until it is found to be old: %s", error)

    async def _send(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        await self._window.send(_chunks(self._nuid), chunk)
        self._last_part_at = time.monotonic()

    def _still_mine(self) -> None:
        """Nobody may have removed the chunks as those of a process that died."""
        if time.monotonic() - self._last_part_at > UPLOAD_STALL_S:
            raise StoreUnavailable(f"nothing of the upload came for {UPLOAD_STALL_S:g} s")


def _chunks(nuid: str) -> str:
    return f"$O.{BUCKET_FILES}.C.{nuid}"


def _metadata(file_id: str) -> str:
    return f"$O.{BUCKET_FILES}.M.{base64.urlsafe_b64encode(file_id.encode()).decode()}"


def _record(file_id: str) -> str:
    return f"$KV.{BUCKET_FILES}.{file_id}"


def _number(stored: Stored | None) -> int:
    """Its place in the stream; 0 where there is none."""
    return 0 if stored is None else stored.seq


def _is_old(stored: Stored, now: float) -> bool:
    return now - stored.stored_at > ORPHANED_S


def _object_metadata(info: FileInfo, nuid: str, chunks: int, digest: bytes) -> bytes:
    """As ADR-20 of NATS has it, for its own tools."""
    return orjson.dumps(
        {
            "name": info.id,
            "metadata": {"filename": info.filename, "purpose": info.purpose},
            "options": {"max_chunk_size": CHUNK_BYTES},
            "bucket": BUCKET_FILES,
            "nuid": nuid,
            "size": info.bytes,
            "mtime": "0001-01-01T00:00:00Z",  # readers take the message's time
            "chunks": chunks,
            "digest": _digest(digest),
        }
    )


def _digest(digest: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(digest).decode()}"


def _encode(info: FileInfo, nuid: str, numbers: Sequence[int]) -> bytes:
    step = max(1, -(-len(numbers) // MARKS_MAX))
    marks = [(chunk, numbers[chunk]) for chunk in range(0, len(numbers), step)]
    if marks and marks[-1][0] < len(numbers) - 1:
        marks.append((len(numbers) - 1, numbers[-1]))
    return orjson.dumps({"info": info, "nuid": nuid, "chunks": len(numbers), "marks": marks})


def _decode(stored: Stored) -> _Object | None:
    """The file; None for what someone put there by hand."""
    try:
        found: Mapping[str, Any] = orjson.loads(stored.data)
        info = FileInfo(**{**found["info"], "purpose": Purpose(found["info"]["purpose"])})
        marks = tuple((int(chunk), int(number)) for chunk, number in found["marks"])
        return _Object(info, stored, found["nuid"], int(found["chunks"]), marks)
    except (ValueError, KeyError, TypeError):
        return None
