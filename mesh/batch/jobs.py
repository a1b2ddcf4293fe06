"""Jobs in the key-value bucket `batches`: one record each, written by compare-and-set."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson

from infra.batch_table import BatchTable
from infra.bus import H_EXPECTED
from infra.process import LimitedLog
from mesh.batch.connection import ChangedMeanwhile, Connection, Stored
from mesh.batch.pulling import follow
from mesh.batch.records import JobExists, JobUnknown, Page, StoreFull, StoreUnavailable, TooLarge
from schemas.batch import (
    BUCKET_JOBS,
    ENDED,
    JOB_BYTES_MAX,
    JOB_ID_PATTERN,
    STREAM_JOBS,
    BatchJob,
    decode_job,
    encode_job,
)
from schemas.wire import WireError

TRIES_MAX = 30  # of one update against others'
RETRY_S_MAX = 0.05
# New jobs are refused when the bucket is so full: what is left is for those accepted, which grow.
USED_SHARE_MAX = 0.5
MEBIBYTE = 1024 * 1024
_ALL = f"$KV.{BUCKET_JOBS}.>"
_limited = LimitedLog(logging.getLogger(__name__))


class Jobs:
    """The region's batch jobs."""

    def __init__(self, connection: Connection, limits: BatchTable) -> None:
        self._connection = connection
        self._limits = limits

    async def create(self, job: BatchJob) -> None:
        """Store a new job. Raises JobExists, StoreFull (`jobs_max` are open, or the bucket is
        full), TooLarge, StoreUnavailable. Two routers at once may exceed `jobs_max` by a few."""
        state = await self._connection.state(STREAM_JOBS)
        if state["bytes"] > self._limits.jobs_mib * MEBIBYTE * USED_SHARE_MAX:
            raise StoreFull(
                "the bucket of jobs is full (jobs_mib): try again when some were removed"
            )
        jobs_max = self._limits.jobs_max
        if state["messages"] >= jobs_max and len(await self.unfinished()) >= jobs_max:
            raise StoreFull(f"{jobs_max} jobs have not ended (jobs_max); try again later")
        try:
            await self._write(job, 0)
        except ChangedMeanwhile as error:
            raise JobExists(f"there is a job {job.id}") from error

    async def get(self, job_id: str) -> BatchJob:
        """Raises JobUnknown, StoreUnavailable."""
        return (await self._get(job_id))[0]

    async def update(self, job_id: str, change: Callable[[BatchJob], BatchJob | None]) -> BatchJob:
        """Write what `change` makes of the job, or nothing where it returns None; the job as it is
        stored then. `change` is called again if somebody else wrote meanwhile.

        Raises JobUnknown, TooLarge, StoreFull, StoreUnavailable.
        """
        for _ in range(TRIES_MAX):
            job, revision = await self._get(job_id)
            changed = change(job)
            if changed is None or changed == job:
                return job
            try:
                await self._write(changed, revision)
            except ChangedMeanwhile:
                await asyncio.sleep(random.uniform(0, RETRY_S_MAX))
                continue
            return changed
        raise StoreUnavailable(f"{job_id}: others changed it {TRIES_MAX} times meanwhile")

    async def list(self, *, tenant: str, after: str = "", limit: int = 20) -> Page[BatchJob]:
        """The tenant's jobs, newest first, those older than the job `after`.

        Raises JobUnknown (`after`), StoreUnavailable.
        """
        async with self._connection.reading_all:
            found = [
                (fields.get("created_at", 0), fields.get("id", ""), stored)
                async for stored, fields in self._all()
                if fields.get("tenant", "") == tenant
            ]
        found.sort(key=lambda each: each[:2], reverse=True)
        start = 0
        if after:
            places = [place for place, (_, job_id, _) in enumerate(found) if job_id == after]
            if not places:
                raise JobUnknown(f"no job {after:.64}")
            start = places[0] + 1
        page = [_decode(stored) for _, _, stored in found[start : start + limit]]
        jobs = [job for job in page if job is not None]
        return Page(jobs, has_more=len(found) > start + limit)

    async def unfinished(self) -> Sequence[BatchJob]:
        """Those of all tenants that have not ended. Raises StoreUnavailable."""
        async with self._connection.reading_all:
            found = [
                _decode(stored)
                async for stored, fields in self._all()
                if fields.get("status") not in ENDED
            ]
        return [job for job in found if job is not None]

    async def watch(self) -> AsyncIterator[BatchJob]:
        """Each job as it is, and then each whenever it is written; states that were soon replaced
        may be left out. Goes on by itself when the bus was away; ends never."""
        async for stored in follow(self._connection, STREAM_JOBS, _ALL):
            job = _decode(stored) if _is_job(stored) else None
            if job is not None:
                yield job

    async def delete(self, job_id: str) -> None:
        """Forget a job, if it is there. Raises StoreUnavailable."""
        if JOB_ID_PATTERN.fullmatch(job_id) is not None:
            await self._connection.purge(STREAM_JOBS, _key(job_id))

    async def delete_old(self, now: float) -> int:
        """Forget jobs that ended `jobs_days` ago; how many. Raises StoreUnavailable."""
        kept_s = self._limits.jobs_days * 86_400
        old = [
            fields["id"]
            async for stored, fields in self._all()
            if fields.get("status") in ENDED and stored.stored_at + kept_s <= now
        ]
        for job_id in old:
            await self.delete(job_id)
        return len(old)

    async def _all(self) -> AsyncIterator[tuple[Stored, dict[str, Any]]]:
        async for stored in self._connection.last_of_all(STREAM_JOBS, _ALL):
            try:
                fields = orjson.loads(stored.data)
            except ValueError:  # a marker of `nats kv del`
                continue
            if isinstance(fields, dict) and _is_job(stored):
                yield stored, fields

    async def _get(self, job_id: str) -> tuple[BatchJob, int]:
        stored = None
        if JOB_ID_PATTERN.fullmatch(job_id) is not None:
            stored = await self._connection.last(STREAM_JOBS, _key(job_id))
        job = None if stored is None else _decode(stored)
        if stored is None or job is None:
            raise JobUnknown(f"no job {job_id:.64}")
        return job, stored.seq

    async def _write(self, job: BatchJob, revision: int) -> None:
        data = encode_job(job)
        if len(data) > JOB_BYTES_MAX:
            raise TooLarge(f"a job's record may have {JOB_BYTES_MAX} bytes, not {len(data)}")
        await self._connection.publish(_key(job.id), data, {H_EXPECTED: str(revision)})


def _key(job_id: str) -> str:
    return f"$KV.{BUCKET_JOBS}.{job_id}"


def _is_job(stored: Stored) -> bool:
    """Whether it is no other entry of the bucket."""
    return JOB_ID_PATTERN.fullmatch(stored.subject.rpartition(".")[2]) is not None


def _decode(stored: Stored) -> BatchJob | None:
    if not stored.data:  # a marker of `nats kv del`
        return None
    try:
        return decode_job(stored.data)
    except WireError as error:
        _limited.warning("job", "unreadable", "%s can't be read: %s", stored.subject, error)
        return None
