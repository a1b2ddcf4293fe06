"""Checking a job and finishing it, on a real store, and both again after an end in the middle."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from infra.batch_table import BatchTable
from infra.process import end_all
from mesh.batch.job_tasks import JobTasks, stored
from mesh.batch.output_line import answered
from mesh.batch.records import Line, LinesGone, Result, StoreError, StoreFull, new_job_id
from mesh.batch.store import BatchStore
from schemas.batch import STREAM_RESULTS, BatchJob, JobStatus, Purpose, Task
from schemas.http import CHAT
from tests.support.batch_store import (
    batch_store,
    make_streams,
    output_lines,
    request_line,
    submit,
)
from tests.support.nats_server import NatsServer

LIMITS = BatchTable(lines_max=100, files_mib=64, results_mib=16, lines_mib=16, file_mib_max=20)


@pytest.fixture
async def store(nats_server: NatsServer) -> AsyncIterator[BatchStore]:
    await make_streams(nats_server.url, LIMITS)
    async with batch_store(nats_server.url, LIMITS) as opened:
        yield opened


def tasks_of(store: BatchStore, later_s: float = 0.0) -> JobTasks:
    return JobTasks(store, lambda: time.time() + later_s)


def file_of(good: int, wrong: int = 0) -> bytes:
    lines = [request_line(f"good-{n}") for n in range(good)]
    lines += [request_line(f"wrong-{n}", method="GET") for n in range(wrong)]
    return b"".join(lines)


async def answer(store: BatchStore, job: BatchJob, number: int, custom_id: str) -> None:
    result = answered(job.id, number, custom_id, 200, "r-1", b'{"choices": []}')
    await store.results.put(stored(job.id, number, custom_id, result))


async def test_a_job_that_has_ended_has_the_tokens_of_its_output(store) -> None:
    """Runners may have written what they saw computed twice."""
    job = await submit(store, file_of(3))
    await tasks_of(store).check(job.id)
    body = b'{"usage": {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}}'
    for number in (1, 2, 3):
        result = answered(job.id, number, f"good-{number - 1}", 200, "r-1", body)
        await store.results.put(stored(job.id, number, f"good-{number - 1}", result))
    await store.jobs.update(job.id, lambda job: replace(job, input_tokens=500, output_tokens=1))
    await tasks_of(store).finish(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.input_tokens, found.output_tokens) == (JobStatus.COMPLETED, 90, 12)


async def taken(store: BatchStore, job: BatchJob) -> list[str]:
    lines = []
    while some := await store.lines.take(job.id, 100, 0.2):
        lines += some
    return [each.line.custom_id for each in lines]


async def test_a_checked_job_is_in_progress_and_its_lines_are_queued(store) -> None:
    job = await submit(store, file_of(20, 3))
    for _ in range(2):  # the second time nothing is left to do
        await tasks_of(store).check(job.id)
        found = await store.jobs.get(job.id)
        assert (found.status, found.total, found.failed) == (JobStatus.IN_PROGRESS, 23, 3)
    assert sorted(await taken(store, job)) == sorted(f"good-{n}" for n in range(20))
    assert await store.results.count(job.id) == 3


async def test_a_check_that_ended_in_the_middle_is_done_again(store) -> None:
    job = await submit(store, file_of(30, 2))
    for wait_s in (0.0, 0.01, 0.03, 0.06):
        task = asyncio.create_task(tasks_of(store).check(job.id))
        await asyncio.sleep(wait_s)
        await end_all([task])
    await tasks_of(store).check(job.id)
    assert (await store.jobs.get(job.id)).total == 32
    assert sorted(await taken(store, job)) == sorted(f"good-{n}" for n in range(30))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (file_of(1) + b"{\n", "invalid_json_line"),
        (file_of(1) * 2, "duplicate_custom_id"),
        (b"\xff\xfe\n", "invalid_encoding"),
        (file_of(101), "too_many_lines"),
    ],
)
async def test_a_file_that_can_not_be_used_fails_its_job(store, data, code) -> None:
    job = await submit(store, data)
    await tasks_of(store).check(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.errors[0].code) == (JobStatus.FAILED, code)
    assert found.failed_at is not None
    with pytest.raises(LinesGone):
        await store.lines.queued(job.id)


async def test_a_file_that_was_deleted_fails_its_job(store) -> None:
    job = await submit(store, file_of(1))
    await store.files.delete(job.input_file_id)
    await tasks_of(store).check(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.errors[0].code) == (JobStatus.FAILED, "file_not_found")


async def test_a_job_of_wrong_lines_alone_is_finished(store) -> None:
    job = await submit(store, file_of(0, 4))
    await tasks_of(store).check(job.id)
    waiting = {(await store.tasks.take(0.2)).task for _ in range(2)}
    assert waiting == {Task.CHECK, Task.FINISH}
    await tasks_of(store).finish(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.completed, found.failed) == (JobStatus.COMPLETED, 0, 4)
    assert found.output_file_id is None
    assert len(await output_lines(store, found.error_file_id)) == 4


async def test_a_job_is_finished_when_all_lines_have_results(store) -> None:
    job = await submit(store, file_of(5, 1))
    await tasks_of(store).check(job.id)
    for number in range(1, 6):
        await tasks_of(store).finish(job.id)  # too early: nothing happens
        assert (await store.jobs.get(job.id)).status is JobStatus.IN_PROGRESS
        await answer(store, job, number, f"good-{number - 1}")
    for _ in range(2):
        await tasks_of(store).finish(job.id)
        found = await store.jobs.get(job.id)
        assert (found.status, found.completed, found.failed) == (JobStatus.COMPLETED, 5, 1)
    output = await output_lines(store, found.output_file_id)
    errors = await output_lines(store, found.error_file_id)
    assert (sorted(output), sorted(errors)) == ([f"good-{n}" for n in range(5)], ["wrong-0"])
    assert errors["wrong-0"]["error"]["code"] == "invalid_method"
    assert output["good-0"]["response"]["body"] == {"choices": []}
    assert await store.results.count(job.id) == 0
    info = await store.files.info(found.output_file_id)
    assert (info.purpose, info.filename) == (Purpose.BATCH_OUTPUT, f"{job.id}_output.jsonl")
    assert info.expires_at is not None


async def test_a_finish_that_ended_in_the_middle_is_done_again(store) -> None:
    job = await submit(store, file_of(20, 2))
    await tasks_of(store).check(job.id)
    for number in range(1, 21):
        await answer(store, job, number, f"good-{number - 1}")
    for wait_s in (0.0, 0.01, 0.02, 0.04, 0.08):
        task = asyncio.create_task(tasks_of(store).finish(job.id))
        await asyncio.sleep(wait_s)
        await end_all([task])
    await tasks_of(store).finish(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.completed, found.failed) == (JobStatus.COMPLETED, 20, 2)
    assert len(await output_lines(store, found.output_file_id)) == 20


@pytest.mark.parametrize("status", [JobStatus.EXPIRED, JobStatus.CANCELLED])
async def test_lines_that_were_left_have_an_error(store, status) -> None:
    job = await submit(store, file_of(6))
    await tasks_of(store).check(job.id)
    first, *others = await store.lines.take(job.id, 3, 0.2)  # of which a runner has two more
    await answer(store, job, first.line.number, first.line.custom_id)
    await store.lines.ack(first)
    later_s = 0.0
    if status is JobStatus.EXPIRED:
        later_s = 3601.0
    else:
        now = int(time.time())
        change = {"status": JobStatus.CANCELLING, "cancelling_at": now}
        await store.jobs.update(job.id, lambda job: replace(job, **change))
    await tasks_of(store, later_s).finish(job.id)
    late = others[0].line
    assert await store.results.get(job.id, late.number) is None
    found = await store.jobs.get(job.id)
    assert (found.status, found.completed, found.failed) == (status, 1, 5)
    output = await output_lines(store, found.output_file_id)
    errors = await output_lines(store, found.error_file_id)
    assert sorted([*output, *errors]) == [f"good-{n}" for n in range(6)]
    assert {each["error"]["code"] for each in errors.values()} == {f"batch_{status}"}


async def test_a_job_that_is_cancelled_before_its_check_has_no_lines(store) -> None:
    job = await submit(store, file_of(6), check=False)
    change = {"status": JobStatus.CANCELLING, "cancelling_at": int(time.time())}
    await store.jobs.update(job.id, lambda job: replace(job, **change))
    await tasks_of(store).check(job.id)
    task = await store.tasks.take(1.0)
    assert task is not None
    assert task.task is Task.FINISH
    await tasks_of(store).finish(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.total, found.output_file_id) == (JobStatus.CANCELLED, 0, None)


async def test_a_job_that_is_checked_after_its_window_expires(store) -> None:
    job = await submit(store, file_of(6))
    await tasks_of(store, 3601.0).check(job.id)
    assert (await store.jobs.get(job.id)).status is JobStatus.EXPIRED


async def test_lines_that_find_no_room_wait_outside(store) -> None:
    text = "x" * 100_000
    data = b"".join(request_line(f"{n}", content=text) for n in range(90))
    first, second = await submit(store, data), await submit(store, data)
    await tasks_of(store).check(first.id)
    with pytest.raises(StoreError):
        await tasks_of(store).check(second.id)
    assert [each async for each in store.lines.left(second.id)] == []
    await store.lines.remove(first.id)
    await tasks_of(store).check(second.id)
    assert (await store.jobs.get(second.id)).status is JobStatus.IN_PROGRESS


async def test_a_file_of_more_lines_than_the_queue_holds_fails_its_job(store) -> None:
    data = b"".join(request_line(f"{n}", content="x" * 180_000) for n in range(98))
    job = await submit(store, data)
    await tasks_of(store).check(job.id)
    assert (await store.jobs.get(job.id)).errors[0].code == "file_too_large"


@pytest.mark.parametrize("end", ["cancelled", "deleted"])
async def test_a_check_that_is_repeated_after_its_job_ended_leaves_nothing(store, end) -> None:
    """The runner that queued lines was killed before it could remove them."""
    job = await submit(store, file_of(30))
    await store.lines.add([Line(job=job.id, number=1, custom_id="a", url=CHAT, body=b"{}")])
    if end == "cancelled":
        change = {"status": JobStatus.CANCELLED, "cancelled_at": int(time.time())}
        await store.jobs.update(job.id, lambda job: replace(job, **change))
    else:
        await store.files.delete(job.input_file_id)
    await tasks_of(store).check(job.id)
    assert (await store.jobs.get(job.id)).is_over
    assert [each async for each in store.lines.left(job.id)] == []


async def test_results_of_wrong_lines_are_stored_once_though_lines_find_no_room(store) -> None:
    """Runners count results as they come: counted twice, the job would seem to be done."""
    text = "x" * 100_000
    data = b"".join(request_line(f"{n}", content=text) for n in range(90))
    first = await submit(store, data)
    second = await submit(store, data + request_line("wrong", method="GET"))
    await tasks_of(store).check(first.id)
    heads = store.results.follow()
    head = asyncio.create_task(anext(heads))
    for _ in range(2):
        with pytest.raises(StoreError):
            await tasks_of(store).check(second.id)
        found = [(await head).number]
    await store.lines.remove(first.id)
    await tasks_of(store).check(second.id)
    await answer(store, second, 90, "89")
    found.append((await anext(heads)).number)
    await heads.aclose()
    assert found == [91, 90]


@pytest.mark.parametrize("status", [JobStatus.EXPIRED, JobStatus.CANCELLED])
async def test_a_job_ends_though_the_store_of_results_is_full(store, status) -> None:
    job = await submit(store, file_of(40, 1))
    await tasks_of(store).check(job.id)
    await answer(store, job, 7, "good-6")
    other = new_job_id()
    with pytest.raises(StoreFull):
        for number in itertools.count(1):
            size = 200_000 if number < 80 else 50
            body = b"x" * size
            await store.results.put(
                Result(job=other, number=number, status=200, custom_id="", body=body)
            )
    later_s = 3601.0 if status is JobStatus.EXPIRED else 0.0
    if status is JobStatus.CANCELLED:
        change = {"status": JobStatus.CANCELLING, "cancelling_at": int(time.time())}
        await store.jobs.update(job.id, lambda job: replace(job, **change))
    await tasks_of(store, later_s).finish(job.id)
    found = await store.jobs.get(job.id)
    assert (found.status, found.completed, found.failed) == (status, 1, 40)
    errors = await output_lines(store, found.error_file_id)
    assert [errors[f"good-{n}"]["error"]["code"] for n in (0, 39)] == [f"batch_{status}"] * 2
    assert list(errors)[-2:] == ["good-39", "wrong-0"]


@pytest.mark.parametrize("at", range(3))
async def test_a_runner_that_stood_still_does_not_replace_whole_files(store, at) -> None:
    """Another one has finished the job while this one read results; they are removed by then."""
    total = 600
    limits = BatchTable(**{**LIMITS.model_dump(), "lines_max": total})
    async with batch_store(store._connection.client.connected_url.geturl(), limits) as other:
        job = await submit(store, file_of(total))
        await tasks_of(other).check(job.id)
        for number in range(1, total + 1):
            await answer(store, job, number, f"good-{number - 1}")
        read, still, on = store._connection.read, asyncio.Event(), asyncio.Event()
        reads = itertools.count()

        async def stands_still(stream, request):
            if stream == STREAM_RESULTS and "multi_last" in request and next(reads) == at:
                still.set()
                await on.wait()
            return await read(stream, request)

        store._connection.read = stands_still
        stalled = asyncio.create_task(tasks_of(store).finish(job.id))
        await still.wait()
        await tasks_of(other).finish(job.id)
        on.set()
        await asyncio.gather(stalled, return_exceptions=True)
        found = await other.jobs.get(job.id)
        assert (found.status, found.completed) == (JobStatus.COMPLETED, total)
        assert len(await output_lines(other, found.output_file_id)) == total


async def test_a_job_that_is_gone_leaves_nothing(store) -> None:
    job = await submit(store, file_of(3))
    await tasks_of(store).check(job.id)
    await store.jobs.delete(job.id)
    await tasks_of(store).finish(job.id)
    assert [each async for each in store.lines.left(job.id)] == []
