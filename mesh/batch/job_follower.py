"""A region's jobs as one batch runner follows them: records, counts of results, tasks.

Every runner of the region reads each job's record and the heads of all results, so each knows how
far a job is. Whoever notices first that a job's lines are done, or that its window is over, queues
the task to finish it; a task is in its queue once. Counts go into the record once a second at most,
by compare-and-set: a runner that sees another's write waits for its own turn.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from infra.process import LimitedLog, end_all, run_all
from mesh.batch.job_tasks import JobTasks
from mesh.batch.output_line import NO_TOKENS, Tokens, is_error
from mesh.batch.queues import TakenTask
from mesh.batch.records import JobUnknown, ResultHead, StoreError, StoreUnavailable
from mesh.batch.store import BatchStore
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from schemas.batch import BatchJob, JobStatus, LineError, Task

log = logging.getLogger(__name__)

TASKS_AT_ONCE = 2  # a check of a large file should not keep a small one waiting
TASK_WAIT_S = 5.0  # for a task, before another pull
TASK_RETRY_S, TASK_RETRY_S_MAX = 1.0, 60.0
AWAY_RETRY_S_MAX = 4.0  # where the store was away: it says nothing of the task
CHECKS_MAX = 20  # of one job whose check fails by a defect of ours
WRITE_S = 1.0  # between two writes of one job's counts
LOOK_S = 0.2  # how often it is looked which jobs are due
REPAIR_S = 10.0  # between two looks for jobs whose task was lost
CHECK_LATE_S = 30.0  # after its creation a job's check should have begun
CLEAN_S = 60.0  # between two removals of what is over
STORE_RETRY_S = 1.0


@dataclass(slots=True)
class _Counts:
    """What is known of one job's results."""

    completed: int = 0
    failed: int = 0

    @property
    def answered(self) -> int:
        return self.completed + self.failed


@dataclass(slots=True)
class _Progress:
    """What this runner is to write into a job's record."""

    tokens: Tokens = NO_TOKENS  # that it has seen computed and not written
    pace: ofx.JobPaced | None = None
    due_at: float = 0.0


class JobMetrics:
    """What the follower counts; this one counts nothing."""

    def task(self, task: Task, outcome: str) -> None:
        """A task is over: done, or put back."""

    def ended(self, job: BatchJob) -> None:
        """A job has ended."""

    def late(self, job: BatchJob) -> None:
        """It turned out that a job will be late."""


