"""A simulated engine's KV events, as vLLM publishes them (`agents.core.kv_events` has the form)."""

import asyncio
import contextlib
import struct
import time
from collections import deque
from collections.abc import Sequence

import msgpack
import zmq
import zmq.asyncio

from agents.sim.text import TOKEN_BYTES

NUMBER = struct.Struct(">q")
END = -1
KEPT_BATCHES = 10_000  # for replays, as vLLM keeps them
BLOCKS_MAX = 2_000_000  # of requests, whose tokens are known
NO_LORA = None
MEDIUM = "GPU"


class KvEventPublisher:
    """Publishes what one engine's cache stores and evicts. Close it at the end."""

    def __init__(self, events: str, replay: str | None, block_tokens: int) -> None:
        """`events`, `replay`: ZeroMQ addresses to listen on. Raises zmq.ZMQError."""
        self._block_tokens = block_tokens
        # Parent, tokens and adapter of a block.
        self._tokens: dict[int, tuple[int | None, bytes, str]] = {}
        self._batch: list[list[object]] = []
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = 0
        self._context = zmq.Context()
        self._asking = zmq.asyncio.Context.shadow(self._context)
        self._events = self._context.socket(zmq.PUB)
        self._events.bind(events)
        self._replay = None
        if replay is not None:
            self._replay = self._asking.socket(zmq.ROUTER)
            self._replay.bind(replay)

    def close(self) -> None:
        """The sockets first: a context waits for them."""
        self._events.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def learn(self, keys: Sequence[int], sequence: bytes, adapter: str = "") -> None:
        """The blocks of a request that the engine is given, and the tokens in them."""
        parent, size = None, self._block_tokens * TOKEN_BYTES
        for number, key in enumerate(keys):
            if key not in self._tokens:
                tokens = sequence[number * size : (number + 1) * size]
                self._tokens[key] = parent, tokens, adapter
            parent = key
        while len(self._tokens) > BLOCKS_MAX:
            del self._tokens[next(iter(self._tokens))]

    # What the cache reports: agents.sim.kv_cache.CacheWatcher.

    def stored(self, keys: Sequence[int]) -> None:
        for key in keys:
            parent, tokens, adapter = self._tokens.get(key, (None, b"", ""))
            ids = [int.from_bytes(tokens[at : at + TOKEN_BYTES], "little") for at in
                   range(0, len(tokens), TOKEN_BYTES)]  # fmt: skip
            name = [adapter] if adapter else []
            stored = [[key], parent, ids, self._block_tokens, NO_LORA, MEDIUM, *name]
            self._batch.append(["BlockStored", *stored])

    def evicted(self, key: int) -> None:
        self._batch.append(["BlockRemoved", [key], MEDIUM])

    def flush(self) -> None:
        """Publish what has happened since the last batch."""
        if not self._batch:
            return
        payload = msgpack.packb([time.time(), self._batch, 0])
        self._batch = []
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        with contextlib.suppress(zmq.Again):
            self._events.send_multipart([b"", NUMBER.pack(number), payload], zmq.NOBLOCK)

    async def answer_replays(self) -> None:
        """Repeat batches to those who ask. Runs until cancelled."""
        if self._replay is None:
            await asyncio.Event().wait()
            return
        while True:
            asker, *frames = await self._replay.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != NUMBER.size:
                continue
            [start] = NUMBER.unpack(frames[1])
            for number, payload in list(self._kept):
                if number >= start:
                    answer = [asker, b"", b"", NUMBER.pack(number), payload]
                    await self._replay.send_multipart(answer)
            await self._replay.send_multipart([asker, b"", b"", NUMBER.pack(END), b""])
