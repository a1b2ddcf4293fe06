"""Relates the prompts that routers place here to what the engine holds, and publishes it.

Routers send the block hashes of each prompt. When its answer ends, the engine is asked for the
prompt's tokens, one prompt at a time, which name the blocks that its events are about. While it
runs, its blocks can't be evicted, so routers' own estimate holds. Its events may come later than
its answer (vLLM's core sends them in a thread that may have to wait): until they do, or for
LATE_S, nothing is reported, as what has not come yet would count as evicted. While not all that the
engine holds is known, routers ignore what is reported, so no prompt waits.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agents.adapters.http_client import HttpClient
from agents.adapters.kv_events import KvEventSource
from agents.adapters.prompt_tokens import may_have_tokens, prompt_tokens, tokenize_request
from agents.core.held_blocks import EnginePrompt
from agents.core.held_log import HeldLog
from infra.process import run_all
from schemas.held import HASHES_MAX, HeldAsk, HeldDelta, HeldPart, PromptBlocks

log = logging.getLogger(__name__)

BLOCKS_MAX = 2.0**32  # of a prompt, in text blocks
PUBLISH_S = 0.02  # what is evicted must not be counted on; HeldLog bounds the bytes
LATE_S = 1.0  # from the end of an answer
LOOK_S = 0.1  # whether late events have come
WAITING_MAX = 256  # prompts that wait for their request, for tokens or for late events, each
LATE_TOKENS_MAX = 1024 * 1024  # of 4 bytes; above a limit, the oldest late prompts wait no longer
OPEN_MAX = 4096
BODIES_BYTES_MAX = 64 * 1024 * 1024  # of open requests, kept until their answers end


@dataclass(slots=True)
class OpenPrompt:
    """A request that the engine has, and what its router has sent of it."""

    path: str
    body: bytes
    blocks: PromptBlocks | None = None


@dataclass(slots=True)
class LatePrompt:
    """One whose tokens are known, and whose blocks no event has shown yet."""

    blocks: PromptBlocks
    prompt: EnginePrompt
    until_s: float


class HeldPrompts:
    """One agent's. `run` publishes until cancelled."""

    def __init__(
        self,
        source: KvEventSource,
        log: HeldLog,
        api: HttpClient,
        publish: Callable[[HeldDelta | HeldPart], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._source, self._held = source, source.cache.held
        self._log, self._api, self._publish, self._clock = log, api, publish, clock
        self._open: OrderedDict[str, OpenPrompt] = OrderedDict()
        self._early: OrderedDict[str, PromptBlocks] = OrderedDict()  # before their request
        self._open_bytes = 0
        self._ended: asyncio.Queue[OpenPrompt] = asyncio.Queue(WAITING_MAX)
        self._late: deque[LatePrompt] = deque()
        self._late_tokens = 0
        self._looked_at = float("-inf")
        self.left_alone = 0  # prompts that were not related

    @property
    def seq(self) -> int | None:
        """Of the last delta; None while not all that the engine holds is known, and routers
        estimate it."""
        return self._log.seq if self._source.cache.is_known else None

    @property
    def waiting(self) -> int:
        """Prompts whose events have not come yet."""
        return len(self._late)

    def received(self, message: PromptBlocks | HeldAsk) -> None:
        """Of a router."""
        if isinstance(message, HeldAsk):
            self._log.asked(message.epoch)
        elif len(message.hashes) > HASHES_MAX or not 0.0 < message.length <= BLOCKS_MAX:  # or NaN
            self.left_alone += 1
        elif (prompt := self._open.get(message.inbox)) is not None:
            prompt.blocks = message
        else:
            self._early[message.inbox] = message
            if len(self._early) > WAITING_MAX:
                self._early.popitem(last=False)

    def started(self, inbox: str, path: str, body: bytes) -> None:
        """The engine is given this request."""
        if not may_have_tokens(path, body):
            self._early.pop(inbox, None)
            return
        if self._open_bytes + len(body) > BODIES_BYTES_MAX or len(self._open) >= OPEN_MAX:
            self.left_alone += 1
            return
        self._open[inbox] = OpenPrompt(path, body, self._early.pop(inbox, None))
        self._open_bytes += len(body)

    def ended(self, inbox: str) -> None:
        """Its answer is over."""
        prompt = self._open.pop(inbox, None)
        if prompt is None:
            return
        self._open_bytes -= len(prompt.body)
        if prompt.blocks is None or self._ended.full():
            self.left_alone += 1
        else:
            self._ended.put_nowait(prompt)

    async def run(self) -> None:
        """Follow the engine, relate prompts and publish, for ever."""
        await run_all((self._source.run(), self._relate(), self._keep_publishing()))

    async def _relate(self) -> None:
        while True:
            prompt = await self._ended.get()
            try:
                is_related = await self._relate_one(prompt)
            except Exception:  # a fault of ours with one prompt must not end the agent
                is_related = False
                log.exception("a prompt could not be related to KV events")
            self.left_alone += not is_related

    async def _relate_one(self, prompt: OpenPrompt) -> bool:
        asked, blocks = tokenize_request(prompt.path, prompt.body), prompt.blocks
        tokens = await self._tokens(asked)
        if asked is None or tokens is None or blocks is None:
            return False
        model = asked.get("model") if isinstance(asked, dict) else None
        engine_prompt = EnginePrompt(tokens, model if isinstance(model, str) else "")
        if self._is_awaited(engine_prompt):
            self._wait(LatePrompt(blocks, engine_prompt, self._clock() + LATE_S))
        else:
            self._held.attach(blocks.hashes, blocks.length, engine_prompt)
        return True

    def _is_awaited(self, prompt: EnginePrompt) -> bool:
        return self._held.is_whole and not self._held.has_stored(prompt)

    def _wait(self, late: LatePrompt) -> None:
        self._late.append(late)
        self._late_tokens += len(late.prompt.tokens)
        while len(self._late) > WAITING_MAX or self._late_tokens > LATE_TOKENS_MAX:
            self._settle(self._late.popleft())

    def _settle(self, late: LatePrompt) -> None:
        self._late_tokens -= len(late.prompt.tokens)
        self._held.attach(late.blocks.hashes, late.blocks.length, late.prompt)

    def _attach_late(self, now: float) -> None:
        """Those whose events have come, and those that have waited for long enough."""
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        for _ in range(len(self._late)):
            late = self._late.popleft()
            if now < late.until_s and self._is_awaited(late.prompt):
                self._late.append(late)
            else:
                self._settle(late)

    async def _tokens(self, asked: dict[str, Any] | list[int] | None) -> list[int] | None:
        return await prompt_tokens(self._api, asked) if isinstance(asked, dict) else asked

    async def _keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            self._attach_late(self._clock())
            for message in self._log.due(self._clock()):
                await self._publish(message)