class JobFollower:
    """One runner's. `run` until cancelled; before and after, `close` costs nothing."""

    def __init__(
        self,
        store: BatchStore,
        tasks: JobTasks,
        feed: Callable[[oev.OfflineEvent], None],
        metrics: JobMetrics,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: the core's; `tasks.unix_s` shows the store's time of day."""
        self._store, self._tasks, self._feed = store, tasks, feed
        self._metrics, self._clock = metrics, clock
        self._jobs: dict[str, BatchJob] = {}  # that have not ended
        self._counts: dict[str, _Counts] = {}
        self._progress: dict[str, _Progress] = {}
        self._left_over: set[str] = set()  # jobs that are over and have results
        self._is_stopping = False
        self.problem: str | None = None  # why the store can't be used
        self._doing: set[asyncio.Task[None]] = set()
        self._under_way: list[TakenTask] = []
        self._log = LimitedLog(log, clock)
        self.performers: dict[type, Callable[[Any], None]] = {ofx.JobPaced: self._paced}

    def __iter__(self) -> Iterator[BatchJob]:
        """The jobs that have not ended."""
        return iter(tuple(self._jobs.values()))

    def in_progress(self, job: str) -> BatchJob | None:
        """The record of a job whose lines are being computed."""
        found = self._jobs.get(job)
        return found if found is not None and found.status is JobStatus.IN_PROGRESS else None

    def computed(self, job: str, tokens: Tokens) -> None:
        """An engine has reported so many tokens for a line of the job."""
        if job in self._jobs:
            progress = self._progress.setdefault(job, _Progress())
            progress.tokens = progress.tokens.plus(tokens)

    async def run(self) -> None:
        """Follow, count, write and do tasks. Runs until cancelled."""
        await self._until_usable()
        await run_all(
            (
                self._watch(),
                self._count(),
                self._write(),
                self._repair(),
                self._clean(),
                self._take_tasks(),
            )
        )

    async def stop(self) -> None:
        """Take no more tasks, and give up those under way: another runner does them anew."""
        self._is_stopping = True
        await end_all(self._doing)
        while self._under_way:  # each once: the next runner may have it already
            await self._give_back(self._under_way.pop())

    async def _give_back(self, taken: TakenTask) -> None:
        with self._tolerated("task"):
            await self._store.tasks.nak(taken)

    # Records.

    async def _watch(self) -> None:
        async for job in self._store.jobs.watch():
            self._seen(job)

    def _seen(self, job: BatchJob) -> None:
        before = self._jobs.get(job.id)
        if job.is_over:
            self._jobs.pop(job.id, None)
            self._progress.pop(job.id, None)
            if self._counts.pop(job.id, None) is not None:
                self._left_over.add(job.id)
            if before is not None:
                self._metrics.ended(job)
        else:
            self._jobs[job.id] = job
        if job.status is JobStatus.IN_PROGRESS:
            self._feed(oev.JobSeen(self._as_seen(job)))
            if before is not None and job.late and not before.late:
                self._metrics.late(job)
        elif before is not None and before.status is JobStatus.IN_PROGRESS:
            self._feed(oev.JobEnded(job.id))

    def _as_seen(self, job: BatchJob) -> oev.OfflineJob:
        """The job on the core's clock."""
        offset_s = self._clock() - self._tasks.unix_s()
        counts = self._counts.get(job.id, _Counts())
        return oev.OfflineJob(
            id=job.id,
            began_at=job.created_at + offset_s,
            deadline=job.expires_at + offset_s,
            total=job.total,
            answered=min(job.total, max(job.answered, counts.answered)),
            residency=job.residency,
        )

    async def _count(self) -> None:
        async for head in self._store.results.follow():
            self._counted(head)

    def _counted(self, head: ResultHead) -> None:
        counts = self._counts.setdefault(head.job, _Counts())
        if is_error(head.status):
            counts.failed += 1
        else:
            counts.completed += 1
        job = self.in_progress(head.job)
        if job is not None and counts.answered == job.total:
            self._feed(oev.JobSeen(self._as_seen(job)))
            self._begin(self._answered(job))

    async def _answered(self, job: BatchJob) -> None:
        """Its last line has a result: the record is to show that before its files are written."""
        self._progress.setdefault(job.id, _Progress()).due_at = 0.0
        await self._write_one(job, self._clock())
        await self._add(Task.FINISH, job.id)

    # Progress.

    def _paced(self, effect: ofx.JobPaced) -> None:
        if effect.job in self._jobs:
            self._progress.setdefault(effect.job, _Progress()).pace = effect

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            for job in list(self._jobs.values()):
                if job.status is JobStatus.IN_PROGRESS:
                    await self._write_one(job, now)

    async def _write_one(self, job: BatchJob, now: float) -> None:
        progress = self._progress.setdefault(job.id, _Progress())
        if now < progress.due_at or self._changed(job, progress.tokens) == job:
            return
        # Runners that have begun together don't go on in step.
        progress.due_at = now + WRITE_S * random.uniform(1.0, 1.2)
        # More may be computed, and another write begin, while this one is under way.
        added, progress.tokens = progress.tokens, NO_TOKENS
        try:
            await self._store.jobs.update(job.id, lambda job: self._changed(job, added))
        except JobUnknown:
            self._gone(job.id)
        except StoreError as error:
            progress.tokens = progress.tokens.plus(added)
            self._log.warning("progress", "store", "progress of %s: %s", job.id, error)

    def _changed(self, job: BatchJob, added: Tokens) -> BatchJob:
        """The record with what this runner knows, and so many more tokens."""
        if job.status is not JobStatus.IN_PROGRESS:
            return job
        counts, progress = self._counts.get(job.id, _Counts()), self._progress.get(job.id)
        if progress is None:
            return job
        changed = replace(
            job,
            completed=max(job.completed, counts.completed),
            failed=max(job.failed, counts.failed),
            input_tokens=job.input_tokens + added.input,
            output_tokens=job.output_tokens + added.output,
        )
        if progress.pace is None:
            return changed
        end_at = progress.pace.end_at
        if end_at is not None:
            end_at = round(end_at - self._clock() + self._tasks.unix_s())
        return replace(changed, estimated_end_at=end_at, late=progress.pace.late)

    # Tasks.

    async def _repair(self) -> None:
        """Queue the tasks that jobs wait for and that may have been lost with their sender."""
        while True:
            await asyncio.sleep(REPAIR_S * random.uniform(0.8, 1.2))
            if not await self._check_store():
                continue
            for job in list(self._jobs.values()):
                task = self._missing_task(job)
                if task is not None and await self._is_there(job.id):
                    await self._add(task, job.id)

    async def _until_usable(self) -> None:
        """Wait for the streams, and for the store's clock, by which jobs have their deadlines."""
        while True:
            if await self._check_store():
                return
            await asyncio.sleep(STORE_RETRY_S)

    async def _check_store(self) -> bool:
        """Look for the streams, and read the store's clock, from which this machine's may differ;
        False where that can't be done."""
        try:
            await self._store.check()
        except StoreError as error:
            self.problem = str(error)
            self._log.warning("check", "store", "batch jobs are not done: %s", error)
            return False
        if self.problem is not None:
            log.warning("batch jobs are done again")
        self.problem = None
        return True

    async def _is_there(self, job: str) -> bool:
        """Whether it has a record. The watch of the bucket does not report deletions."""
        try:
            await self._store.jobs.get(job)
        except JobUnknown:
            self._gone(job)
            return False
        except StoreError:
            pass  # the request for the task fails too, and is logged
        return True

    def _gone(self, job: str) -> None:
        """It was deleted before its end."""
        self._jobs.pop(job, None)
        self._progress.pop(job, None)
        self._feed(oev.JobEnded(job))

    def _missing_task(self, job: BatchJob) -> Task | None:
        now = self._tasks.unix_s()
        if job.status is JobStatus.VALIDATING:
            return Task.CHECK if now - job.created_at > CHECK_LATE_S else None
        if job.status is not JobStatus.IN_PROGRESS:
            return Task.FINISH
        counts = self._counts.get(job.id, _Counts())
        is_done = counts.answered >= job.total or now >= job.expires_at
        return Task.FINISH if is_done else None

    async def _add(self, task: Task, job: str) -> None:
        with self._tolerated("task"):
            await self._store.tasks.add(task, job)

    async def _take_tasks(self) -> None:
        while not self._is_stopping:
            while len(self._doing) >= TASKS_AT_ONCE:
                await asyncio.wait(self._doing, return_when=asyncio.FIRST_COMPLETED)
            try:
                taken = await self._store.tasks.take(TASK_WAIT_S)
            except StoreError as error:
                self._log.warning("task", "store", "no tasks can be taken: %s", error)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            if taken is not None:
                await self._took(taken)

    async def _took(self, taken: TakenTask) -> None:
        if self._is_stopping:
            await self._give_back(taken)
        else:
            self._begin(self._do(taken))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)

    async def _do(self, taken: TakenTask) -> None:
        """A task, which is put back if it can't be done now."""
        retry_s = min(TASK_RETRY_S_MAX, TASK_RETRY_S * 2.0 ** min(10, taken.delivered - 1))
        self._under_way.append(taken)
        try:
            async with self._store.tasks.keep(taken):
                work = self._tasks.check if taken.task is Task.CHECK else self._tasks.finish
                await work(taken.job)
            await self._store.tasks.ack(taken)
        except StoreError as error:
            if isinstance(error, StoreUnavailable):
                retry_s = min(retry_s, AWAY_RETRY_S_MAX)
            why = type(error).__name__
            text = "%s of %s again in %g s: %s"
            self._log.warning("task", why, text, taken.task, taken.job, retry_s, error)
            await self._again(taken, retry_s)
        except Exception:
            log.exception("%s of %s failed; again in %g s", taken.task, taken.job, retry_s)
            await self._again(taken, retry_s, is_defect=True)
        else:
            self._metrics.task(taken.task, "done")
        self._under_way.remove(taken)

    async def _again(self, taken: TakenTask, retry_s: float, *, is_defect: bool = False) -> None:
        self._metrics.task(taken.task, "put_back")
        with self._tolerated("task"):
            if is_defect and taken.task is Task.CHECK and taken.delivered >= CHECKS_MAX:
                message = "The input file could not be read; its batch runner's log has the reason."
                with contextlib.suppress(JobUnknown):
                    error = LineError(code="server_error", message=message)
                    await self._tasks.fail(taken.job, [error])
            await self._store.tasks.nak(taken, retry_s)

    # What is over.

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_S * random.uniform(0.5, 1.0))
            with self._tolerated("clean"):
                now = self._tasks.unix_s()
                await self._store.files.delete_expired(now)
                await self._store.jobs.delete_old(now)
            unknown = [job for job in self._counts if job not in self._jobs]
            for job in self._store.lines.joined() - self._jobs.keys():
                await self._store.lines.leave(job)
            for job in {*self._left_over, *unknown}:
                with self._tolerated("clean"):
                    await self._remove_left_over(job)

    async def _remove_left_over(self, job: str) -> None:
        """Remove the results of a job that needs them no more: of lines that came too late."""
        try:
            if not (await self._store.jobs.get(job)).is_over:
                return
        except JobUnknown:
            pass
        await self._store.lines.remove(job)
        await self._store.results.remove(job)
        self._left_over.discard(job)
        self._counts.pop(job, None)

    @contextlib.contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """The store may be away; what is not done now is done later."""
        try:
            yield
        except StoreError as error:
            self._log.warning(what, "store", "%s: %s", what, error)
