"""Files: whole or not there, read from any byte, listed, deleted, replaced, and expired."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from mesh.batch import files
from mesh.batch.files import CHUNK_BYTES
from mesh.batch.records import (
    FileUnknown,
    NewFile,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    derived_file_id,
    new_file_id,
)
from mesh.batch.store import BatchStore
from schemas.batch import FILE_ID_PATTERN, STREAM_FILE_RECORDS, STREAM_FILES, Purpose
from tests.support.batch_regions import opened, pieces
from tests.support.nats_regions import NatsRegions
from tests.support.until import until

MEBIBYTE = 1024 * 1024
SEED = 20261123


def content(size: int) -> bytes:
    return random.Random(SEED).randbytes(size)


def new(name: str = "in.jsonl", **fields: object) -> NewFile:
    return NewFile(**{"filename": name, "purpose": Purpose.BATCH, **fields})


async def whole(store: BatchStore, file_id: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([part async for part in store.files.read(file_id, start, end)])


async def left(store: BatchStore) -> int:
    """Messages in the store, of files and of what should not be there, less a record a file."""
    messages, files = [
        (await store._connection.state(stream))["messages"]
        for stream in (STREAM_FILES, STREAM_FILE_RECORDS)
    ]
    return messages if files == len((await store.files.list(tenant="")).items) else -1


SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7)


@pytest.mark.parametrize("size", SIZES)
async def test_a_file_comes_back_as_it_was(store: BatchStore, size: int):
    data = content(size)
    info = await store.files.put(new("größe ✓.jsonl", tenant="acme", expires_at=9), pieces(data))
    assert FILE_ID_PATTERN.fullmatch(info.id)
    assert (info.bytes, info.filename, info.tenant, info.expires_at) == (
        *(size, "größe ✓.jsonl"),
        *("acme", 9),
    )
    assert await store.files.info(info.id) == info
    assert await whole(store, info.id) == data


async def test_any_part_is_read_without_what_is_before(store: BatchStore):
    """Also where chunks of two uploads are between each other, and only some have marks."""
    print(f"seed {SEED}")
    chance, data = random.Random(SEED), content(40 * CHUNK_BYTES + 5)
    marks_max, files.MARKS_MAX = files.MARKS_MAX, 8
    try:
        both = [store.files.put(new(), pieces(data)) for _ in range(2)]
        infos = await asyncio.gather(*both)
        infos.append(await store.files.put(new(), pieces(data)))
    finally:
        files.MARKS_MAX = marks_max
    for info in infos:
        for _ in range(30):
            start = chance.randrange(len(data) + 1)
            end = chance.choice([None, chance.randrange(len(data) + 1)])
            assert await whole(store, info.id, start, end) == data[start:end], (start, end)
        file = await store.files._get(info.id)
        numbers = [file.number_near(chunk) for chunk in range(file.chunks)]
        assert len(file.marks) <= 9
        assert max(skipped for _, skipped in numbers) <= 5
    assert {skipped for _, skipped in numbers} == {0}  # the last was put alone


async def test_the_object_is_one_to_nats_own_tools(us: NatsRegions, store: BatchStore):
    """nats-py's object store reads it, and compares its length and digest."""
    data = content(3 * CHUNK_BYTES)
    info = await store.files.put(new(), pieces(data))
    other = await us.connect("us", "batch")
    try:
        bucket = await other.jetstream().object_store("files")
        [listed] = await bucket.list()
        assert (listed.name, listed.size, listed.chunks) == (info.id, len(data), 3)
        assert (await bucket.get(info.id)).data == data
        await bucket.delete(info.id)
    finally:
        await other.close()
    with pytest.raises(FileUnknown):
        await whole(store, info.id)
    record = await store._connection.last(STREAM_FILE_RECORDS, f"$KV.files.{info.id}")
    assert record is not None
    await store.files.delete_expired(record.stored_at + files.ORPHANED_S + 1)
    with pytest.raises(FileUnknown):
        await store.files.info(info.id)
    assert (await store.files.list(tenant="")).items == []


