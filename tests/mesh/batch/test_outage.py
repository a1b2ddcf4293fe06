"""nats-server dies in the middle of everything: data survive, callers are told, work goes on."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mesh.batch import connection, queues
from mesh.batch.files import CHUNK_BYTES
from mesh.batch.records import FileUnknown, NewFile, StoreUnavailable, StreamsMissing, new_job_id
from mesh.batch.store import BatchStore
from schemas.batch import STREAM_FILES, STREAM_JOBS, Purpose, Task
from tests.mesh.batch.test_queues import a_line, a_result
from tests.support.batch_regions import opened, pieces, some_job
from tests.support.nats_regions import NatsRegions
from tests.support.until import until

WAIT_S = 30.0
NEW = NewFile(filename="in.jsonl", purpose=Purpose.BATCH)


async def kill_and_start(us: NatsRegions) -> None:
    os.kill(us.pid("us"), signal.SIGKILL)
    await us.stop_one("us")
    await us.start_one("us")


async def again(call) -> object:
    """As a caller does who is told that the store is not there."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_everything_survives_the_server_and_goes_on(us: NatsRegions, store: BatchStore):
    data, job = os.urandom(10 * CHUNK_BYTES), some_job()
    file = await store.files.put(NEW, pieces(data))
    await store.jobs.create(job)
    await store.tasks.add(Task.CHECK, job.id)
    await store.tasks.add(Task.FINISH, job.id)
    task = await store.tasks.take(WAIT_S)
    await store.lines.add(a_line(job.id, number) for number in range(1, 11))
    await store.lines.make_ready(job.id, 100)
    [taken] = await store.lines.take(job.id, 1, WAIT_S)
    await store.results.put(a_result(job.id, 1))
    following, watching = store.results.follow(), store.jobs.watch()
    assert (await anext(following)).number == 1
    assert await anext(watching) == job
    assert (await store.tasks.take(WAIT_S)).task == Task.FINISH
    next_head, next_job = (asyncio.create_task(anext(each)) for each in (following, watching))

    await kill_and_start(us)

    assert b"".join([part async for part in store.files.read(file.id)]) == data
    assert await again(lambda: store.jobs.get(job.id)) == job
    changed = await store.jobs.update(job.id, lambda found: replace(found, total=10))
    assert not await store.tasks.add(Task.CHECK, job.id)  # it is taken, and known to be
    await store.tasks.ack(task)
    assert await store.tasks.add(Task.CHECK, job.id)
    assert not await store.results.put(a_result(job.id, 1))
    await store.lines.ack(taken)
    rest = []
    while len(rest) < 9:
        rest += await again(lambda: store.lines.take(job.id, 9, WAIT_S))
    assert sorted(each.line.number for each in rest) == list(range(2, 11))
    assert await store.results.put(a_result(job.id, 2))
    async with asyncio.timeout(WAIT_S):
        assert (await next_head).number == 2
        assert await next_job == changed
    for each in (following, watching):
        await each.aclose()


async def test_who_waits_is_told_at_once_that_the_server_is_gone(
    us: NatsRegions, store: BatchStore
):
    """Not when the time of a request is over."""
    job = new_job_id()
    await store.lines.add([a_line(job, 1)])
    await store.lines.make_ready(job, 10)
    await store.lines.take(job, 1, WAIT_S)
    waiting = asyncio.create_task(store.lines.take(job, 1, 3600))
    await until(lambda: store.lines._pullers[job]._left)
    await kill_and_start(us)
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(WAIT_S):
            await waiting


async def test_without_a_server_calls_end_in_time(us: NatsRegions, store: BatchStore, monkeypatch):
    monkeypatch.setattr(connection, "REQUEST_S", 0.2)
    await us.stop_one("us")
    try:
        job = some_job()
        calls = (
            store.jobs.create(job),
            store.jobs.get(job.id),
            store.files.put(NEW, pieces(b"x")),
            store.files.list(tenant=""),
            store.files.delete_expired(0),
            store.tasks.add(Task.CHECK, job.id),
            store.tasks.take(0.1),
            store.lines.add([a_line(job.id, 1)]),
            store.lines.make_ready(job.id, 1),
            store.lines.queued(job.id),
            store.results.put(a_result(job.id, 1)),
            store.results.count(job.id),
        )
        for call in calls:
            with pytest.raises(StoreUnavailable):
                async with asyncio.timeout(WAIT_S):
                    await call
        assert not store.is_connected
    finally:
        await us.start_one("us")


