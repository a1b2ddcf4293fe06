"""A region's store of batch jobs on a real nats-server, and jobs to put there."""

import contextlib
import time
from collections.abc import AsyncIterator

import nats
import orjson

from infra.batch_table import BatchTable
from infra.bus import BusAddress
from mesh.batch import streams
from mesh.batch.records import NewFile, new_job_id
from mesh.batch.store import BatchStore
from schemas.batch import BatchJob, JobStatus, Purpose, Task
from schemas.http import CHAT


async def make_streams(url: str, limits: BatchTable) -> None:
    client = await nats.connect(url)
    try:
        for config in streams.kept(limits):
            await client.jetstream().add_stream(config)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def batch_store(url: str, limits: BatchTable | None = None) -> AsyncIterator[BatchStore]:
    """A connected store; its streams must be there."""
    store = BatchStore(BusAddress(url), "test", limits or BatchTable())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def once(data: bytes) -> AsyncIterator[bytes]:
    """The bytes, in pieces."""
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def submit(
    store: BatchStore, data: bytes, *, window_s: int = 3600, check: bool = True, **fields: object
) -> BatchJob:
    """Upload the file and create a job of it, with its first task. `fields`: of its record."""
    new = NewFile(filename="in.jsonl", purpose=Purpose.BATCH)
    info = await store.files.put(new, once(data))
    now = int(time.time())
    times = {"created_at": now, "expires_at": now + window_s}
    job = BatchJob(
        id=new_job_id(),
        endpoint=CHAT,
        input_file_id=info.id,
        completion_window="1h",
        status=JobStatus.VALIDATING,
        **{**times, **fields},
    )
    await store.jobs.create(job)
    if check:
        await store.tasks.add(Task.CHECK, job.id)
    return job


def request_line(
    custom_id: str, *, model: str = "tiny", content: str = "hi", **changes: object
) -> bytes:
    """One line of an input file, with its line break."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes
    return orjson.dumps(fields) + b"\n"


async def output_lines(store: BatchStore, file_id: str | None) -> dict[str, dict]:
    """The lines of an output file, by custom_id; each must be there once."""
    if file_id is None:
        return {}
    data = b"".join([chunk async for chunk in store.files.read(file_id)])
    found: dict[str, dict] = {}
    for line in data.splitlines():
        fields = orjson.loads(line)
        assert fields["custom_id"] not in found, f"{fields['custom_id']} is there twice"
        found[fields["custom_id"]] = fields
    return found