async def test_files_are_listed_by_tenant_purpose_and_page(store: BatchStore):
    made = [await store.files.put(new(f"{n}", tenant="a"), pieces(b"x")) for n in range(5)]
    output = new("out", tenant="a", purpose=Purpose.BATCH_OUTPUT)
    await store.files.put(output, pieces(b"y"))
    await store.files.put(new("other's", tenant="b"), pieces(b"z"))
    mine = {"tenant": "a", "purpose": Purpose.BATCH}
    every = (await store.files.list(**mine)).items
    assert sorted(info.id for info in every) == sorted(info.id for info in made)
    assert len((await store.files.list(tenant="a")).items) == 6
    assert (await store.files.list(tenant="")).items == []
    paged, after = [], ""
    for more in (True, True, False):
        page = await store.files.list(**mine, after=after, limit=2)
        assert page.has_more == more
        paged += page.items
        after = page.items[-1].id
    assert paged == every
    backwards = await store.files.list(**mine, newest_first=False)
    assert backwards.items == every[::-1]
    with pytest.raises(FileUnknown):
        await store.files.list(**mine, after=new_file_id())


@pytest.mark.parametrize("name", ["", "file-1", "file-" + "g" * 32, "*", "$O.files.C.>", "a b"])
async def test_what_is_no_file_is_unknown(store: BatchStore, name: str):
    for call in (store.files.info, store.files.delete):
        with pytest.raises(FileUnknown):
            await call(name or new_file_id())
    with pytest.raises(FileUnknown):
        await whole(store, name or new_file_id())


async def test_a_deleted_file_leaves_nothing_and_whoever_reads_it_is_told(store: BatchStore):
    info = await store.files.put(new(), pieces(content(40 * CHUNK_BYTES)))
    with pytest.raises(FileUnknown):
        async for _ in store.files.read(info.id):
            if await left(store):
                await store.files.delete(info.id)
    assert await left(store) == 0


async def test_a_file_too_large_is_refused_while_it_comes(full: BatchStore):
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += MEBIBYTE
            yield bytes(MEBIBYTE)

    with pytest.raises(TooLarge, match="file_mib_max"):
        await full.files.put(new(), endless())
    assert sent == 13 * MEBIBYTE
    assert await left(full) == 0


async def test_an_upload_that_breaks_off_leaves_nothing(store: BatchStore):
    class Hangup(Exception):
        """The client is gone."""

    async def broken() -> AsyncIterator[bytes]:
        async for part in pieces(content(20 * CHUNK_BYTES)):
            yield part
        raise Hangup

    with pytest.raises(Hangup):
        await store.files.put(new(), broken())
    assert await left(store) == 0


async def test_an_upload_that_is_cancelled_leaves_nothing(store: BatchStore):
    async def stalled() -> AsyncIterator[bytes]:
        async for part in pieces(content(20 * CHUNK_BYTES)):
            yield part
        await asyncio.Event().wait()

    upload = asyncio.create_task(store.files.put(new(), stalled()))
    while await left(store) < 10:
        await asyncio.sleep(0.01)
    upload.cancel()
    await asyncio.wait([upload])
    assert upload.cancelled()
    await store.files.close()
    assert await left(store) == 0


async def test_a_full_store_refuses_a_file_and_keeps_those_it_has(full: BatchStore):
    data = content(9 * MEBIBYTE)
    kept = await full.files.put(new(), pieces(data, MEBIBYTE))
    with pytest.raises(StoreFull, match="files_mib = 16"):
        await full.files.put(new(), pieces(data, MEBIBYTE))
    assert (await full.files.list(tenant="")).items == [kept]
    assert await whole(full, kept.id) == data
    await full.files.delete(kept.id)
    again = await full.files.put(new(), pieces(data, MEBIBYTE))
    assert await whole(full, again.id) == data


async def test_uploads_leave_room_for_outputs(full: BatchStore):
    """Announced or not, several at once or one after another; nothing of them stays."""
    limit_bytes = int(full.limits.uploads_mib * MEBIBYTE)
    with pytest.raises(StoreFull, match="20% is for outputs of jobs"):
        await full.files.put(new(), pieces(b""), announced_bytes=limit_bytes + 1)
    data = content(5 * MEBIBYTE)
    puts = [full.files.put(new(), pieces(data, MEBIBYTE)) for _ in range(4)]
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert any(isinstance(one, StoreFull) for one in found)
    used_bytes = (await full._connection.state(STREAM_FILES))["bytes"]
    assert used_bytes <= limit_bytes
    output = derived_file_id("batch_1", "output")
    room = content(int(full.limits.files_mib * MEBIBYTE) - used_bytes - MEBIBYTE)
    assert len(room) > 2 * MEBIBYTE
    await full.files.put(new(id=output, purpose=Purpose.BATCH_OUTPUT), pieces(room, MEBIBYTE))
    assert await whole(full, output) == room


