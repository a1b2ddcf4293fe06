"""OpenAI's Batch API: jobs of uploaded files, which the region's batch runners do.

A job is stored, and then the task to check its input file: from then on it is the runners'. What
clients see is the job's record.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import fields, replace
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from mesh.adapters.refused import RequestRefused
from mesh.batch.records import (
    JobExists,
    JobUnknown,
    Page,
    StoreError,
    StoreFull,
    StoreUnavailable,
    new_job_id,
    repeated_id,
)
from mesh.batch.store import BatchStore
from mesh.http.batch_requests import (
    BatchDoor,
    checked_query,
    id_in,
    idempotency_key,
    key_of_another,
    limit_of,
    owner_of,
    small_body,
    store_errors,
    unknown_as,
)
from mesh.http.files_api import find_file
from mesh.http.http_request import HttpRequest
from mesh.http.read_request import read_options
from schemas.batch import BatchJob, JobStatus, Purpose, Task, window_s
from schemas.batch_http import BATCHES_LISTED, BATCHES_MAX, Batch, BatchRequest, batch_of
from schemas.http import H_RETRY_COUNT, Fault
from schemas.problems import did_you_mean, problem_of

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 128 * 1024  # metadata of the longest, each character escaped
INPUT_FILE = "input_file_id"
# For so long OpenAI's clients repeat a request, which has no key of its own. Two batches that are
# alike in everything become one only if the second one's request had to be repeated.
REPEATED_S, REPEATED_JOBS = 1800, 100
_REQUEST: TypeAdapter[BatchRequest] = TypeAdapter(BatchRequest)
_FIELDS = tuple(field.name for field in fields(BatchRequest))
_CAN_BE_CANCELLED = frozenset({JobStatus.VALIDATING, JobStatus.IN_PROGRESS})
_IS_CANCELLED = frozenset({JobStatus.CANCELLING, JobStatus.CANCELLED})


class BatchesApi:
    """The handlers of one router; they raise RequestRefused."""

    def __init__(self, door: BatchDoor) -> None:
        self._door = door
        self._submitting: set[asyncio.Task[BatchJob]] = set()

    async def create(self, request: HttpRequest) -> Batch:
        """Store a job and the task to check its input file; once for all repetitions of a request,
        which have its idempotency key, or a count of OpenAI's clients."""
        self._door.refuse_new()
        checked_query(request.query, ())
        store, headers = self._door.batch_store(), request.headers
        owner, key = owner_of(request), idempotency_key(request)
        residency = self._door.residency(read_options(headers, {}).residency, request.caller)
        wanted = _batch_request(await small_body(request, BODY_BYTES_MAX))
        with store_errors():
            now = int(store.unix_s())
        output_expires_after = wanted.output_expires_after
        job = BatchJob(
            id=new_job_id() if key is None else repeated_id("batch_", owner, key),
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            status=JobStatus.VALIDATING,
            created_at=now,
            expires_at=now + window_s(wanted.completion_window),
            tenant=owner,
            residency=residency,
            metadata=wanted.metadata,
            output_expires_s=output_expires_after.seconds if output_expires_after else None,
        )
        with store_errors():
            before = None
            if key is not None:
                before = await _same_id(store, job)
            elif headers.get(H_RETRY_COUNT, "0") != "0":
                before = await _repeated(store, job)
            if before is None:  # a repetition may come when the input file was deleted
                await self._check_input(store, wanted.input_file_id, owner)
                before = await self._to_its_end(_submit(store, job))
            return batch_of(before)

    async def retrieve(self, request: HttpRequest) -> Batch:
        """One job as it is now."""
        return batch_of(await self._own(self._door.batch_store(), request))

    async def list(self, request: HttpRequest) -> Page[Batch]:
        """The tenant's jobs, the newest first."""
        store, owner = self._door.batch_store(), owner_of(request)
        query = checked_query(request.query, ("limit", "after"))
        limit = limit_of(query, BATCHES_LISTED, BATCHES_MAX)
        with store_errors(), unknown_as(Fault.BATCH_UNKNOWN, "after"):
            page = await store.jobs.list(tenant=owner, after=query.get("after", ""), limit=limit)
        return Page([batch_of(job) for job in page.items], page.has_more)

    async def cancel(self, request: HttpRequest) -> Batch:
        """End a job; a second time changes nothing."""
        self._door.refuse_new()
        store = self._door.batch_store()
        job = await self._own(store, request)
        with store_errors(), unknown_as(Fault.BATCH_UNKNOWN):
            now = int(store.unix_s())
            return batch_of(await store.jobs.update(job.id, lambda job: _cancelled(job, now)))

    async def close(self) -> None:
        """Wait until jobs that are being stored are."""
        if self._submitting:
            await asyncio.wait(self._submitting)

    async def _to_its_end(self, submitting: Coroutine[Any, Any, BatchJob]) -> BatchJob:
        """Do all of it, also where the client hangs up: no job may be without its task."""
        task = asyncio.create_task(submitting)
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        return await asyncio.shield(task)

    async def _check_input(self, store: BatchStore, file_id: str, owner: str) -> None:
        info = await find_file(store, file_id, owner)
        if info is None:
            raise RequestRefused(Fault.INVALID, f"no file {file_id:.64}", INPUT_FILE)
        if info.purpose is not Purpose.BATCH:
            message = f"{file_id} has the purpose {info.purpose}; it must be {Purpose.BATCH}"
            raise RequestRefused(Fault.INVALID, message, INPUT_FILE)

    async def _own(self, store: BatchStore, request: HttpRequest) -> BatchJob:
        """The job that the path names, if it is the tenant's. Raises RequestRefused."""
        checked_query(request.query, ())
        owner, job_id = owner_of(request), id_in(request.path)
        with store_errors(), unknown_as(Fault.BATCH_UNKNOWN):
            job = await store.jobs.get(job_id)
        if job.tenant != owner:
            raise RequestRefused(Fault.BATCH_UNKNOWN, f"no job {job_id:.64}")
        return job


