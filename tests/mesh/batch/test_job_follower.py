"""What a batch runner does with whole jobs: its tasks when it ends, and jobs that are gone."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from infra.batch_table import BatchTable
from infra.process import end_all
from mesh.batch import job_follower
from mesh.batch.job_follower import JobFollower, JobMetrics
from mesh.batch.job_tasks import JobTasks
from mesh.batch.output_line import Tokens
from mesh.batch.records import FileUnknown, Line, NewFile, StoreUnavailable
from mesh.batch.store import BatchStore
from schemas.batch import JobStatus, Purpose
from schemas.http import CHAT
from tests.support.batch_store import batch_store, make_streams, once, request_line, submit
from tests.support.nats_server import NatsServer
from tests.support.until import until

LIMITS = BatchTable(files_mib=64, results_mib=16, lines_mib=16, file_mib_max=20)
NEW = NewFile(filename="in.jsonl", purpose=Purpose.BATCH)
WAIT_S = 40.0  # shorter than a task stays with a runner that says nothing


@pytest.fixture
async def stores(nats_server: NatsServer) -> AsyncIterator[tuple[BatchStore, BatchStore]]:
    """Of two runners."""
    await make_streams(nats_server.url, LIMITS)
    async with (
        batch_store(nats_server.url, LIMITS) as one,
        batch_store(nats_server.url, LIMITS) as other,
    ):
        yield one, other


@dataclass(frozen=True, slots=True)
class EndlessTasks(JobTasks):
    """Whose checks never end."""

    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def check(self, job_id: str) -> None:
        self.began.set()
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class OftenAway(JobTasks):
    """Whose store is away during the first checks."""

    tried_at: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def check(self, job_id: str) -> None:
        self.tried_at.append(time.monotonic())
        if len(self.tried_at) < 6:
            raise StoreUnavailable("the connection to nats-server was lost")
        self.done.set()


@contextlib.asynccontextmanager
async def following(store: BatchStore, tasks: JobTasks | None = None) -> AsyncIterator[JobFollower]:
    clock = asyncio.get_running_loop().time
    tasks = tasks or JobTasks(store, store.unix_s)
    follower = JobFollower(store, tasks, lambda event: None, JobMetrics(), clock)
    running = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        await end_all([running])
        await follower.stop()


async def test_a_runner_that_ends_keeps_no_task(stores) -> None:
    """It asked for a task before, which the server gives it afterwards."""
    store, other = stores
    async with following(store) as follower:
        await until(lambda: store.tasks._puller is not None and store.tasks._puller._left)
        await follower.stop()
        job = await submit(other, request_line("a"))
        async with asyncio.timeout(WAIT_S):
            while (taken := await other.tasks.take(1.0)) is None:
                pass
        assert taken.job == job.id


async def test_a_task_is_given_back_once(stores) -> None:
    """The second time it would be taken from the runner that does it by then."""
    store, other = stores
    tasks = EndlessTasks(store, time.time)
    async with following(store, tasks) as follower:
        await submit(other, request_line("a"))
        await tasks.began.wait()
        await follower.stop()
        async with asyncio.timeout(WAIT_S):
            while await other.tasks.take(1.0) is None:
                pass
        await follower.stop()
        assert await other.tasks.take(1.0) is None


async def test_a_check_is_done_soon_after_the_store_was_away_often(stores, monkeypatch) -> None:
    """Not after a minute, as one that the store refuses each time."""
    monkeypatch.setattr(job_follower, "TASK_RETRY_S", 0.2)
    monkeypatch.setattr(job_follower, "AWAY_RETRY_S_MAX", 0.4)
    store, other = stores
    tasks = OftenAway(store, time.time)
    async with following(store, tasks):
        await submit(other, request_line("a"))
        async with asyncio.timeout(WAIT_S):
            await tasks.done.wait()
    assert max(later - at for at, later in itertools.pairwise(tasks.tried_at)) < 2.0


async def test_a_job_that_is_deleted_before_its_end_is_forgotten(stores, monkeypatch) -> None:
    """As by a router whose task for it found no room; nobody who watches is told."""
    monkeypatch.setattr("mesh.batch.job_follower.CHECK_LATE_S", -1.0)
    monkeypatch.setattr("mesh.batch.job_follower.REPAIR_S", 0.1)
    store, other = stores
    async with following(store, EndlessTasks(store, time.time)) as follower:
        job = await submit(other, request_line("a"), check=False)
        await until(lambda: list(follower))
        await other.jobs.delete(job.id)
        await until(lambda: not list(follower))


async def test_tokens_computed_while_others_are_written_count_once(stores, monkeypatch) -> None:
    monkeypatch.setattr("mesh.batch.job_follower.WRITE_S", 0.0)
    monkeypatch.setattr("mesh.batch.job_follower.LOOK_S", 0.001)
    store, other = stores
    job = await submit(other, request_line("a"), check=False)
    in_progress = replace(job, status=JobStatus.IN_PROGRESS, total=1000)
    await other.jobs.update(job.id, lambda _: in_progress)
    async with following(store) as follower:
        await until(lambda: list(follower))
        for _ in range(200):
            follower.computed(job.id, Tokens(10, 1))
            await asyncio.sleep(0.001)
        async with asyncio.timeout(WAIT_S):
            while (found := await other.jobs.get(job.id)).tokens < 2200:
                await asyncio.sleep(0.01)
    assert (found.input_tokens, found.output_tokens) == (2000, 200)


async def test_jobs_that_are_over_are_left(stores, monkeypatch) -> None:
    """Another runner has removed their lines; each pull costs a subscription."""
    monkeypatch.setattr("mesh.batch.job_follower.CLEAN_S", 0.1)
    store, other = stores
    job = await submit(other, request_line("a"), check=False)
    await store.lines.add([Line(job=job.id, number=1, custom_id="a", url=CHAT, body=b"{}")])
    await store.lines.make_ready(job.id, 10)
    async with following(store) as follower:
        await until(lambda: list(follower))
        assert await store.lines.take(job.id, 1, 5.0)
        await other.lines.remove(job.id)
        await other.jobs.delete(job.id)
        follower._gone(job.id)
        await until(lambda: not store.lines.joined())


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_wrong_clock_of_the_machine_neither_ends_nor_prolongs_a_job(
    stores, monkeypatch, ahead_s
) -> None:
    """Jobs expire by the store's clock."""
    monkeypatch.setattr("mesh.batch.job_follower.REPAIR_S", 0.2)
    monkeypatch.setattr(time, "time", lambda unix_s=time.time: unix_s() + ahead_s)
    store, _ = stores
    await store.check()
    assert store.unix_s() == pytest.approx(time.time() - ahead_s, abs=2.0)
    began_at = int(store.unix_s())
    data = request_line("1")
    job = await submit(store, data, created_at=began_at, expires_at=began_at + 600)
    over = await submit(store, data, created_at=began_at - 600, expires_at=began_at - 1)
    async with following(store):
        async with asyncio.timeout(WAIT_S):
            while (await store.jobs.get(job.id)).status is JobStatus.VALIDATING:
                await asyncio.sleep(0.05)
            while not (await store.jobs.get(over.id)).is_over:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # some looks for jobs to finish
    assert (await store.jobs.get(job.id)).status is JobStatus.IN_PROGRESS
    found = await store.jobs.get(over.id)
    assert found.status is JobStatus.EXPIRED
    assert found.expired_at == pytest.approx(store.unix_s(), abs=WAIT_S)


async def test_a_runner_whose_clock_is_ahead_removes_no_upload(stores, monkeypatch) -> None:
    monkeypatch.setattr("mesh.batch.job_follower.CLEAN_S", 0.1)
    store, other = stores
    data = bytes(range(256)) * 2048
    half, cleaned = asyncio.Event(), asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        half.set()
        await cleaned.wait()
        yield data[len(data) // 2 :]

    uploading = asyncio.create_task(other.files.put(NEW, upload()))
    await half.wait()
    over = await other.files.put(replace(NEW, expires_at=1), once(b"x"))
    monkeypatch.setattr(time, "time", lambda unix_s=time.time: unix_s() + 86_400)
    async with following(store):
        with contextlib.suppress(FileUnknown):
            while await other.files.info(over.id):
                await asyncio.sleep(0.01)
    cleaned.set()
    made = await uploading
    assert b"".join([part async for part in other.files.read(made.id)]) == data
