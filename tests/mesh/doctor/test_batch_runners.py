"""Batch runners that are silent are found, with the jobs that wait for one."""

import asyncio
import contextlib
import time

import pytest

from infra.process import end_all
from infra.topology import parse
from mesh.batch.job_follower import JobFollower, JobMetrics
from mesh.batch.job_tasks import JobTasks
from mesh.doctor.findings import CheckResult
from tests.support import examined_mesh
from tests.support.batch_regions import batch_toml, opened
from tests.support.batch_store import request_line, submit
from tests.support.nats_regions import NatsRegions


@pytest.fixture
async def regions(tmp_path):
    (tmp_path / "mesh.toml").write_text(batch_toml())
    regions = NatsRegions(parse(batch_toml(), "mesh.toml"), tmp_path / "rendered")
    try:
        await regions.start()
        yield regions
    finally:
        await regions.stop()


@contextlib.asynccontextmanager
async def following(store):
    """What a batch runner does with whole jobs."""
    clock = asyncio.get_running_loop().time
    follower = JobFollower(
        store, JobTasks(store, time.time), lambda event: None, JobMetrics(), clock
    )
    running = asyncio.create_task(follower.run())
    try:
        yield
    finally:
        await end_all([running])
        await follower.stop()


async def found(regions, directory, **differs):
    every = await examined_mesh.examined(regions, directory, **differs)
    return [one for one in every if one.check == "batch runner"]


async def test_silent_runners_are_found_with_the_jobs_that_wait(regions, tmp_path, monkeypatch):
    monkeypatch.setattr(examined_mesh, "LISTEN_S", 0.3)
    [idle] = await found(regions, tmp_path)
    assert (idle.about, idle.verdict) == ("batch-0", CheckResult.WARNING)
    assert (idle.detail, idle.remedy) == ("no batch runner runs; 0 jobs wait", None)

    async with opened(regions) as store:
        checked = await submit(store, request_line("a"))
        await JobTasks(store, time.time).check(checked.id)
        task = await store.tasks.take(5.0)
        await store.tasks.ack(task)
        await submit(store, request_line("b"))
        [silent] = await found(regions, tmp_path)
        assert (silent.verdict, silent.detail) == (
            CheckResult.BAD,
            "no batch runner runs; 2 jobs wait",
        )
        assert silent.remedy.command.endswith("systemctl restart mesh-batch-runner@batch-0")

        monkeypatch.setattr(examined_mesh, "LISTEN_S", 5.0)  # it ends as soon as all are seen
        async with following(store):
            [running] = await found(regions, tmp_path)
            assert running.verdict is CheckResult.OK
            assert running.detail.startswith("1 of 1 run, ")
            two = parse(batch_toml().replace('"batch-0"', '"batch-0", "batch-1"'), "mesh.toml")
            monkeypatch.setattr(examined_mesh, "LISTEN_S", 0.5)
            [some] = await found(regions, tmp_path, topology=two)
            assert (some.about, some.verdict) == ("batch-0, batch-1", CheckResult.WARNING)
            assert some.detail == "1 of 2 run: see each one's log"
