"""One connection to a region's account BATCH: publishing, requesting and reading in JetStream.

nats-py's own JetStream calls wait for one answer after another and give each a future, a token and
a copy of its headers; here many publishes are under way at once, and answers go to one inbox. Reads
are direct gets of many messages (nats-server 2.11): they need no consumer, so one that breaks off
is repeated from the next sequence number and leaves nothing behind.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import orjson
from nats.aio.msg import Msg

from infra import bus
from infra.bus import WRONG_LAST, BusAddress, BusClient
from mesh.batch.records import (
    StoreError,
    StoreFull,
    StoreUnavailable,
    StreamFull,
    StreamsMissing,
    TooLarge,
)

T = TypeVar("T")

REQUEST_S = 10.0  # a server that writes to a slow disk, or a process that was suspended for seconds
WINDOW_MESSAGES = 256  # under way without acknowledgement
WINDOW_BYTES = 4 * 1024 * 1024
HEADER_BYTES_RESERVE = 16 * 1024  # of max_payload, which counts headers too
CLOCK_REPLY_S_MAX = 2.0  # a slower reply does not correct the clock
LARGE_PULLS = 2  # under way, each for one message of any size
READ_SUBJECTS = 256  # in one read, of 1,024 that the server allows
READ_BYTES = 8 * 1024 * 1024
DIRECT_GET = "$JS.API.DIRECT.GET."

# nats-server's error codes (errors.json of its source).
STORE_FAILED = 10077  # a limit of the stream; the description says which
_NO_ROOM = (10002, 10023, 10028, 10047)  # of the account, or of the whole server
_TOO_LARGE = (10054, 10097)
_NO_STREAM = 10059
_NOT_FOUND = (10014, 10037)  # consumer, message
_PER_SUBJECT = "maximum messages per subject exceeded"


class SubjectTaken(StoreError):
    """The stream has a message of that subject and takes no second one."""


class ChangedMeanwhile(StoreError):
    """Somebody else wrote the record first."""


class NotThere(StoreError):
    """No such message or consumer."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream."""

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str]

    @property
    def stored_at(self) -> float:
        """When, in seconds since 1970."""
        return datetime.fromisoformat(self.headers["Nats-Time-Stamp"]).timestamp()


@dataclass(frozen=True, slots=True)
class Messages:
    """What one read gave: `left` further ones match."""

    found: list[Stored]
    left: int


