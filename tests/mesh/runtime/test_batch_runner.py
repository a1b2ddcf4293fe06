"""Batch runners from end to end: store, bus, agents and engines are real."""

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from mesh.adapters.usage_reader import read_day
from mesh.batch.job_tasks import JobTasks
from mesh.batch.records import FileUnknown, NewFile, Result, StoreFull, StoreUnavailable, new_job_id
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelRule
from mesh.core.offline import events as oev
from mesh.core.offline.forecast import ForecastState, ModelHistory
from mesh.runtime.name_claim import NameTaken
from schemas.batch import JobStatus, Purpose, Task
from schemas.usage import UsageKind
from tests.support.batch_mesh import BatchMesh, batch_mesh
from tests.support.batch_regions import batch_toml
from tests.support.batch_store import once, output_lines, request_line, submit
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.runner_process import runner_process
from tests.support.scripted_engine import (
    USAGE,
    Behaviour,
    ScriptedEngine,
    fail,
    say,
    scripted_engine,
)
from tests.support.until import PATIENCE_S

TOML = batch_toml().replace('["batch-0"]', '["batch-0", "batch-1"]')
TOML += "\n[tenants.acme.limits]\ntokens_per_day = 1_000_000\n"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(TOML)
    return path


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[NatsRegions]:
    with running_regions(tmp_path, toml=TOML) as started:
        yield started


@pytest.fixture
async def mesh(regions: NatsRegions) -> AsyncIterator[BatchMesh]:
    async with batch_mesh(regions) as started:
        yield started


@pytest.fixture
async def engine(mesh: BatchMesh) -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as started:
        await mesh.agent("us-0", started)
        yield started


def file_of(good: int, wrong: int = 0) -> bytes:
    lines = [request_line(f"good-{n}", content=f"line {n}") for n in range(good)]
    step = good // (wrong + 1)
    for n in range(wrong):
        lines.insert(n * (step + 1), request_line(f"wrong-{n}", method="GET"))
    return b"".join(lines)


def names(good: int, wrong: int = 0) -> list[str]:
    return sorted([f"good-{n}" for n in range(good)] + [f"wrong-{n}" for n in range(wrong)])


