"""The two tasks of a whole job: check its input file and queue its lines, and write its outputs.

Both can be repeated: a runner that dies in the middle leaves the task, and the next begins anew.
Until the job is in progress no runner takes its lines, so they may be queued again; a line has one
result, whoever writes it; an output file is stored under a name made from the job's, as a whole;
and lines and results are removed only after the record names the files. A runner that stood still
while another one did its task replaces nothing.
"""

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

from mesh.batch.job_file import FileCheck, JobIndex, LineInvalid, Place, read_line
from mesh.batch.output_line import (
    CANCELLED,
    EXPIRED,
    Result,
    error_code,
    is_error,
    tokens_of,
    unanswered,
)
from mesh.batch.records import (
    FileUnknown,
    JobUnknown,
    Line,
    NewFile,
    StoreFull,
    StoreUnavailable,
    derived_file_id,
)
from mesh.batch.records import Result as StoredResult
from mesh.batch.store import BatchStore
from schemas.batch import BatchJob, JobStatus, LineError, Purpose, Task

log = logging.getLogger(__name__)

MEBIBYTE = 1024 * 1024
DAY_S = 86_400
LINE_OVERHEAD_BYTES = 512  # in the queue, beside its body
RESULTS_AT_ONCE = 64
TAKEN_MAX = 65_536  # lines of a job that all runners of a region have at once
TEXTS = {
    EXPIRED: "This line was not computed before the end of the batch's completion window.",
    CANCELLED: "This line was not computed before the batch was cancelled.",
}
OUTPUT, ERRORS, SEEN = "output", "error", "seen"
INPUT_TOKENS, OUTPUT_TOKENS = "input tokens", "output tokens"
COPY_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class JobTasks:
    """Does tasks with a store. `unix_s`: seconds since 1970, by the store's clock.

    Every method raises StoreError where the store does not work just now: repeat it later.
    """

    store: BatchStore
    unix_s: Callable[[], float]

    async def check(self, job_id: str) -> None:
        """Read the job's input file and queue its lines, or fail the job."""
        try:
            job = await self.store.jobs.get(job_id)
        except JobUnknown:
            await self._forget(job_id)
            return
        if job.status is JobStatus.CANCELLING:
            await self.store.tasks.add(Task.FINISH, job_id)
        if job.is_over:
            await self._forget(job_id)  # what an earlier check had queued
        if job.status is not JobStatus.VALIDATING:
            return
        if self.unix_s() >= job.expires_at:
            await self._end_unread(job_id)
            return
        with tempfile.TemporaryFile() as copy:
            errors, index = await self._read(job, copy)
            if index is None:
                await self.fail(job_id, errors)
            else:
                await self._queue(job, index, copy)

    async def fail(self, job_id: str, errors: Sequence[LineError]) -> None:
        """The job can't be done."""

        def failed(job: BatchJob) -> BatchJob | None:
            if job.status is not JobStatus.VALIDATING:
                return None
            now = int(self.unix_s())
            return replace(job, status=JobStatus.FAILED, failed_at=now, errors=tuple(errors))

        job = await self.store.jobs.update(job_id, failed)
        if job.status is JobStatus.CANCELLING:
            await self.store.tasks.add(Task.FINISH, job_id)
        elif job.is_over:
            await self._forget(job_id)  # what an earlier check had queued

    async def _end_unread(self, job_id: str) -> None:
        def expired(job: BatchJob) -> BatchJob | None:
            if job.status is not JobStatus.VALIDATING:
                return None
            return replace(job, status=JobStatus.EXPIRED, expired_at=int(self.unix_s()))

        await self.store.jobs.update(job_id, expired)
        await self._forget(job_id)

    async def _read(
        self, job: BatchJob, copy: IO[bytes]
    ) -> tuple[Sequence[LineError], JobIndex | None]:
        limits = self.store.limits
        check = FileCheck(
            job.endpoint,
            lines_max=limits.lines_max,
            body_bytes_max=self.store.lines.body_bytes_max,
        )
        try:
            async for chunk in self.store.files.read(job.input_file_id):
                copy.write(chunk)
                check.feed(chunk)
                if check.is_over:
                    break
        except FileUnknown:
            message = f"No such file: {job.input_file_id!r}."
            param = "input_file_id"
            return [LineError(code="file_not_found", message=message, param=param)], None
        index = await asyncio.to_thread(check.end)  # it sorts a million lines for seconds
        if index is not None and _queue_bytes(index) > limits.lines_mib * MEBIBYTE:
            message = f"Its lines need more than the {limits.lines_mib} MiB that all jobs may have."
            return [LineError(code="file_too_large", message=message)], None
        return check.errors, index

    async def _queue(self, job: BatchJob, index: JobIndex, copy: IO[bytes]) -> None:
        store = self.store
        body_bytes_max = store.lines.body_bytes_max
        try:
            for some in _groups(index.wrong):
                results = [_error_of(job, place, copy, body_bytes_max) for place in some]
                await asyncio.gather(*(store.results.put(result) for result in results))
            await store.lines.add(_lines(job, index, copy, body_bytes_max))
        except StoreFull:
            # Two jobs that are half queued could wait for each other's room. The results of wrong
            # lines stay: every runner has counted them.
            if (await store.jobs.get(job.id)).status is JobStatus.VALIDATING:
                await store.lines.remove(job.id)
            raise
        await store.lines.make_ready(job.id, TAKEN_MAX)

        def ready(job: BatchJob) -> BatchJob | None:
            if job.status is not JobStatus.VALIDATING:
                return None
            return replace(
                job,
                status=JobStatus.IN_PROGRESS,
                in_progress_at=int(self.unix_s()),
                total=index.total,
                failed=len(index.wrong),
            )

        try:
            now = await store.jobs.update(job.id, ready)
        except JobUnknown:
            await self._forget(job.id)
            return
        if now.status is JobStatus.CANCELLING or (now.total and now.answered == now.total):
            await store.tasks.add(Task.FINISH, job.id)
        elif now.is_over:
            await self._forget(job.id)

    async def finish(self, job_id: str) -> None:
        """Write the job's output files and end it, if its lines are done, or are to be left."""
        try:
            counted = await self.store.results.count(job_id)
            job = await self.store.jobs.update(job_id, lambda job: self._closed(job, counted))
        except JobUnknown:
            await self._forget(job_id)
            return
        if job.status in (JobStatus.FINALIZING, JobStatus.CANCELLING):
            job = await self._write_files(job, await self._left_out(job))
        if job.is_over:
            await self._forget(job_id)

    def _closed(self, job: BatchJob, counted: int) -> BatchJob | None:
        """The job, of which so many lines have a result, with no more lines to be computed."""
        now = int(self.unix_s())
        if job.status is not JobStatus.IN_PROGRESS:
            return None
        closed = replace(job, status=JobStatus.FINALIZING, finalizing_at=now)
        if counted >= job.total:
            return closed
        return replace(closed, expired_at=now) if now >= job.expires_at else None

    async def _left_out(self, job: BatchJob) -> dict[int, str]:
        """Lines that are not to be computed any more: their numbers and custom_ids.

        Their errors go straight into the error file. If they had to be stored as results, a job
        could neither be cancelled nor expire while the store of results is full.
        """
        if not job.total or (job.cancelling_at is None and job.expired_at is None):
            return {}
        return {line.number: line.custom_id async for line in self.store.lines.left(job.id)}

    async def _write_files(self, job: BatchJob, left_out: dict[int, str]) -> BatchJob:
        counts = {OUTPUT: 0, ERRORS: 0, EXPIRED: 0, INPUT_TOKENS: 0, OUTPUT_TOKENS: 0}
        with tempfile.TemporaryFile() as errors:
            # Results are read once: one that comes meanwhile is in neither file, or in one.
            output = self._sorted_out(job, left_out, errors, counts)
            ids = {OUTPUT: await self._write_file(job, OUTPUT, output)}
            ids[ERRORS] = await self._write_file(job, ERRORS, self._copied(job, errors, counts))

        def ended(job: BatchJob) -> BatchJob | None:
            if job.status not in (JobStatus.FINALIZING, JobStatus.CANCELLING):
                return None
            now = int(self.unix_s())
            over = replace(
                job,
                completed=counts[OUTPUT],
                failed=counts[ERRORS],
                output_file_id=ids[OUTPUT],
                error_file_id=ids[ERRORS],
                estimated_end_at=None,
                late=False,
                # What runners added on the way may have been written twice, or be lost with one.
                input_tokens=counts[INPUT_TOKENS],
                output_tokens=counts[OUTPUT_TOKENS],
            )
            if job.cancelling_at is not None:
                return replace(over, status=JobStatus.CANCELLED, cancelled_at=now)
            if job.expired_at is not None or counts[EXPIRED]:
                return replace(over, status=JobStatus.EXPIRED, expired_at=now)
            return replace(over, status=JobStatus.COMPLETED, completed_at=now)

        return await self.store.jobs.update(job.id, ended)

    async def _write_file(
        self, job: BatchJob, kind: str, lines: AsyncIterator[bytes]
    ) -> str | None:
        """Store the file if it has lines; its id."""
        try:
            first = await anext(lines)
        except StopAsyncIteration:
            return None
        expires_s = job.output_expires_s or self.store.limits.output_days * DAY_S
        new = NewFile(
            filename=f"{job.id}_{kind}.jsonl",
            purpose=Purpose.BATCH_OUTPUT,
            tenant=job.tenant,
            expires_at=int(self.unix_s()) + expires_s,
            id=derived_file_id(job.id, kind),
        )
        return (await self.store.files.put(new, _with_first(first, lines))).id

    async def _sorted_out(
        self, job: BatchJob, left_out: dict[int, str], errors: IO[bytes], counts: dict[str, int]
    ) -> AsyncIterator[bytes]:
        """The lines of the output file; those of the error file go to `errors`. `counts` gets how
        many there are of each, how many have expired, and the tokens of answers."""
        counts[SEEN] = 0
        async for result in self._every_result(job, left_out, counts):
            line = result.body + b"\n"
            if is_error(result.status):
                counts[ERRORS] += 1
                counts[EXPIRED] += error_code(result.status, result.body) == EXPIRED
                errors.write(line)
            else:
                counts[OUTPUT] += 1
                tokens = tokens_of(result.status, result.body)
                counts[INPUT_TOKENS] += tokens.input
                counts[OUTPUT_TOKENS] += tokens.output
                yield line
        await self._check_unfinished(job, counts[SEEN])

    async def _every_result(
        self, job: BatchJob, left_out: dict[int, str], counts: dict[str, int]
    ) -> AsyncIterator[StoredResult]:
        """What the store has, and an error for each line left out that has no result."""
        code = CANCELLED if job.cancelling_at is not None else EXPIRED
        waiting = deque(sorted(left_out))

        def error() -> StoredResult:
            number = waiting.popleft()
            args = (job.id, number, left_out[number])
            return stored(*args, unanswered(*args, code, TEXTS[code]))

        async for result in self.store.results.read(job.id, job.total):
            counts[SEEN] += 1
            while waiting and waiting[0] < result.number:
                yield error()
            if waiting and waiting[0] == result.number:
                waiting.popleft()
            yield result
        while waiting:
            yield error()

    async def _copied(
        self, job: BatchJob, errors: IO[bytes], counts: dict[str, int]
    ) -> AsyncIterator[bytes]:
        errors.seek(0)
        while piece := errors.read(COPY_BYTES):
            yield piece
        await self._check_unfinished(job, counts[SEEN])

    async def _check_unfinished(self, job: BatchJob, seen: int) -> None:
        """Raise StoreUnavailable if another runner has finished the job meanwhile and removed its
        results: what was read here may lack some, and must not replace the whole files."""
        if await self.store.results.count(job.id) < seen:
            raise StoreUnavailable(f"{job.id} was finished by another runner meanwhile")

    async def _forget(self, job_id: str) -> None:
        await self.store.lines.remove(job_id)
        await self.store.results.remove(job_id)


