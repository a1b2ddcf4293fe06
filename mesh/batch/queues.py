"""The work queues BATCH_TASKS and BATCH_LINES, and the answers in BATCH_RESULTS.

A message that is taken and not acknowledged within ACK_WAIT_S goes to another taker, unless the
one who has it says that it is in progress. So every task and every line may be done twice; a second
result of a line is refused by its subject.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from nats.aio.msg import Msg

from infra.process import LimitedLog
from mesh.batch.connection import Connection, NotThere, Stored, SubjectTaken, Window
from mesh.batch.pulling import (
    ACK,
    IN_PROGRESS,
    NANOSECONDS,
    TERM,
    Puller,
    follow,
    make_consumer,
    nak,
)
from mesh.batch.records import Line, LinesGone, Queued, Result, ResultHead, StoreUnavailable
from schemas.batch import (
    H_CUSTOM_ID,
    H_STATUS,
    H_URL,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
    Task,
    line_subject,
    result_subject,
    task_subject,
)

ACK_WAIT_S = 30.0
IN_PROGRESS_S = 10.0
TASK_CONSUMER = "runners"
TASKS_TAKEN_MAX = 1000
_limited = LimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class TakenTask:
    """A task that this runner does now."""

    task: Task
    job: str
    delivered: int
    """How often it was taken, this time included."""
    reply: str


@dataclass(frozen=True, slots=True)
class TakenLine:
    """A line that this runner has now."""

    line: Line
    delivered: int
    """How often it was taken, this time included."""
    reply: str


class Tasks:
    """The queue of whole jobs' tasks; one consumer for all runners."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._puller: Puller | None = None

    async def add(self, task: Task, job: str) -> bool:
        """Queue a task; False if that job's is there already, waiting or taken.

        Raises StoreFull, StoreUnavailable.
        """
        try:
            await self._connection.publish(task_subject(task, job), b"")
        except SubjectTaken:
            return False
        return True

    async def take(self, wait_s: float) -> TakenTask | None:
        """The next task, or None after `wait_s`. By one caller at a time. Raises
        StoreUnavailable."""
        try:
            puller = await self._opened()
            for msg in await puller.pull(1, wait_s):
                _, _, kind, job = msg.subject.split(".")
                if kind in set(Task):
                    return TakenTask(Task(kind), job, msg.metadata.num_delivered, msg.reply)
                await self._connection.send(msg.reply, TERM)
                _limited.warning("task", "unknown", "dropped a task of an unknown kind")
        except LinesGone as error:  # its consumer was removed
            await self.close()
            raise StoreUnavailable(str(error)) from error
        return None

    async def ack(self, taken: TakenTask) -> None:
        """It is done; confirmed by the server. Raises StoreUnavailable."""
        await self._connection.request(taken.reply, ACK)

    async def nak(self, taken: TakenTask, delay_s: float = 0.0) -> None:
        """Put it back, for the next taker in `delay_s`. Raises StoreUnavailable."""
        await self._connection.send(taken.reply, nak(delay_s))

    @contextlib.asynccontextmanager
    async def keep(self, taken: TakenTask) -> AsyncIterator[None]:
        """Nobody else gets the task inside this block, however long it takes."""
        keeping = asyncio.create_task(self._keep(taken.reply))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def close(self) -> None:
        puller, self._puller = self._puller, None
        if puller is not None:
            await puller.close()

    async def _keep(self, reply: str) -> None:
        while True:
            try:
                await self._connection.send(reply, IN_PROGRESS)
            except StoreUnavailable as error:
                _limited.warning("task", "in progress", "a task may be taken twice: %s", error)
            await asyncio.sleep(IN_PROGRESS_S)

    async def _opened(self) -> Puller:
        if self._puller is None:
            subject = task_subject("*", "*")
            await make_consumer(
                self._connection, STREAM_TASKS, _queue(TASK_CONSUMER, subject, TASKS_TAKEN_MAX)
            )
            puller = Puller(self._connection, STREAM_TASKS, TASK_CONSUMER)
            await puller.open()
            self._puller = puller
        return self._puller