async def test_so_many_files_and_no_more_but_outputs_of_jobs(full: BatchStore):
    for _ in range(full.limits.files_max):
        await full.files.put(new(), pieces(b"x"))
    with pytest.raises(StoreFull, match="files_max"):
        await full.files.put(new(), pieces(b"x"))
    output = derived_file_id("batch_1", "output")
    await full.files.put(new(id=output, purpose=Purpose.BATCH_OUTPUT), pieces(b"x"))


async def test_a_file_of_a_known_id_is_replaced_as_a_whole(store: BatchStore):
    output = derived_file_id("batch_1", "output")
    assert output == derived_file_id("batch_1", "output") != derived_file_id("batch_1", "error")
    for size in (3 * CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES):
        data = content(size)
        await store.files.put(new(id=output, purpose=Purpose.BATCH_OUTPUT), pieces(data))
        assert await whole(store, output) == data
        assert await left(store) == 1 + size // CHUNK_BYTES
    assert len((await store.files.list(tenant="")).items) == 1


async def test_what_is_expired_is_deleted_and_the_rest_stays(store: BatchStore):
    await store.files.put(new("over", expires_at=99), pieces(b"x"))
    await store.files.put(new("just over", expires_at=100), pieces(b"x"))
    await store.files.put(new("not yet", expires_at=101), pieces(b"x"))
    await store.files.put(new("for ever"), pieces(b"x"))
    assert await store.files.delete_expired(100) == 2
    names = {info.filename for info in (await store.files.list(tenant="")).items}
    assert names == {"not yet", "for ever"}
    assert await left(store) == 4


@pytest.mark.parametrize("has_metadata", [False, True])
async def test_what_a_killed_upload_left_is_removed_when_it_is_old(
    us: NatsRegions, store: BatchStore, has_metadata: bool
):
    kept = await store.files.put(new(), pieces(b"kept"))
    async with opened(us) as killed:
        upload = files._Upload(killed._connection, "ABCDEFGHIJKLMNOPQRSTUV", MEBIBYTE, MEBIBYTE)
        await upload.add(content(3 * CHUNK_BYTES))
        await upload._window.settle()
        if has_metadata:
            info = await upload.finish(new())
            record = f"$KV.files.{info.id}"
            await killed._connection.purge(STREAM_FILE_RECORDS, record)
    last = await store._connection.last(STREAM_FILES, "$O.files.C.ABCDEFGHIJKLMNOPQRSTUV")
    assert last is not None
    await store.files.delete_expired(last.stored_at + files.ORPHANED_S)
    assert await left(store) == 5 + has_metadata
    await store.files.delete_expired(last.stored_at + files.ORPHANED_S + 10)
    assert await left(store) == 2
    assert await whole(store, kept.id) == b"kept"


async def test_an_upload_that_stalled_too_long_is_not_finished(store: BatchStore, monkeypatch):
    """Its first chunks may have been removed as old ones meanwhile."""

    async def stalled() -> AsyncIterator[bytes]:
        yield content(CHUNK_BYTES)
        monkeypatch.setattr(files, "UPLOAD_STALL_S", -1.0)

    with pytest.raises(StoreUnavailable, match="nothing of the upload came"):
        await store.files.put(new(), stalled())
    assert await left(store) == 0


async def test_32_mib_pass_in_bounded_memory(store: BatchStore):
    """Neither writer nor reader waits for the whole: some chunks are under way, not more."""
    part, parts, digest = content(MEBIBYTE), 32, hashlib.sha256()
    ahead = 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal ahead
        for _ in range(parts):
            digest.update(part)
            yield part
            ahead = max(ahead, len(store._connection._awaited))

    info = await store.files.put(new(), upload())
    read = hashlib.sha256()
    async for piece in store.files.read(info.id):
        assert len(piece) <= CHUNK_BYTES
        read.update(piece)
    assert read.digest() == digest.digest()
    assert ahead <= files.CHUNKS_AT_ONCE
    await until(lambda: not store._connection._awaited)
