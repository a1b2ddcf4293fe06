"""An engine's KV cache in memory, and its events, at the face that `KvEventSource` has.

A block's hash is of its tokens and of all before it. Batches are numbered from 0 on in each run of
the engine, which keeps them to repeat them; some get lost on their way.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from zlib import crc32

import msgpack

from agents.core.engine_cache import EngineCache
from tests.seeds.loop import Process, this_process

BLOCK_TOKENS, TOKEN_CHARS = 16, 4
BLOCKS_MAX = 256  # that the cache holds
LOST = 0.05  # of batches
AGAIN_S = 0.1


def tokens_of(messages: list[dict[str, object]]) -> list[int]:
    text = "".join(str(message["content"]) for message in messages)
    pieces = range(0, len(text), TOKEN_CHARS)
    return [crc32(text[at : at + TOKEN_CHARS].encode()) for at in pieces]


class KvCache:
    """One run of an engine."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.batches: list[bytes] = []
        # The numbers of new ones, by the agents that listen; -1: it has ended.
        self.heard_by: list[tuple[Process | None, asyncio.Queue[int]]] = []

    def computed(self, tokens: list[int]) -> None:
        parent, events = 0, []  # None's hash differs between processes
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tokens[at : at + BLOCK_TOKENS]
            name = hash((parent, *block))
            if name not in self._blocks:
                stored = [[name], parent or None, block, BLOCK_TOKENS, None, "GPU"]
                events.append(["BlockStored", *stored])
            self._blocks[name] = None
            self._blocks.move_to_end(name)
            parent = name
        while len(self._blocks) > BLOCKS_MAX:
            events.append(["BlockRemoved", [self._blocks.popitem(last=False)[0]], "GPU"])
        if not events:
            return
        self.batches.append(msgpack.packb([0.0, events, 0]))
        if self._dice.random() >= LOST:
            self._tell(len(self.batches) - 1)

    def end(self) -> None:
        self._tell(-1)

    def _tell(self, number: int) -> None:
        self.heard_by = [one for one in self.heard_by if one[0] is None or one[0].is_alive]
        for _, heard in self.heard_by:
            heard.put_nowait(number)


class Source:
    """In place of `KvEventSource`. `find`: the cache of the engine at an address, while it runs."""

    find: Callable[[str], KvCache | None] = lambda _: None

    def __init__(self, cache: EngineCache, events: str, replay: str | None, topic: str) -> None:
        self.cache, self._events = cache, events

    async def run(self) -> None:
        while True:
            if (engine := type(self).find(self._events)) is not None:
                await self._follow(engine)
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, engine: KvCache) -> None:
        heard: asyncio.Queue[int] = asyncio.Queue()
        engine.heard_by.append((this_process(), heard))
        self._repeat(engine, self.cache.connected())
        while (number := await heard.get()) >= 0:
            self._repeat(engine, self.cache.live(number, engine.batches[number]))
        self.cache.disconnected()

    def _repeat(self, engine: KvCache, after: int | None) -> None:
        while after is not None:
            for number in range(after, len(engine.batches)):
                if not self.cache.repeated(number, engine.batches[number]):
                    break
            after = self.cache.replay_ended(was_answered=True)