async def test_an_upload_across_a_restart_is_whole_or_not_there(us: NatsRegions, store: BatchStore):
    data, half = os.urandom(60 * CHUNK_BYTES), asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        sent = 0
        async for part in pieces(data, CHUNK_BYTES):
            yield part
            sent += len(part)
            if sent == len(data) // 2:
                half.set()
                await asyncio.sleep(0.05)

    task = asyncio.create_task(store.files.put(NEW, upload()))
    await half.wait()
    await kill_and_start(us)
    await asyncio.wait([task])
    await again(lambda: store.files.list(tenant=""))
    if task.exception() is None:
        info = task.result()
        assert b"".join([part async for part in store.files.read(info.id)]) == data
    else:
        assert isinstance(task.exception(), StoreUnavailable)
        assert (await store.files.list(tenant="")).items == []
    await again(lambda: store.files.delete_expired(2**33))
    whole = len((await store.files.list(tenant="")).items)
    assert await store._connection.count(STREAM_FILES, ">") == whole * 61


async def test_a_download_across_a_restart_goes_on_where_it_was(us: NatsRegions, store: BatchStore):
    data = os.urandom(60 * CHUNK_BYTES)
    file = await store.files.put(NEW, pieces(data))
    got, restarts = bytearray(), 0

    async def read_on() -> None:
        nonlocal restarts
        async for part in store.files.read(file.id, len(got)):
            got.extend(part)
            if len(got) > len(data) // 2 and not restarts:
                restarts += 1
                await kill_and_start(us)

    await again(read_on)
    assert bytes(got) == data


async def test_lines_of_two_runners_across_restarts_are_answered_once(
    us: NatsRegions, store: BatchStore, monkeypatch
):
    """Each line is acknowledged after its result is stored, as runners do."""
    monkeypatch.setattr(queues, "ACK_WAIT_S", 2.0)  # of what was on its way to them
    job, total = new_job_id(), 600
    await store.lines.make_ready(job, 100)
    stored: Counter[int] = Counter()

    async def add() -> None:
        await again(lambda: store.lines.add(a_line(job, n) for n in range(1, total + 1)))

    async def run(where: BatchStore) -> None:
        while await again(lambda: where.results.count(job)) < total:
            for each in await again(lambda: where.lines.take(job, 20, 0.2)):
                number = each.line.number
                result = a_result(job, number, str(id(where)).encode())
                stored[number] += bool(await again(lambda r=result: where.results.put(r)))
                await again(lambda e=each: where.lines.ack(e))

    async with opened(us) as other:
        runners = [asyncio.create_task(each) for each in (run(store), run(other))]
        adding = asyncio.create_task(add())
        for _ in range(2):
            before = await again(lambda: store.results.count(job))
            while await again(lambda: store.results.count(job)) < min(before + 100, total):
                await asyncio.sleep(0.01)
            await kill_and_start(us)
        async with asyncio.timeout(90):
            await asyncio.gather(*runners, adding)
    numbers = [each.number async for each in store.results.read(job, total)]
    assert numbers == list(range(1, total + 1))
    assert max(stored.values()) == 1
    # One whose answer was lost is stored and was not counted: it is there once all the same.
    assert total - sum(stored.values()) < 100


async def test_streams_made_anew_are_found_and_followed(us: NatsRegions, store: BatchStore):
    """`follow` had seen messages of higher numbers than the new stream has."""
    for _ in range(5):
        await store.jobs.create(some_job())
    watching = store.jobs.watch()
    seen = {(await anext(watching)).id for _ in range(5)}
    setup = await us.connect("us", "batch-setup")
    try:
        await setup.jetstream().delete_stream(STREAM_JOBS)
        with pytest.raises(StreamsMissing, match=f"lacks {STREAM_JOBS}: run `mesh infra streams`"):
            await store.check()
        with pytest.raises(StreamsMissing):
            await store.jobs.create(some_job())
    finally:
        await setup.close()
        await us.set_up("us")
    await store.check()
    new = some_job()
    await store.jobs.create(new)
    async with asyncio.timeout(30):
        found = await anext(watching)
    assert found.id == new.id and found.id not in seen
    await watching.aclose()


async def test_a_store_whose_streams_are_missing_says_what_to_do(us: NatsRegions):
    async with opened(us) as store:
        setup = await us.connect("us", "batch-setup")
        try:
            for stream in (STREAM_FILES, "BATCH_TASKS"):
                await setup.jetstream().delete_stream(stream)
            with pytest.raises(StoreUnavailable, match="mesh infra streams"):
                await store.files.put(NEW, pieces(b"x"))
            with pytest.raises((StoreUnavailable, FileUnknown)):
                await store.files.info("file-" + "0" * 32)
            with pytest.raises(StoreUnavailable, match="mesh infra streams"):
                await store.tasks.add(Task.CHECK, new_job_id())
            with pytest.raises(StoreUnavailable, match="mesh infra streams"):
                await store.tasks.take(0.1)
            await us.set_up("us")
            await store.files.put(NEW, pieces(b"x"))
        finally:
            await setup.close()
            await us.set_up("us")