def stored(job: str, number: int, custom_id: str, result: Result) -> StoredResult:
    """The result as the store takes it."""
    return StoredResult(
        job=job, number=number, status=result.status, custom_id=custom_id, body=result.line
    )


async def _with_first(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for other in others:
        yield other


def _queue_bytes(index: JobIndex) -> int:
    return sum(place.length + LINE_OVERHEAD_BYTES for place in index.good)


def _groups(places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    for start in range(0, len(places), RESULTS_AT_ONCE):
        yield places[start : start + RESULTS_AT_ONCE]


def _raw(place: Place, copy: IO[bytes]) -> bytes:
    copy.seek(place.offset)
    return copy.read(place.length)


def _error_of(job: BatchJob, place: Place, copy: IO[bytes], body_bytes_max: int) -> StoredResult:
    """The result of a line that has an error of its own."""
    try:
        read_line(_raw(place, copy), place.number, job.endpoint, body_bytes_max)
    except LineInvalid as invalid:
        error, custom_id = invalid.error, invalid.custom_id or ""
        args = (job.id, place.number, custom_id)
        return stored(*args, unanswered(*args, error.code, error.message, error.param))
    raise AssertionError("a line that was wrong is right now")


def _lines(job: BatchJob, index: JobIndex, copy: IO[bytes], body_bytes_max: int) -> Iterator[Line]:
    for place in index.good:
        read = read_line(_raw(place, copy), place.number, job.endpoint, body_bytes_max)
        yield Line(
            job=job.id,
            number=place.number,
            custom_id=read.custom_id,
            url=read.url,
            body=read.body,
        )