def behind(gate: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    """Answers only once the gate is open."""

    async def waits(request: web.Request, body: dict) -> web.StreamResponse:
        await gate.wait()
        return await behaviour(request, body)

    return waits


def first(count: int, gate: asyncio.Event) -> Behaviour:
    """Answers the first so many requests, and others once the gate is open."""
    left = [count]

    async def answers(request: web.Request, body: dict) -> web.StreamResponse:
        left[0] -= 1
        if left[0] < 0:
            await gate.wait()
        return await say("hello")(request, body)

    return answers


async def every_line(mesh: BatchMesh, job) -> dict[str, dict]:
    """All lines of both files of a job that has ended."""
    output = await output_lines(mesh.store, job.output_file_id)
    errors = await output_lines(mesh.store, job.error_file_id)
    assert not output.keys() & errors.keys()
    assert (len(output), len(errors)) == (job.completed, job.failed)
    return output | errors


async def test_lines_count_once_in_their_tenants_limits(mesh: BatchMesh, engine: ScriptedEngine):
    engine.behaviour = say("a", "b")
    runner = await mesh.runner()
    job = await submit(mesh.store, file_of(good=6), tenant="acme")
    await mesh.until(job, JobStatus.COMPLETED)
    spent = runner._limits.keeper._accounts["t:acme"]
    tokens = USAGE["prompt_tokens"] + USAGE["completion_tokens"]
    assert spent.sums == (6, 6 * tokens, 0)


async def accounts(regions: NatsRegions) -> Counter:
    """What is in the stream of accounts, of all days on which a test may run."""
    client = await regions.connect("us", "operator")
    days = [time.strftime("%Y-%m-%d", time.gmtime(time.time() + s)) for s in (-86_400, 0)]
    found: Counter = Counter()
    for page in [page for day in days for page in await read_day(client, "us", day)]:
        for row in page.rows:
            assert row.kind is UsageKind.BATCH and not row.estimated_requests
            found.update(lines=row.requests, prompt=row.uncached + row.cached, output=row.output)
    await client.close()
    return found


async def test_a_job_is_done(mesh, engine, regions) -> None:
    await mesh.runner()
    job = await submit(mesh.store, file_of(195, 5))
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert (found.total, found.completed, found.failed) == (200, 195, 5)
    assert sorted(await every_line(mesh, found)) == names(195, 5)
    assert found.input_tokens == 195 * USAGE["prompt_tokens"]
    assert found.output_tokens == 195 * USAGE["completion_tokens"]
    used = {"lines": 195, "prompt": found.input_tokens, "output": found.output_tokens}
    async with asyncio.timeout(PATIENCE_S):  # written a second later
        while await accounts(regions) != used:
            await asyncio.sleep(0.1)
    assert not [each async for each in mesh.store.lines.left(job.id)]
    async with asyncio.timeout(PATIENCE_S):  # they go when the record names the files
        while await mesh.store.results.count(job.id):
            await asyncio.sleep(0.01)


async def test_a_runner_that_is_killed_loses_no_line(
    mesh, engine, regions, toml, monkeypatch
) -> None:
    # How long lines stay with a runner that is gone, in the consumer that a check makes.
    monkeypatch.setattr("mesh.batch.queues.ACK_WAIT_S", 2.0)
    monkeypatch.setattr("mesh.batch.held_lines.IN_PROGRESS_S", 0.5)
    gate = asyncio.Event()
    engine.behaviour = first(60, gate)
    job = await submit(mesh.store, file_of(195, 5), check=False)
    await JobTasks(mesh.store, time.time).check(job.id)
    async with runner_process(regions, toml, name="batch-1") as runner:
        await mesh.until_answered(job, 25)
        runner.process.send_signal(signal.SIGKILL)
        await runner.end()
    gate.set()
    await mesh.runner()
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert sorted(await every_line(mesh, found)) == names(195, 5)


async def test_lines_that_come_again_while_the_store_goes_away_are_done(mesh, engine) -> None:
    """Of a line that comes a second time the runner asks whether it has a result already."""
    job = await submit(mesh.store, file_of(40), check=False)
    await JobTasks(mesh.store, time.time).check(job.id)
    for each in await mesh.store.lines.take(job.id, 40, 5.0):
        await mesh.store.lines.nak(each)
    runner = await mesh.runner()
    results, asked = runner.store.results, itertools.count(1)
    get = results.get

    async def fails_once(*line: object) -> Result | None:
        if next(asked) == 5:
            raise StoreUnavailable("as when the connection is lost just now")
        return await get(*line)

    results.get = fails_once
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert next(asked) > 5
    assert sorted(await every_line(mesh, found)) == names(40)


async def test_a_runner_that_is_told_to_end_gives_its_lines_back(
    mesh, engine, regions, toml
) -> None:
    gate = asyncio.Event()
    engine.behaviour = first(20, gate)
    job = await submit(mesh.store, file_of(100))
    async with runner_process(regions, toml, "--drain-s", "0.5", name="batch-1") as runner:
        await mesh.until_answered(job, 20)
        runner.process.terminate()
        status, log = await runner.end()
    assert status == 0, log
    gate.set()
    await mesh.runner()
    found = await mesh.until(job, JobStatus.COMPLETED)  # sooner than lines are given to another
    assert sorted(await every_line(mesh, found)) == names(100)


async def test_two_runners_do_a_job_together(mesh, engine) -> None:
    await mesh.runner()
    await mesh.runner(name="batch-1")
    jobs = [await submit(mesh.store, file_of(150, 3)) for _ in range(3)]
    for job in jobs:
        found = await mesh.until(job, JobStatus.COMPLETED)
        assert sorted(await every_line(mesh, found)) == names(150, 3)


async def test_a_job_is_cancelled_in_the_middle(mesh, engine) -> None:
    gate = asyncio.Event()
    engine.behaviour = first(30, gate)
    await mesh.runner()
    job = await submit(mesh.store, file_of(100, 2))
    await mesh.until_answered(job, 32)
    change = {"status": JobStatus.CANCELLING, "cancelling_at": int(time.time())}
    await mesh.store.jobs.update(job.id, lambda job: replace(job, **change))
    await mesh.store.tasks.add(Task.FINISH, job.id)
    found = await mesh.until(job, JobStatus.CANCELLED)
    lines = await every_line(mesh, found)
    assert sorted(lines) == names(100, 2)
    codes = Counter((line["error"] or {}).get("code") for line in lines.values())
    assert codes == {None: 30, "batch_cancelled": 70, "invalid_method": 2}
    await asyncio.wait_for(engine.hung_up.wait(), 20)  # what ran is cancelled
    gate.set()


async def test_a_window_is_over(mesh, engine) -> None:
    gate = asyncio.Event()
    engine.behaviour = first(10, gate)
    await mesh.runner()
    job = await submit(mesh.store, file_of(40), window_s=4)
    await mesh.until_answered(job, 10)
    await mesh.mesh.kill_agent("us-0")
    found = await mesh.until(job, JobStatus.EXPIRED)
    gate.set()
    lines = await every_line(mesh, found)
    assert sorted(lines) == names(40)
    codes = Counter((line["error"] or {}).get("code") for line in lines.values())
    assert codes == {None: 10, "batch_expired": 30}


async def test_a_model_that_nobody_serves(mesh, engine) -> None:
    await mesh.runner(unserved_s_max=1.0)
    data = file_of(5) + request_line("unknown", model="nobody-has-it")
    found = await mesh.until(await submit(mesh.store, data), JobStatus.COMPLETED)
    lines = await every_line(mesh, found)
    assert (found.completed, found.failed) == (5, 1)
    assert lines["unknown"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engines_error_is_the_result_of_its_line(mesh, engine, status) -> None:
    async def some_fail(request: web.Request, body: dict) -> web.StreamResponse:
        is_bad = body["messages"][0]["content"] == "bad"
        return await (fail(status) if is_bad else say("hello"))(request, body)

    engine.behaviour = some_fail
    async with scripted_engine() as second:  # where it is tried again
        second.behaviour = some_fail
        await mesh.agent("us-1", second)
        await mesh.runner()
        data = file_of(5) + request_line("bad", content="bad")
        found = await mesh.until(await submit(mesh.store, data), JobStatus.COMPLETED)
    lines = await every_line(mesh, found)
    assert (found.completed, found.failed) == (5, 1)
    assert lines["bad"]["response"]["status_code"] == status
    assert lines["bad"]["response"]["body"]["error"]["message"] == "engine says no"


async def test_long_prompts_and_long_answers(mesh, engine) -> None:
    words = "word " * 500_000  # 2.5 MB: more than flow control lets through at once
    engine.behaviour = say(words)
    await mesh.runner()
    data = request_line("long", content="x" * 3_000_000) + file_of(1)
    found = await mesh.until(await submit(mesh.store, data), JobStatus.COMPLETED)
    lines = await every_line(mesh, found)
    answer = lines["long"]["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == words
    assert max(len(body["messages"][0]["content"]) for body in engine.seen) == 3_000_000


async def test_an_answer_that_can_not_be_stored_is_an_error(mesh, engine, monkeypatch) -> None:
    engine.behaviour = say("word " * 4_000_000)  # 20 MB, where a message may have 8 MiB
    runner, kept = await mesh.runner(), []
    passed = runner.session.passed

    def see(request) -> None:
        kept.append(sum(map(len, request.answer_bytes)))
        passed(request)

    monkeypatch.setattr(runner.session, "passed", see)
    found = await mesh.until(await submit(mesh.store, file_of(1)), JobStatus.COMPLETED)
    lines = await every_line(mesh, found)
    assert lines["good-0"]["error"]["code"] == "response_too_large"
    assert 0 < max(kept) <= 8 * 1024 * 1024


async def test_a_full_store_keeps_results_waiting(mesh, engine, monkeypatch) -> None:
    """What can't be stored yet is not lost and not computed again."""
    monkeypatch.setattr("mesh.batch.held_lines.STORE_RETRY_S", 0.05)
    runner = await mesh.runner()
    put, left = runner.store.results.put, [20]

    async def full(result):
        left[0] -= 1
        if left[0] >= 0:
            raise StoreFull("the test says so")
        return await put(result)

    monkeypatch.setattr(runner.store.results, "put", full)
    found = await mesh.until(await submit(mesh.store, file_of(10)), JobStatus.COMPLETED)
    assert sorted(await every_line(mesh, found)) == names(10)
    assert len(engine.seen) == 10
    assert runner.metrics.registry.get_sample_value(
        "mesh_batch_store_errors_total", {"why": "full"}
    )


async def test_work_that_is_given_back_is_done_later(mesh, engine) -> None:
    """Lines that an engine can't take besides its online requests wait, and are no failures."""
    runner = await mesh.runner()
    engine.waiting, engine.running = 500, 256  # online requests leave no room
    job = await submit(mesh.store, file_of(10))
    await mesh.until_running(job)
    engine.waiting = engine.running = 0
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert (found.completed, found.failed) == (10, 0)
    assert runner.core.counts.failed == 0


async def test_its_page(mesh, engine) -> None:
    runner = await mesh.runner(metrics=True)
    await mesh.until(await submit(mesh.store, file_of(10, 1)), JobStatus.COMPLETED)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.page_port}") as page:
        async with page.get("/metrics") as answer:
            text = await answer.text()
        async with page.get("/ready") as answer:
            assert answer.status == 200
        runner.session.feed(ev.Drain())
        async with page.get("/ready") as answer:
            assert answer.status == 503
        async with page.get("/health") as answer:
            assert answer.status == 200
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("result") in (None, "answered")
    }
    assert found["mesh_batch_lines_total"] == 10
    assert found["mesh_batch_jobs_ended_total"] == 1
    assert found["mesh_batch_lines_left"] == 0


async def test_its_page_says_how_full_the_store_is(mesh, regions, monkeypatch) -> None:
    monkeypatch.setattr("mesh.runtime.batch_runner.FILL_S", 0.05)
    runner = await mesh.runner()
    await mesh.store.files.put(NewFile(filename="a", purpose=Purpose.BATCH), once(bytes(300_000)))

    def size(name: str, part: str) -> float:
        return runner.metrics.registry.get_sample_value(name, {"part": part}) or 0.0

    async with asyncio.timeout(PATIENCE_S):
        while size("mesh_batch_store_bytes", "files") < 300_000:
            await asyncio.sleep(0.01)
    limits = {part: getattr(regions.topology.batch, f"{part}_mib") * 1024**2
              for part in ("files", "results", "lines", "jobs")}  # fmt: skip
    assert {part: size("mesh_batch_store_bytes_max", part) for part in limits} == limits


async def test_the_forecast_outlives_the_runner(mesh, engine) -> None:
    runner = await mesh.runner()
    kept = ForecastState({"tiny": ModelHistory(((int(time.time() // 3600) - 5, 0.5),), 100.0)})
    runner.session.feed(oev.ForecastRestored(kept))
    runner.session.feed(ev.Drain())  # with which it is kept
    async with asyncio.timeout(PATIENCE_S):
        while await mesh.store.forecast.get() is None:
            await asyncio.sleep(0.01)
    again = await mesh.runner(name="batch-1")
    assert again.core.state.forecast.state() == kept
    assert await mesh.store.jobs.unfinished() == []


async def test_a_second_runner_of_the_same_name_ends(mesh, monkeypatch) -> None:
    await mesh.runner()
    monkeypatch.setattr("mesh.runtime.name_claim.SAME_NAME_S", 20.0)  # the first one answers
    with pytest.raises(NameTaken, match="batch runner batch-0 of region us runs already"):
        await mesh.runner()


async def test_a_second_runner_ends_too_when_the_first_answers_late(mesh, monkeypatch) -> None:
    await mesh.runner()
    monkeypatch.setattr("mesh.runtime.name_claim.SAME_NAME_S", 0.0)  # the first one is suspended
    second = await mesh.runner()
    with pytest.raises(NameTaken, match="runs already"):
        async with asyncio.timeout(PATIENCE_S):
            await second.until_broken()


async def test_a_server_that_restarts_costs_no_line(mesh, engine, regions) -> None:
    gate = asyncio.Event()
    engine.behaviour = first(30, gate)
    await mesh.runner()
    job = await submit(mesh.store, file_of(100))
    await mesh.until_answered(job, 30)
    await regions.stop_one("us")
    gate.set()
    await regions.start_one("us")
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert sorted(await every_line(mesh, found)) == names(100)


async def test_an_agent_that_is_killed_costs_no_line(mesh, engine) -> None:
    gate = asyncio.Event()
    engine.behaviour = first(30, gate)
    await mesh.runner()
    job = await submit(mesh.store, file_of(100))
    await mesh.until_answered(job, 30)
    await mesh.mesh.kill_agent("us-0")
    async with scripted_engine() as second:
        await mesh.agent("us-1", second)
        found = await mesh.until(job, JobStatus.COMPLETED)
    gate.set()
    assert sorted(await every_line(mesh, found)) == names(100)
    assert found.failed == 0


async def test_a_job_whose_first_task_was_lost_is_done(mesh, engine, monkeypatch) -> None:
    """Its router died between the record and the task."""
    monkeypatch.setattr("mesh.batch.job_follower.CHECK_LATE_S", 1.0)
    monkeypatch.setattr("mesh.batch.job_follower.REPAIR_S", 0.2)
    await mesh.runner()
    job = await submit(mesh.store, file_of(10), check=False)
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert sorted(await every_line(mesh, found)) == names(10)


async def test_what_nobody_needs_any_more_is_removed(mesh, monkeypatch) -> None:
    monkeypatch.setattr("mesh.batch.job_follower.CLEAN_S", 0.2)
    late = Result(job=new_job_id(), number=1, status=200, custom_id="late", body=b"{}")
    await mesh.store.results.put(late)
    old = NewFile(filename="old", purpose=Purpose.BATCH, expires_at=int(time.time()) - 1)
    info = await mesh.store.files.put(old, once(b"x"))
    await mesh.runner()
    async with asyncio.timeout(PATIENCE_S):
        while await mesh.store.results.count(late.job):
            await asyncio.sleep(0.01)
        with pytest.raises(FileUnknown):
            while await mesh.store.files.info(info.id):
                await asyncio.sleep(0.01)


async def test_lines_that_name_an_alias_are_served_by_its_targets(mesh, engine) -> None:
    rules = (
        ModelRule(name="split", to=(("tiny", 0.5), ("next", 0.5))),
        ModelRule(name="half-gone", to=(("tiny", 0.5), ("never", 0.5))),
    )
    async with scripted_engine("next") as other:
        await mesh.agent("us-1", other)
        runner = await mesh.runner(models=rules)
        await mesh.mesh.until(lambda: {"tiny", "next"} <= runner.core.served(), "both models")
        lines = [
            request_line(f"{model}-{n}", model=model, content=f"line {n}")
            for n in range(40)
            for model in ("split", "half-gone")
        ]
        job = await mesh.until(await submit(mesh.store, b"".join(lines)), JobStatus.COMPLETED)
        assert (job.completed, job.failed) == (80, 0)
        assert {body["model"] for body in engine.seen} == {"tiny"}
        assert {body["model"] for body in other.seen} == {"next"}
        assert 8 <= len(other.seen) <= 32
