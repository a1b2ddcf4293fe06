"""A region's files and batch jobs: everything that routers and batch runners do with JetStream.

    store = BatchStore(address, "router us/r1", limits)
    await store.open()
    info = await store.files.put(NewFile(filename="in.jsonl", purpose=Purpose.BATCH), chunks)
    await store.jobs.create(job)
    await store.tasks.add(Task.CHECK, job.id)

It is one connection with the login `batch`. Every call ends in time. `StoreUnavailable` is raised
when the server is away, did not answer, or has no streams: the call may be repeated later, nats-py
reconnects by itself. `follow` and `watch` wait for the server and go on.
"""

import contextlib

from infra.batch_table import BatchTable
from infra.bus import BusAddress
from mesh.batch import streams
from mesh.batch.connection import Connection
from mesh.batch.files import Files
from mesh.batch.jobs import Jobs
from mesh.batch.queues import Lines, Results, Tasks
from mesh.batch.records import StoreError, StreamsMissing
from schemas import subjects
from schemas.batch import (
    BUCKET_JOBS,
    STREAM_FILE_RECORDS,
    STREAM_FILES,
    STREAM_JOBS,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
)

KEY = f"$KV.{BUCKET_JOBS}.forecast"


class KeptForecast:
    """A region's forecast of its online load, kept over restarts of its batch runners.

    All of a region's runners see the same heartbeats, so one entry serves them, whoever wrote it
    last. Its bytes are the caller's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self) -> bytes | None:
        """What was put last. Raises StoreUnavailable."""
        stored = await self._connection.last(STREAM_JOBS, KEY)
        return None if stored is None or not stored.data else stored.data

    async def put(self, data: bytes) -> None:
        """Raises TooLarge, StoreFull, StoreUnavailable."""
        await self._connection.publish(KEY, data)


# As mesh.toml's `[batch]` names them; of records and tasks it names no size.
PARTS = {
    "files": STREAM_FILES,
    "results": STREAM_RESULTS,
    "lines": STREAM_LINES,
    "jobs": STREAM_JOBS,
    "records": STREAM_FILE_RECORDS,
    "tasks": STREAM_TASKS,
}


class BatchStore:
    """The parts are `files`, `jobs`, `tasks`, `lines`, `results` and `forecast`."""

    def __init__(self, address: BusAddress, name: str, limits: BatchTable) -> None:
        """`name` shows in `nats server report connections`."""
        self.limits = limits
        self._connection = Connection(address, name, subjects.INBOX_ROOT)
        self.files = Files(self._connection, limits)
        self.jobs = Jobs(self._connection, limits)
        self.tasks = Tasks(self._connection)
        self.lines = Lines(self._connection)
        self.results = Results(self._connection)
        self.forecast = KeptForecast(self._connection)

    @property
    def is_connected(self) -> bool:
        """Whether the server is there just now; calls may be made either way."""
        return self._connection.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether nats-py has given the connection up, which it does where the login is refused."""
        return self._connection.is_closed

    def unix_s(self) -> float:
        """Seconds since 1970 by nats-server's clock, which is the same for all that share the
        store. Raises StoreUnavailable before it was read once."""
        return self._connection.unix_s()

    async def check(self) -> None:
        """Look for all streams, and read nats-server's clock on the way. Raises StreamsMissing,
        which names those that are not there, and StoreUnavailable."""
        missing = []
        for stream in streams.kept(self.limits):
            try:
                await self._connection.state(str(stream.name))
            except StreamsMissing:
                missing.append(str(stream.name))
        if missing:
            raise StreamsMissing(f"the region's server lacks {', '.join(missing)}")

    async def fill(self) -> dict[str, tuple[int, int]]:
        """The bytes of each part, and how many it may have. Raises StoreUnavailable."""
        found = {}
        for part, stream in PARTS.items():
            reply = await self._connection.ask(f"STREAM.INFO.{stream}")
            found[part] = int(reply["state"]["bytes"]), int(reply["config"]["max_bytes"])
        return found

    async def open(self) -> None:
        """Connect. Raises infra.bus.BusUnreachable."""
        await self._connection.open()
        with contextlib.suppress(StoreError):  # callers check it again and again
            await self.check()

    async def close(self) -> None:
        """Put back what is taken and not given out, and disconnect; raises nothing."""
        await self.files.close()
        await self.tasks.close()
        await self.lines.close()
        await self._connection.close()
