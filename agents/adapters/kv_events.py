"""An engine's KV events over ZeroMQ, as vLLM and SGLang publish them.

Batches come on a PUB socket as `topic, number, payload`, numbers with 8 bytes, big-endian. A second
socket (ROUTER) repeats what the engine has kept, from a number on, and ends with the number -1.
Source: vLLM's `ZmqEventPublisher`. Everything is bounded: ZeroMQ's queues, one message, a replay.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from agents.core.engine_cache import EngineCache
from agents.core.kv_events import PAYLOAD_BYTES_MAX
from infra.process import LimitedLog, run_all

log = logging.getLogger(__name__)

CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
NUMBER = struct.Struct(">q")
END = -1
QUEUE_MAX = 10_000  # batches that ZeroMQ keeps for us; beyond them there is a gap
REPLAY_S = 5.0  # between two messages of a replay
REPLAY_BATCHES_MAX = 100_000
REPLAY_BYTES_MAX = 256 * 1024 * 1024
RETRY_MS = 100


class KvEventSource:
    """The events of one engine. `run` feeds `cache` until cancelled."""

    def __init__(self, cache: EngineCache, events: str, replay: str | None, topic: str) -> None:
        """`events`, `replay`: ZeroMQ addresses; without the second nothing is repeated."""
        self.cache = cache
        self._events, self._replay, self._topic = events, replay, topic
        self._log = LimitedLog(log)
        self._lock = asyncio.Lock()  # a batch and its replay, or a connection and its replay

    async def run(self) -> None:
        """Receive for ever, through losses of the connection."""
        # The context closes itself after its sockets, for which it would wait.
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.RCVHWM, QUEUE_MAX)
            events.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
            events.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
            events.setsockopt(zmq.LINGER, 0)
            events.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
            with events.get_monitor_socket(CONNECTED | zmq.Event.DISCONNECTED) as monitor:
                events.connect(self._events)
                await run_all((self._watch(context, monitor), self._receive(context, events)))

    async def _watch(self, context: zmq.asyncio.Context, monitor: zmq.asyncio.Socket) -> None:
        while True:
            message = await recv_monitor_message(monitor)
            if message["event"] != CONNECTED:
                async with self._lock:
                    self.cache.disconnected()
                self._log.warning("kv", "lost", "KV events of %s: disconnected", self._events)
                continue
            async with self._lock:
                after = self.cache.connected()
                await self._repeat(context, after)
            log.info("KV events of %s: connected", self._events)

    async def _receive(self, context: zmq.asyncio.Context, events: zmq.asyncio.Socket) -> None:
        while True:
            frames = await events.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER.size:
                self._log.warning("kv", "form", "a message of %d frames is no event", len(frames))
                continue
            async with self._lock:
                after = self.cache.live(NUMBER.unpack(frames[1])[0], frames[2])
                if after is not None:
                    await self._repeat(context, after)

    async def _repeat(self, context: zmq.asyncio.Context, after: int) -> None:
        """Have the engine repeat its batches from that number on."""
        holes = self.cache.holes
        asked: int | None = after
        while asked is not None:
            was_answered = self._replay is not None and await self._ask(context, asked)
            asked = self.cache.replay_ended(was_answered=was_answered)
        if self.cache.holes > holes:
            text = "KV events from number %d on are lost: what the engine holds is an estimate"
            self._log.warning("kv", "hole", text, after)

    async def _ask(self, context: zmq.asyncio.Context, after: int) -> bool:
        """One replay, to its end or its first gap. False if the engine did not answer to the end.

        A socket for each: the engine drops what it still sends to one that is closed.
        """
        assert self._replay is not None
        with context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVHWM, QUEUE_MAX)
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
            asking.connect(self._replay)
            await asking.send_multipart([b"", NUMBER.pack(after)])
            with contextlib.suppress(ReplayCut):
                async for seq, payload in _replayed(asking):
                    if not self.cache.repeated(seq, payload):
                        break
                    await asyncio.sleep(0)  # there may be thousands, and answers under way
                return True
        return False


class ReplayCut(Exception):
    """A replay stopped half way, or was longer than is taken."""


async def _replayed(asking: zmq.asyncio.Socket) -> AsyncIterator[tuple[int, bytes]]:
    """The batches of one replay. Raises ReplayCut where its end does not come."""
    count = size = 0
    while count < REPLAY_BATCHES_MAX and size < REPLAY_BYTES_MAX:
        try:
            async with asyncio.timeout(REPLAY_S):
                frames = await asking.recv_multipart()
        except TimeoutError:
            break
        if len(frames) < 3 or len(frames[-2]) != NUMBER.size:  # newer vLLM adds the topic
            break
        [seq] = NUMBER.unpack(frames[-2])
        if seq == END:
            return
        count, size = count + 1, size + len(frames[-1])
        yield seq, frames[-1]
    raise ReplayCut
