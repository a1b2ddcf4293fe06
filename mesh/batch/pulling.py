"""Pull consumers: messages of a work queue, and a stream followed as it grows.

nats-py's `fetch` may wait out its time with messages in hand, and drops what comes late. Here a
pull returns as soon as there is one message and no other follows at once; what comes late is in the
next one. A request with `no_wait` would not do: the server lets it wait for ever when as many
messages are taken as may be [tried, 2.15.1].
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import nats.errors
import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.nuid import NUID

from infra.process import LimitedLog
from mesh.batch.connection import REQUEST_S, Connection, NotThere, Stored, unavailable
from mesh.batch.records import LinesGone, StoreUnavailable

ACK, IN_PROGRESS, NAK, TERM = b"+ACK", b"+WPI", b"-NAK", b"+TERM"
NANOSECONDS = 1_000_000_000
FOLLOW_BATCH = 512
FOLLOW_WAIT_S = 5.0
FOLLOW_RETRY_S = 0.5
FOLLOWER_KEPT_S = 60.0  # by the server, when nobody pulls
# Asked for at once by one pull that has a limit of bytes. What all pulls of a connection ask for
# must stay below `max_pending_mib`, or the server cuts it off as a slow reader, again and again.
PULL_BYTES = 1024 * 1024
LULL_S = 0.005  # messages that are there come together: after this no more do
# nats-server's words.
_DELETED, _BYTES, _COMPLETED = (
    *("Consumer Deleted", "Message Size Exceeds MaxBytes", "Batch Completed"),
)
_limited = LimitedLog(logging.getLogger(__name__))


class Puller:
    """Pulls from one consumer. Use `open`, `pull` by one caller at a time, and `close`."""

    def __init__(self, connection: Connection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._call = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._what = f"{stream}, consumer {consumer}"
        self._inbox = connection.client.new_inbox()
        self._subscription: Subscription | None = None
        self._requests = itertools.count(1)
        # The one request that the server may still fulfil: where to, how many, how long.
        self._reply, self._left, self._open_until = "", 0, 0.0
        self._fulfilled = 0  # messages of it that came
        self._came: asyncio.Queue[Msg | None] = asyncio.Queue()  # None: the connection was lost

    async def open(self) -> None:
        """Raises StoreUnavailable."""

        async def take(msg: Msg) -> None:
            self._came.put_nowait(msg)

        with unavailable(self._what):
            self._subscription = await self._connection.client.subscribe(
                f"{self._inbox}.*", cb=take
            )
        self._connection.on_lost.add(self._lost)

    async def close(self) -> None:
        """Give back what came and was not pulled; raises nothing."""
        self._connection.on_lost.discard(self._lost)
        subscription, self._subscription = self._subscription, None
        with contextlib.suppress(nats.errors.Error, StoreUnavailable):
            if subscription is not None:
                await subscription.unsubscribe()
            while not self._came.empty():
                msg = self._came.get_nowait()
                if msg is not None and not _status(msg):
                    await self._connection.send(msg.reply, NAK)

    async def pull(self, batch: int, wait_s: float, bytes_max: int = 0) -> list[Msg]:
        """At least one message and `batch` at most, or none after `wait_s`.

        `bytes_max`: of all together, but for the first. Raises LinesGone (no such consumer),
        StoreUnavailable.
        """
        loop = asyncio.get_running_loop()
        until, found = loop.time() + max(wait_s, LULL_S), list[Msg]()
        try:
            while not found or (len(found) < batch and _has_more(found[-1])):
                has_any, left_s = bool(found), until - loop.time()
                is_open = self._is_open(loop.time()) or not self._came.empty()
                if not has_any and not is_open and left_s > 0:
                    await self._request(batch, left_s, min(bytes_max, PULL_BYTES))
                came = await self._next(LULL_S if has_any else left_s)
                if came is None:
                    break
                if not _status(came):
                    self._left -= 1
                    self._fulfilled += 1
                    found.append(came)
                elif self._is_end(came) == _BYTES and not await self._more(
                    found, batch, bytes_max, until
                ):
                    break
        except asyncio.CancelledError:
            for msg in found:
                self._came.put_nowait(msg)
            raise
        except StoreUnavailable:
            if not found:
                raise
        return found

    async def _more(self, found: list[Msg], batch: int, bytes_max: int, until: float) -> bool:
        """Ask for more where the last request ended before a message that was too large for it.

        Whether more is to come.
        """
        if not found:
            found += await self._one_large(until)
            return False
        left_bytes = bytes_max - sum(len(msg.data) for msg in found)
        if not self._fulfilled or left_bytes < PULL_BYTES:
            return False
        wait_s = until - asyncio.get_running_loop().time()
        await self._request(batch - len(found), wait_s, PULL_BYTES)
        return True

    async def _one_large(self, until: float) -> list[Msg]:
        """The next message, which alone has more bytes than a request may ask for; none if another
        taker was faster."""
        loop = asyncio.get_running_loop()
        async with self._connection.large_pulls:
            await self._request(1, until - loop.time(), 0)
            came = await self._next(max(LULL_S, until - loop.time()))
        if came is None:
            return []
        if _status(came):
            self._is_end(came)
            return []
        self._left -= 1
        return [came]

    def _lost(self) -> None:
        if self._left > 0:
            self._came.put_nowait(None)
        self._left = 0

    def _is_open(self, now: float) -> bool:
        """Whether the server still has a request to fulfil."""
        return self._left > 0 and now < self._open_until

    async def _request(self, batch: int, wait_s: float, bytes_max: int) -> None:
        wait_s = max(wait_s, LULL_S)
        self._reply = f"{self._inbox}.{next(self._requests)}"
        self._left, self._fulfilled = batch, 0
        self._open_until = asyncio.get_running_loop().time() + wait_s + REQUEST_S
        request = {"batch": batch, "expires": int(wait_s * NANOSECONDS)}
        if bytes_max:
            request["max_bytes"] = bytes_max
        with unavailable(self._what):
            await self._connection.client.publish(self._call, orjson.dumps(request), self._reply)

    async def _next(self, wait_s: float) -> Msg | None:
        """What came, or None if nothing does. Raises StoreUnavailable if the connection is lost."""
        came: Msg | None
        try:
            came = self._came.get_nowait()
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(wait_s):
                    came = await self._came.get()
            except TimeoutError:
                return None
        if came is None:
            raise StoreUnavailable(f"{self._what}: the connection was lost")
        return came

    def _is_end(self, msg: Msg) -> str:
        """Read the status that ends a request; the reason. Raises LinesGone, StoreUnavailable."""
        if msg.subject != self._reply:
            return ""
        self._left = 0
        status, why = _status(msg), str((msg.headers or {}).get("Description", ""))
        if status == "503" or why == _DELETED:
            raise LinesGone(f"{self._what}: {why or 'there is none'}")
        if status not in ("404", "408") and why not in (_BYTES, _COMPLETED):
            raise StoreUnavailable(f"{self._what}: {status} {why}")
        return why


async def follow(
    connection: Connection, stream: str, subject: str, *, headers_only: bool = False
) -> AsyncIterator[Stored]:
    """All messages of a stream that match, from the first, and then each as it comes; none twice.

    Goes on by itself, after FOLLOW_RETRY_S, when the bus or the server was away; ends never. A
    stream that was deleted and made anew is followed from its first message.
    """
    seen, made_at = 0, ""
    while True:
        try:
            before, made_at = made_at, (await connection.ask(f"STREAM.INFO.{stream}"))["created"]
            if before != made_at:
                seen = 0
            async with _follower(connection, stream, subject, seen, headers_only) as puller:
                delivered = 0
                while True:
                    for msg in await puller.pull(FOLLOW_BATCH, FOLLOW_WAIT_S):
                        sequence = msg.metadata.sequence
                        delivered += 1
                        if sequence.consumer != delivered:
                            raise StoreUnavailable(f"{stream}: a message was lost on its way")
                        seen = sequence.stream
                        yield Stored(msg.subject, seen, msg.data, msg.headers or {})
        except (StoreUnavailable, LinesGone) as error:
            _limited.warning("follow", stream, "trying again: %s", error)
            await asyncio.sleep(FOLLOW_RETRY_S)


@contextlib.asynccontextmanager
async def _follower(
    connection: Connection, stream: str, subject: str, seen: int, headers_only: bool
) -> AsyncIterator[Puller]:
    """A consumer of its own, which the server forgets by itself if its process dies."""
    name = NUID().next().decode()
    config = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": seen + 1,
        "ack_policy": "none",
        "filter_subject": subject,
        "headers_only": headers_only,
        "mem_storage": True,
        "inactive_threshold": int(FOLLOWER_KEPT_S * NANOSECONDS),
    }
    await make_consumer(connection, stream, config)
    puller = Puller(connection, stream, name)
    await puller.open()
    try:
        yield puller
    finally:
        await puller.close()
        with contextlib.suppress(NotThere, StoreUnavailable):
            await connection.ask(f"CONSUMER.DELETE.{stream}.{name}")


async def make_consumer(connection: Connection, stream: str, config: Mapping[str, Any]) -> None:
    """Create the consumer, or leave one that is the same. Raises StoreUnavailable."""
    call = f"CONSUMER.CREATE.{stream}.{config['name']}.{config['filter_subject']}"
    await connection.ask(call, {"stream_name": stream, "config": config})


def nak(delay_s: float) -> bytes:
    """What puts a message back into its queue, for the next taker in `delay_s`."""
    return NAK + (b' {"delay": %d}' % int(delay_s * NANOSECONDS) if delay_s > 0 else b"")


def _has_more(msg: Msg) -> bool:
    """Whether more may follow at once; those that were put back are in no count of pending ones."""
    return bool(msg.metadata.num_pending) or msg.metadata.num_delivered > 1


def _status(msg: Msg) -> str:
    return (msg.headers or {}).get("Status", "")