async def _submit(store: BatchStore, job: BatchJob) -> BatchJob:
    """Store the job and its first task; the job as it is stored. Raises RequestRefused,
    StoreUnavailable."""
    try:
        job = await _stored(store, job)
    except StoreFull as error:
        raise RequestRefused(Fault.BATCHES_FULL, str(error)) from error
    try:
        await store.tasks.add(Task.CHECK, job.id)
    except StoreFull as error:
        with contextlib.suppress(StoreError):
            await store.jobs.delete(job.id)
        raise RequestRefused(Fault.BATCHES_FULL, str(error)) from error
    except StoreUnavailable as error:  # the job is stored: batch runners add a task that is missing
        log.warning("%s is checked later: %s", job.id, error)
    return job


async def _stored(store: BatchStore, job: BatchJob) -> BatchJob:
    """Store the job. Where it is unknown whether it was stored, the same is done once more: the
    second time finds the first one's job."""
    for tries_left in (1, 0):
        try:
            await store.jobs.create(job)
        except JobExists:
            return await _same_id(store, job) or job
        except StoreUnavailable:
            if not tries_left or not store.is_connected:
                raise
        else:
            break
    return job


async def _same_id(store: BatchStore, job: BatchJob) -> BatchJob | None:
    """The stored job of this id. Raises RequestRefused if another request made it."""
    try:
        known = await store.jobs.get(job.id)
    except JobUnknown:
        return None
    if _request_of(known) != _request_of(job):
        raise key_of_another("batch")
    return known


async def _repeated(store: BatchStore, job: BatchJob) -> BatchJob | None:
    """The job that an earlier try of the same request has stored, if one did."""
    page = await store.jobs.list(tenant=job.tenant, limit=REPEATED_JOBS)
    for known in page.items:
        is_recent = job.created_at - known.created_at <= REPEATED_S
        if is_recent and _request_of(known) == _request_of(job):
            return known
    return None


def _request_of(job: BatchJob) -> tuple[object, ...]:
    """What the client asked for."""
    asked = (job.endpoint, job.input_file_id, job.completion_window, job.output_expires_s)
    return (*asked, job.metadata, job.residency)


def _cancelled(job: BatchJob, now: int) -> BatchJob | None:
    """The job that is to be cancelled; None for one that is. Raises RequestRefused."""
    if job.status in _IS_CANCELLED:
        return None
    if job.status not in _CAN_BE_CANCELLED:
        message = f"the batch is {job.status} and can't be cancelled"
        raise RequestRefused(Fault.BATCH_OVER, message)
    return replace(job, status=JobStatus.CANCELLING, cancelling_at=now)


def _batch_request(body: bytes) -> BatchRequest:
    """Raises RequestRefused."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(Fault.INVALID, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestRefused(Fault.INVALID, "the body must be a JSON object")
    for name in given:
        if name not in _FIELDS:
            message = f"unknown field {name!r:.60}{did_you_mean(name, _FIELDS)}"
            raise RequestRefused(Fault.INVALID, message, name[:60])
    try:
        return _REQUEST.validate_python(given)
    except ValidationError as error:
        param = str(error.errors(include_url=False)[0]["loc"][0])
        raise RequestRefused(Fault.INVALID, problem_of(error), param) from error