class Connection:
    """Use `open`, then the rest, then `close`. Every call ends within REQUEST_S or raises
    StoreUnavailable; nats-py reconnects for ever by itself."""

    def __init__(self, address: BusAddress, name: str, inbox_prefix: str) -> None:
        self._address, self._name, self._prefix = address, name, inbox_prefix
        self._client: BusClient | None = None
        self._inbox = ""
        self._tokens = itertools.count(1)
        self._awaited: dict[str, tuple[asyncio.Future[Any], Callable[[Msg], None]]] = {}
        self._ahead_s: float | None = None  # nats-server's time of day, less this process's clock
        self.on_lost: set[Callable[[], None]] = set()  # called at each loss of the connection
        self.large_pulls = asyncio.Semaphore(LARGE_PULLS)
        # Held while a whole bucket is read for a list: several at once would take the memory of
        # several, and each turn of the event loop that of all.
        self.reading_all = asyncio.Lock()

    @property
    def client(self) -> BusClient:
        assert self._client is not None, "the store is not open"
        return self._client

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def is_closed(self) -> bool:
        return self._client is not None and self._client.is_closed

    @property
    def payload_bytes_max(self) -> int:
        """The largest body of one message beside its headers."""
        return self.client.max_payload - HEADER_BYTES_RESERVE

    async def open(self) -> None:
        """Connect. Raises infra.bus.BusUnreachable."""
        self._client = await bus.connect(
            self._address, name=self._name, inbox_prefix=self._prefix, on_lost=self._lost
        )
        self._inbox = self._client.new_inbox()
        try:
            await self._client.listen(f"{self._inbox}.*", self._answered)
        except nats.errors.Error as error:
            raise bus.BusUnreachable(f"the bus was lost again: {error}") from error

    async def close(self) -> None:
        if self._client is not None:
            await bus.close(self._client)

    def _answered(self, msg: Msg) -> None:
        token = msg.subject.rpartition(".")[2]
        awaited = self._awaited.get(token)
        if awaited is None:
            return
        answer, take = awaited
        if not answer.done():
            take(msg)
        if answer.done():
            del self._awaited[token]

    def _lost(self) -> None:
        """What was requested before is not answered any more; who waits need not."""
        for answer, _ in list(self._awaited.values()):
            if not answer.done():
                answer.set_exception(StoreUnavailable("the connection to nats-server was lost"))
        for lost in list(self.on_lost):
            lost()

    def _awaiting(self, answer: "asyncio.Future[Any]", take: Callable[[Msg], None]) -> str:
        """The subject whose messages `take` gets, until the answer is there."""
        token = str(next(self._tokens))
        self._awaited[token] = (answer, take)
        answer.add_done_callback(lambda _: self._awaited.pop(token, None))
        return f"{self._inbox}.{token}"

    async def begin(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> "asyncio.Future[int]":
        """Publish; the future gets the message's number in its stream when it is stored.

        The future raises StoreFull, SubjectTaken, ChangedMeanwhile, TooLarge, StoreUnavailable.
        """
        if len(payload) > self.payload_bytes_max:
            raise TooLarge(f"{len(payload)} bytes, one message may have {self.payload_bytes_max}")
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        inbox = self._awaiting(stored, lambda msg: _acknowledge(stored, msg, subject))
        await self._send(stored, subject, payload, inbox, headers)
        return stored

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> int:
        """Publish, and wait until it is stored; raises what `begin`'s future does."""
        return await in_time(await self.begin(subject, payload, headers), subject)

    async def send(self, subject: str, payload: bytes) -> None:
        """Publish to the server itself, without an answer (acknowledgements)."""
        with unavailable(subject):
            await self.client.publish(subject, payload)

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Publish to the server itself, and wait for its one answer. Raises StoreUnavailable."""
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        inbox = self._awaiting(answer, answer.set_result)
        await self._send(answer, subject, payload, inbox)
        msg = await in_time(answer, subject)
        if (msg.headers or {}).get("Status") == "503":
            raise StreamsMissing(f"no stream answers {subject}")
        return msg

    async def ask(self, call: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A request to JetStream's API. Raises NotThere, StoreFull, StoreUnavailable."""
        payload = b"" if request is None else orjson.dumps(request)
        asked_at = _clock()
        answer = await self.request(f"$JS.API.{call}", payload)
        reply: dict[str, Any] = orjson.loads(answer.data)
        if error := reply.get("error"):
            raise _refusal(error, call)
        if "ts" in reply:
            self._read_clock(reply["ts"], asked_at, _clock())
        return reply

    def _read_clock(self, server_time: str, asked_at: float, answered_at: float) -> None:
        if self._ahead_s is None or answered_at - asked_at <= CLOCK_REPLY_S_MAX:
            server_at = datetime.fromisoformat(server_time).timestamp()
            self._ahead_s = server_at - (asked_at + answered_at) / 2

    def unix_s(self) -> float:
        """The time of day by nats-server's clock, in seconds since 1970, as replies of `ask` show
        it (`STREAM.INFO` and `CONSUMER.INFO`). Raises StoreUnavailable before the first one."""
        if self._ahead_s is None:
            raise StoreUnavailable("nats-server's time of day is not known yet")
        return self._ahead_s + _clock()

    async def purge(self, stream: str, subject: str) -> None:
        """Remove all messages that match. Raises StoreUnavailable."""
        await self.ask(f"STREAM.PURGE.{stream}", {"filter": subject})

    async def read(self, stream: str, request: Mapping[str, Any]) -> Messages:
        """Messages by one direct get of several. Raises StoreUnavailable."""
        found: list[Stored] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def take(msg: Msg) -> None:
            headers = msg.headers or {}
            if "Status" in headers:
                _end(ended, headers, stream)
            else:
                found.append(_stored(headers, msg.data))

        inbox = self._awaiting(ended, take)
        await self._send(ended, f"{DIRECT_GET}{stream}", orjson.dumps(request), inbox)
        return Messages(found, await in_time(ended, stream))

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message of one subject. Raises StoreUnavailable."""
        msg = await self.request(f"{DIRECT_GET}{stream}.{subject}")
        headers = msg.headers or {}
        status = headers.get("Status")
        if status is None:
            return _stored(headers, msg.data)
        if status != "404":
            raise StoreUnavailable(f"{stream}: {headers.get('Description', status)}")
        return None

    async def _send(
        self,
        answer: "asyncio.Future[Any]",
        subject: str,
        payload: bytes,
        inbox: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        try:
            with unavailable(subject):
                await self.client.publish(subject, payload, inbox, headers)
        except BaseException:
            answer.cancel()
            raise

    async def count(self, stream: str, subject: str) -> int:
        """How many messages match. Raises StoreUnavailable."""
        first = await self.read(stream, {"seq": 1, "next_by_subj": subject, "batch": 1})
        return len(first.found) + first.left

    async def state(self, stream: str) -> dict[str, Any]:
        """Its state as the server reports it (`messages`, `bytes`). Raises StoreUnavailable."""
        state: dict[str, Any] = (await self.ask(f"STREAM.INFO.{stream}"))["state"]
        return state

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """The subjects of messages that match. Raises StoreUnavailable."""
        found: dict[str, int] = {}
        while True:
            request = {"subjects_filter": pattern, "offset": len(found)}
            reply = await self.ask(f"STREAM.INFO.{stream}", request)
            page = reply["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= reply.get("total", 0):
                return list(found)

    async def last_of_each(self, stream: str, subjects: Sequence[str]) -> AsyncIterator[Stored]:
        """The last message of each subject that has one; in order within READ_SUBJECTS of them.

        Raises StoreUnavailable.
        """
        for start in range(0, len(subjects), READ_SUBJECTS):
            missing = list(subjects[start : start + READ_SUBJECTS])
            found: dict[str, Stored] = {}
            left = len(missing)
            while left:
                request = {"multi_last": missing, "batch": len(missing), "max_bytes": READ_BYTES}
                some = await self.read(stream, request)
                found |= {stored.subject: stored for stored in some.found}
                missing = [subject for subject in missing if subject not in found]
                left = some.left if some.found else 0
            for subject in subjects[start : start + READ_SUBJECTS]:
                if subject in found:
                    yield found[subject]

    async def last_of_all(self, stream: str, pattern: str) -> AsyncIterator[Stored]:
        """The last message of each subject that matches, in no order. Raises StoreUnavailable.

        Several times as fast as reading one after the other, by which the server looks for each
        among all others.
        """
        async for stored in self.last_of_each(stream, await self.subjects(stream, pattern)):
            yield stored


class Window:
    """Publishes that are under way together, so many and so large at most.

    `numbers`: those of the stored messages, in the order of sending.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        messages: int = WINDOW_MESSAGES,
        bytes_max: int = WINDOW_BYTES,
        may_be_there: bool = False,
    ) -> None:
        """`may_be_there`: a message whose subject is taken counts as stored, with number 0."""
        self._connection = connection
        self._messages, self._bytes_max = messages, bytes_max
        self._may_be_there = may_be_there
        self._under_way: deque[tuple[asyncio.Future[int], int, str]] = deque()
        self._bytes = 0
        self.numbers: list[int] = []

    async def send(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Publish when there is room. Raises what a publish sent earlier was refused for."""
        while self._under_way and (
            len(self._under_way) >= self._messages or self._bytes + len(payload) > self._bytes_max
        ):
            await self._settle_oldest()
        stored = await self._connection.begin(subject, payload, headers)
        self._under_way.append((stored, len(payload), subject))
        self._bytes += len(payload)

    async def settle(self) -> None:
        """Wait until all are stored; raises as `send` does."""
        while self._under_way:
            await self._settle_oldest()

    async def give_up(self) -> None:
        """Wait until none is under way any more, stored or not; raises nothing."""
        if self._under_way:
            await asyncio.wait([stored for stored, _, _ in self._under_way], timeout=REQUEST_S)
        for stored, _, _ in self._under_way:
            if not stored.cancel() and not stored.cancelled():
                stored.exception()  # it has been seen
        self._under_way.clear()

    async def _settle_oldest(self) -> None:
        stored, size, subject = self._under_way[0]
        try:
            self.numbers.append(await in_time(stored, subject))
        except SubjectTaken:
            if not self._may_be_there:
                raise
            self.numbers.append(0)
        self._under_way.popleft()
        self._bytes -= size


def _clock() -> float:
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def unavailable(what: str) -> Iterator[None]:
    """Raise StoreUnavailable for whatever nats-py raises."""
    try:
        yield
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise StoreUnavailable(f"{what}: {why}") from error


async def in_time(answer: "asyncio.Future[T]", what: str) -> T:
    """The answer within REQUEST_S. Raises what it raises, or StoreUnavailable."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await answer
    except TimeoutError as error:
        raise StoreUnavailable(f"{what}: nats-server did not answer in time") from error


def _acknowledge(stored: "asyncio.Future[int]", msg: Msg, subject: str) -> None:
    if msg.headers and msg.headers.get("Status") == "503":
        stored.set_exception(StreamsMissing(f"no stream takes {subject}"))
        return
    reply = orjson.loads(msg.data)
    if error := reply.get("error"):
        stored.set_exception(_refusal(error, subject))
    else:
        stored.set_result(int(reply["seq"]))


def _refusal(error: Mapping[str, Any], what: str) -> StoreError:
    """The error for what nats-server refused."""
    code, why = error.get("err_code"), str(error.get("description"))
    text = f"{what}: {why}"
    if code == STORE_FAILED and why == _PER_SUBJECT:
        return SubjectTaken(text)
    if code == STORE_FAILED and why.startswith("maximum "):
        return StreamFull(text)
    if code in _NO_ROOM:
        return StoreFull(text)
    if code in WRONG_LAST:
        return ChangedMeanwhile(text)
    if code in _TOO_LARGE:
        return TooLarge(text)
    if code == _NO_STREAM:
        return StreamsMissing(text)
    return NotThere(text) if code in _NOT_FOUND else StoreUnavailable(text)


def _end(ended: "asyncio.Future[int]", headers: Mapping[str, str], stream: str) -> None:
    """A read's last message: 204 after messages, 404 where there was none."""
    status = headers["Status"]
    if status == "204":
        ended.set_result(int(headers.get("Nats-Num-Pending", 0)))
    elif status == "404":
        ended.set_result(0)
    else:
        why = f"{stream}: status {status}: {headers.get('Description', '')}"
        ended.set_exception(StreamsMissing(stream) if status == "503" else StoreUnavailable(why))


def _stored(headers: Mapping[str, str], data: bytes) -> Stored:
    return Stored(headers["Nats-Subject"], int(headers["Nats-Sequence"]), data, headers)