class Lines:
    """The queue of lines: each job has a consumer of its own, of which all runners take."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pullers: dict[str, Puller] = {}

    @property
    def body_bytes_max(self) -> int:
        """The largest body of a line or result."""
        return self._connection.payload_bytes_max

    async def add(self, lines: Iterable[Line] | AsyncIterable[Line]) -> int:
        """Queue lines; how many. One that is in the queue already counts and is not added twice.

        Raises StoreFull (those before it are in the queue: `remove` the job's, or go on later),
        TooLarge, StoreUnavailable.
        """
        window = Window(self._connection, may_be_there=True)
        try:
            async for line in _each(lines):
                headers = {H_CUSTOM_ID: json.dumps(line.custom_id), H_URL: line.url}
                await window.send(line_subject(line.job, line.number), line.body, headers)
            await window.settle()
        finally:
            await window.give_up()
        return len(window.numbers)

    async def make_ready(self, job: str, window: int) -> None:
        """Let runners take the job's lines, `window` at most without acknowledgement, all runners
        together. Raises StoreUnavailable."""
        config = _queue(job, line_subject(job, "*"), window)
        await make_consumer(self._connection, STREAM_LINES, config)

    async def take(
        self, job: str, batch: int, wait_s: float, bytes_max: int = 0
    ) -> list[TakenLine]:
        """Up to `batch` lines, as soon as there is one; none after `wait_s`. By one caller a job at
        a time. Raises LinesGone, StoreUnavailable."""
        puller = self._pullers.get(job)
        if puller is None:
            puller = Puller(self._connection, STREAM_LINES, job)
            await puller.open()
            self._pullers[job] = puller
        try:
            found = await puller.pull(batch, wait_s, bytes_max)
        except LinesGone:
            await self.leave(job)
            raise
        taken = []
        for msg in found:
            try:
                taken.append(_taken(msg))
            except (KeyError, ValueError) as error:  # somebody put it there by hand
                _limited.warning("line", "unreadable", "dropped a line: %s", error)
                await self._connection.send(msg.reply, TERM)
        return taken

    async def in_progress(self, taken: Iterable[TakenLine]) -> None:
        """They are worked on: nobody else gets them for another ACK_WAIT_S. Raises
        StoreUnavailable."""
        for each in taken:
            await self._connection.send(each.reply, IN_PROGRESS)

    async def ack(self, taken: TakenLine) -> None:
        """Its result is stored. If this is lost the line comes again. Raises StoreUnavailable."""
        await self._connection.send(taken.reply, ACK)

    async def nak(self, taken: TakenLine, delay_s: float = 0.0) -> None:
        """Put it back, for the next taker in `delay_s`. Raises StoreUnavailable."""
        await self._connection.send(taken.reply, nak(delay_s))

    async def queued(self, job: str) -> Queued:
        """What is left. Raises LinesGone, StoreUnavailable."""
        try:
            info = await self._connection.ask(f"CONSUMER.INFO.{STREAM_LINES}.{job}")
        except NotThere as error:
            raise LinesGone(str(error)) from error
        return Queued(waiting=info["num_pending"], taken=info["num_ack_pending"])

    async def left(self, job: str) -> AsyncIterator[Line]:
        """The lines that are in the queue, those that are taken too. Raises StoreUnavailable."""
        async for stored in self._connection.last_of_all(STREAM_LINES, line_subject(job, "*")):
            yield _line(stored.subject, stored.headers, stored.data)

    def joined(self) -> set[str]:
        """Jobs of which lines were taken here, until `leave`."""
        return set(self._pullers)

    async def leave(self, job: str) -> None:
        """Take no more of that job here; lines that came and were not given out go back."""
        puller = self._pullers.pop(job, None)
        if puller is not None:
            await puller.close()

    async def remove(self, job: str) -> None:
        """Remove the job's lines, taken ones too, and its consumer. Raises StoreUnavailable."""
        await self.leave(job)
        await self._connection.purge(STREAM_LINES, line_subject(job, "*"))
        with contextlib.suppress(NotThere):
            await self._connection.ask(f"CONSUMER.DELETE.{STREAM_LINES}.{job}")

    async def close(self) -> None:
        for job in list(self._pullers):
            await self.leave(job)


class Results:
    """The answers: one a line, and the first for ever."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def put(self, result: Result) -> bool:
        """Store a line's result; False if it has one already, which stays.

        Raises StoreFull, TooLarge, StoreUnavailable (then it may be stored: put it again).
        """
        headers = {H_STATUS: str(result.status), H_CUSTOM_ID: json.dumps(result.custom_id)}
        subject = result_subject(result.job, result.number)
        try:
            await self._connection.publish(subject, result.body, headers)
        except SubjectTaken:
            return False
        return True

    async def get(self, job: str, number: int) -> Result | None:
        """Raises StoreUnavailable."""
        stored = await self._connection.last(STREAM_RESULTS, result_subject(job, number))
        return None if stored is None else _result(stored)

    async def count(self, job: str) -> int:
        """Raises StoreUnavailable."""
        return await self._connection.count(STREAM_RESULTS, result_subject(job, "*"))

    async def follow(self) -> AsyncIterator[ResultHead]:
        """Every result of every job without its body: those there are, then each as it comes.
        Goes on by itself when the bus was away; ends never."""
        every = result_subject("*", "*")
        async for stored in follow(self._connection, STREAM_RESULTS, every, headers_only=True):
            job, number = _place(stored.subject)
            yield ResultHead(job=job, number=number, status=_status(stored))

    async def read(self, job: str, total: int) -> AsyncIterator[Result]:
        """The job's results in the order of its lines 1 to `total`, without those that have none.
        Raises StoreUnavailable."""
        subjects = [result_subject(job, number) for number in range(1, total + 1)]
        async for stored in self._connection.last_of_each(STREAM_RESULTS, subjects):
            yield _result(stored)

    async def remove(self, job: str) -> None:
        """Remove the job's results. Raises StoreUnavailable."""
        await self._connection.purge(STREAM_RESULTS, result_subject(job, "*"))


def _place(subject: str) -> tuple[str, int]:
    """Job and number of the line in a subject."""
    *_, job, number = subject.split(".")
    return job, int(number)


def _queue(name: str, subject: str, taken_max: int) -> dict[str, object]:
    """A durable consumer of a work queue."""
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * NANOSECONDS),
        "max_ack_pending": taken_max,
        "filter_subject": subject,
    }


def _taken(msg: Msg) -> TakenLine:
    line = _line(msg.subject, msg.headers or {}, msg.data)
    return TakenLine(line, msg.metadata.num_delivered, msg.reply)


def _line(subject: str, headers: Mapping[str, str], body: bytes) -> Line:
    job, number = _place(subject)
    return Line(
        job=job,
        number=number,
        custom_id=json.loads(headers[H_CUSTOM_ID]),
        url=headers[H_URL],
        body=body,
    )


def _result(stored: Stored) -> Result:
    job, number = _place(stored.subject)
    return Result(
        job=job,
        number=number,
        status=_status(stored),
        custom_id=json.loads(stored.headers.get(H_CUSTOM_ID, '""')),
        body=stored.data,
    )


def _status(stored: Stored) -> int:
    text = stored.headers.get(H_STATUS, "")
    return int(text) if text.isdecimal() else 0


async def _each(lines: Iterable[Line] | AsyncIterable[Line]) -> AsyncIterator[Line]:
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            yield line
    else:
        for line in lines:
            yield line
