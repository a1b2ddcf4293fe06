"""Jobs: written by compare-and-set, listed by tenant, watched, and forgotten."""

import asyncio
import json
from dataclasses import replace

import pytest

from mesh.batch.records import JobUnknown, StoreFull, TooLarge, new_job_id
from mesh.batch.store import BatchStore
from schemas.batch import JOB_BYTES_MAX, JOB_ID_PATTERN, STREAM_JOBS, BatchJob, JobStatus, LineError
from tests.support.batch_regions import opened, some_job
from tests.support.nats_regions import NatsRegions
from tests.support.until import PATIENCE_S

DAY_S = 86_400


def one_more(job: BatchJob) -> BatchJob:
    return replace(job, completed=job.completed + 1)


async def test_a_job_comes_back_as_it_was(store: BatchStore):
    errors = (LineError(code="invalid", message="größe ✓", line=3),)
    job = some_job(tenant="acme", residency=("eu",), metadata={"a": "b"}, errors=errors)
    assert JOB_ID_PATTERN.fullmatch(job.id)
    await store.jobs.create(job)
    assert await store.jobs.get(job.id) == job


@pytest.mark.parametrize("name", ["", "batch_1", "*", ">", "a b", "batch_" + "G" * 32])
async def test_what_is_no_job_is_unknown(store: BatchStore, name: str):
    await store.jobs.create(some_job())
    with pytest.raises(JobUnknown):
        await store.jobs.get(name or new_job_id())
    with pytest.raises(JobUnknown):
        await store.jobs.update(name or new_job_id(), one_more)
    await store.jobs.delete(name or new_job_id())
    assert len(await store.jobs.unfinished()) == 1


async def test_of_all_that_update_at_once_none_is_lost(us: NatsRegions, store: BatchStore):
    job = some_job()
    await store.jobs.create(job)
    async with opened(us) as other:

        async def count(where: BatchStore) -> None:
            for _ in range(10):
                await where.jobs.update(job.id, one_more)

        await asyncio.gather(*(count(each) for each in (store, other, store, other)))
    assert (await store.jobs.get(job.id)).completed == 40
    assert await store._connection.count(STREAM_JOBS, ">") == 1


async def test_an_update_may_be_left_out(store: BatchStore):
    job = some_job()
    await store.jobs.create(job)
    before = await store._connection.last(STREAM_JOBS, f"$KV.batches.{job.id}")
    assert await store.jobs.update(job.id, lambda _: None) == job
    assert await store.jobs.update(job.id, lambda found: found) == job
    assert await store._connection.last(STREAM_JOBS, f"$KV.batches.{job.id}") == before
    changed = await store.jobs.update(job.id, one_more)
    assert changed == one_more(job) == await store.jobs.get(job.id)


async def test_the_newest_come_first_and_each_tenant_sees_its_own(store: BatchStore):
    mine = [some_job(created_at, tenant="a") for created_at in (3, 1, 2, 5, 4)]
    for job in (*mine, some_job(9, tenant="b"), some_job(9)):
        await store.jobs.create(job)
    found, after = [], ""
    for more in (True, True, False):
        page = await store.jobs.list(tenant="a", after=after, limit=2)
        assert page.has_more == more
        found += page.items
        after = page.items[-1].id
    assert [job.created_at for job in found] == [5, 4, 3, 2, 1]
    assert {job.id for job in found} == {job.id for job in mine}
    assert (await store.jobs.list(tenant="a", after=after)).items == []
    assert len((await store.jobs.list(tenant="")).items) == 1
    with pytest.raises(JobUnknown):
        await store.jobs.list(tenant="b", after=after)


async def test_a_watcher_has_each_job_as_it_is_and_then_each_change(store: BatchStore):
    old, ended = some_job(), some_job(status=JobStatus.COMPLETED)
    for job in (old, ended):
        await store.jobs.create(job)
    watching = store.jobs.watch()
    async with asyncio.timeout(PATIENCE_S):
        assert [await anext(watching), await anext(watching)] == [old, ended]
        changed = await store.jobs.update(old.id, one_more)
        assert await anext(watching) == changed
        new = some_job()
        await store.jobs.create(new)
        assert await anext(watching) == new
    await watching.aclose()


async def test_runners_find_the_jobs_that_have_not_ended(store: BatchStore):
    jobs = [some_job(status=status) for status in JobStatus]
    for job in jobs:
        await store.jobs.create(job)
    found = {job.id for job in await store.jobs.unfinished()}
    assert found == {job.id for job in jobs if not job.is_over}


async def test_so_many_open_jobs_and_no_more_until_one_ends(full: BatchStore):
    jobs = [some_job() for _ in range(full.limits.jobs_max)]
    for job in jobs:
        await full.jobs.create(job)
    with pytest.raises(StoreFull, match="jobs_max"):
        await full.jobs.create(some_job())
    await full.jobs.update(jobs[0].id, lambda job: replace(job, status=JobStatus.CANCELLED))
    await full.jobs.create(some_job())
    with pytest.raises(StoreFull):
        await full.jobs.create(some_job())


async def test_a_full_bucket_refuses_new_jobs_and_takes_the_changes_of_old_ones(full: BatchStore):
    long = {str(number): "x" * 500 for number in range(400)}
    ended = {"status": JobStatus.COMPLETED, "metadata": long}
    accepted = []
    with pytest.raises(StoreFull, match="jobs_mib"):
        for _ in range(100):
            job = some_job(**ended)
            await full.jobs.create(job)
            accepted.append(job)
    assert len(accepted) > 30
    longer = long | {"more": "x" * 20_000}
    for job in accepted:
        await full.jobs.update(job.id, lambda found: replace(found, metadata=longer))


async def test_a_record_has_a_limit(store: BatchStore):
    job = some_job()
    await store.jobs.create(job)
    large = {"x": "y" * JOB_BYTES_MAX}
    with pytest.raises(TooLarge):
        await store.jobs.create(some_job(metadata=large))
    with pytest.raises(TooLarge):
        await store.jobs.update(job.id, lambda found: replace(found, metadata=large))
    assert await store.jobs.get(job.id) == job


async def test_jobs_that_ended_long_ago_are_forgotten(store: BatchStore):
    ended, running = some_job(status=JobStatus.FAILED), some_job()
    for job in (ended, running):
        await store.jobs.create(job)
    stored = await store._connection.last(STREAM_JOBS, f"$KV.batches.{ended.id}")
    assert stored is not None
    over_at = stored.stored_at + store.limits.jobs_days * DAY_S
    assert await store.jobs.delete_old(over_at - 1) == 0
    assert await store.jobs.delete_old(over_at + 1) == 1
    assert [job.id for job in (await store.jobs.list(tenant="")).items] == [running.id]


async def test_the_bucket_is_one_to_nats_own_tools(us: NatsRegions, store: BatchStore):
    """Someone may look, and remove a job by hand; what is no job is passed over."""
    job, other = some_job(), some_job()
    for each in (job, other):
        await store.jobs.create(each)
    client = await us.connect("us", "batch")
    try:
        bucket = await client.jetstream().key_value("batches")
        entry = await bucket.get(job.id)
        assert json.loads(entry.value)["id"] == job.id
        await bucket.delete(job.id)
        await bucket.put(new_job_id(), b"no job")
    finally:
        await client.close()
    with pytest.raises(JobUnknown):
        await store.jobs.get(job.id)
    assert [each.id for each in await store.jobs.unfinished()] == [other.id]
    assert (await store.jobs.list(tenant="")).items == [other]
