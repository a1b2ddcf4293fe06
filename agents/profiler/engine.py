"""The engine under a profiling run: streamed requests, prompts of a wanted length, its load.

Every prompt is made of random words, new in each run, so no cache has computed any of it. How many
tokens the engine makes of them is learned from its own `usage` at the start.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from dataclasses import replace

import orjson

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_call import JSON_BODY, UnexpectedAnswer, call_engine
from agents.adapters.engine_kinds import KINDS, read_object
from agents.adapters.http_client import Connection, HttpBroken
from agents.config import EngineConfig
from agents.core.events import NOTHING_KNOWN, EngineReading, ScrapeFailed
from agents.core.made_up_text import made_up_text
from agents.profiler.stream import EngineUnusable, Stream, error_text
from infra.process import end_all
from schemas.http import CHAT, COMPLETIONS
from schemas.ids import ModelId

STREAMS_MAX = 1024  # at once
IDLE_TIMEOUT_S = 20.0
SCRAPE_S = 0.05
SCRAPES_FAILED_MAX = 20  # one after another; a busy engine may answer late
SETTINGS_TIMEOUT_S = 5.0
CONTEXT_UNKNOWN = 4096  # tokens, where the engine doesn't say
PROBE_WORDS = (64, 320)
PROBE_TOKENS = 16
TOKENS_PER_EVENT_MAX = 1.5
EXTRAS: Mapping[str, object] = {"ignore_eos": True}  # vLLM, SGLang and llama.cpp know it
NO_EXTRAS: Mapping[str, object] = {}
NO_SUCH_PATH = (404, 405, 501)
OK, BAD_REQUEST = 200, 400
EVENT_STREAM = "text/event-stream"


class ProfiledEngine:
    """One engine. `connect` first, `close` at the end."""

    def __init__(self, config: EngineConfig, dice: random.Random) -> None:
        self._config = config
        self._dice = dice
        key = config.engine_key
        self._client = EngineClient(
            api_url=config.engine_url,
            metrics_url=config.metrics_page,
            kind=KINDS[config.engine_kind],
            clock=time.monotonic,
            options=EngineOptions(
                key=None if key is None else key.get_secret_value(),
                models=config.models,
                reads_batch_max=config.batch_max is None,
            ),
        )
        self.kind = config.engine_kind
        self.model = ModelId("")
        self.context_tokens = CONTEXT_UNKNOWN
        self.reading: EngineReading = NOTHING_KNOWN
        self._path = COMPLETIONS
        self._extras = EXTRAS
        self._tokens_per_word, self._tokens_besides = 1.0, 0.0
        self._failed_scrapes = 0
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self._client.api.url

    @property
    def batch_max(self) -> int | None:
        """Requests that it runs at once, as far as that is known; for an engine without a page, as
        many as an agent gives it."""
        kind = KINDS[self.kind]
        known = self.reading.batch_max
        return known if known or kind.has_metrics else kind.outstanding_max

    async def connect(self) -> None:
        """See that it is there and streams, and how it counts tokens. Raises EngineUnusable."""
        await self._find_model()
        await self._find_context()
        await self._find_path()
        await self._count_tokens()

    async def close(self) -> None:
        """End every request that is under way."""
        await end_all(self._open)
        self._client.close()

    async def scrape(self) -> EngineReading:
        """Its metrics page now, or the last one if it is late. Raises EngineUnusable."""
        scraped = await self._client.scrape()
        if isinstance(scraped, ScrapeFailed):
            self._failed_scrapes += 1
            if self._failed_scrapes >= SCRAPES_FAILED_MAX or not scraped.timed_out:
                raise EngineUnusable(f"{self.url}: {scraped.detail}")
            return self.reading
        self._failed_scrapes = 0
        self.reading = self._with_batch_max(scraped.reading)
        return self.reading

    def _with_batch_max(self, reading: EngineReading) -> EngineReading:
        """The operator's, where the engine's page shows none, as an agent has it."""
        if reading.batch_max is not None:
            return reading
        return replace(reading, batch_max=self._config.batch_max)

    async def idle(self) -> None:
        """Return when it runs nothing. Raises EngineUnusable if others keep it busy."""
        await end_all(self._open)
        until = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            reading = await self.scrape()
            if not reading.running and not reading.waiting:
                return
            if time.monotonic() > until:
                raise EngineUnusable(
                    f"{self.url} runs {reading.running} requests, and {reading.waiting} wait, that "
                    "are not of this run: profile an engine that nobody else uses"
                )
            await asyncio.sleep(SCRAPE_S)

    def start(
        self, stream: Stream, priority: int | None = None, prompt: str = ""
    ) -> asyncio.Task[None]:
        """Run one request in a task of its own: cancelling it ends it at the engine. `priority`:
        a field of vLLM's and SGLang's requests. `prompt`: instead of a new one.

        The task raises nothing: what goes wrong is the stream's `problem`. Raises EngineUnusable
        if too many are under way.
        """
        if len(self._open) >= STREAMS_MAX:
            raise EngineUnusable(
                f"{STREAMS_MAX} requests are under way: the online load is more than "
                "the engine serves"
            )
        prompt = prompt or self.prompt(stream.prompt_tokens)
        fields = self._fields(prompt, stream.output_tokens)
        if priority is not None:
            fields["priority"] = priority
        body = orjson.dumps(fields)
        stream.sent_at = time.monotonic()
        task = asyncio.create_task(self._run(stream, body))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def _run(self, stream: Stream, body: bytes) -> None:
        try:
            response = await self._client.api.request("POST", self._path, JSON_BODY, body)
            try:
                await self._read(stream, response)
            finally:
                self._client.api.release(response)
        except (OSError, HttpBroken) as problem:
            stream.problem = str(problem) or type(problem).__name__
        finally:
            stream.end(time.monotonic())

    async def _read(self, stream: Stream, response: Connection) -> None:
        head = await response.head()
        stream.status = head.status
        if head.status != OK or not head.content_type.startswith(EVENT_STREAM):
            no_stream = "" if head.status != OK else " and no event stream"
            answer = error_text(await response.read())
            stream.problem = f"HTTP {head.status}{no_stream} on {self._path}: {answer}"
            return
        await response.stream_to(stream.feed)
        if not stream.token_at and not stream.problem:
            stream.problem = f"a stream of {self._path} without a token"
        stream.is_whole = not stream.problem

    def _fields(self, prompt: str, output_tokens: int) -> dict[str, object]:
        asked: dict[str, object] = {"prompt": prompt}
        if self._path == CHAT:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": self.model,
            **asked,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }

    def prompt(self, tokens: int) -> str:
        """A text of about so many tokens; another one may follow it."""
        count = max(1, round((tokens - self._tokens_besides) / self._tokens_per_word))
        return made_up_text(self._dice, count)

    async def _find_model(self) -> None:
        scraped = await self._client.scrape()
        if isinstance(scraped, ScrapeFailed):
            raise EngineUnusable(f"{self.url}: {scraped.detail}")
        if not scraped.models:
            raise EngineUnusable(f"{self.url} lists no model: name it with --model")
        self.reading = self._with_batch_max(scraped.reading)
        self.model = scraped.models[0]
        card = scraped.cards.get(self.model)
        if card is not None and card.max_model_len:
            self.context_tokens = card.max_model_len

    async def _find_context(self) -> None:
        """llama.cpp gives each slot a part of its context, and shows that in its settings."""
        if self.kind != "llamacpp":
            return
        with contextlib.suppress(OSError, HttpBroken, UnexpectedAnswer):
            _, page = await call_engine(self._client.api, "GET", "/props", SETTINGS_TIMEOUT_S)
            slot = read_object(page).get("default_generation_settings")
            context = slot.get("n_ctx") if isinstance(slot, dict) else None
            if isinstance(context, int) and context > 0:
                self.context_tokens = context

    async def _find_path(self) -> None:
        """Completions, or chat where it has none; without the fields that it refuses."""
        for path in (COMPLETIONS, CHAT):
            for extras in (EXTRAS, NO_EXTRAS):
                self._path, self._extras = path, extras
                probe = await self._probe(PROBE_WORDS[0])
                if not probe.problem:
                    return
                if probe.status != BAD_REQUEST:
                    break
            if probe.status not in (*NO_SUCH_PATH, BAD_REQUEST):
                break
        raise EngineUnusable(f"{self.url} answers no streamed request: {probe.problem}")

    async def _count_tokens(self) -> None:
        probes = [await self._probe(words) for words in PROBE_WORDS]
        for probe in probes:
            if probe.problem:
                raise EngineUnusable(f"{self.url}: {probe.problem}")
        few, many = (probe.usage.prompt_tokens for probe in probes)
        if 0 < few < many:
            self._tokens_per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
            self._tokens_besides = few - self._tokens_per_word * PROBE_WORDS[0]
        last = probes[-1]
        per_event = last.usage.completion_tokens / len(last.token_at)
        if per_event > TOKENS_PER_EVENT_MAX:
            raise EngineUnusable(
                f"{self.url} sends {per_event:.1f} tokens in one event, which hides its "
                "iterations: set its stream interval to 1 for the profiling run"
            )

    async def _probe(self, words: int) -> Stream:
        stream = Stream(words, PROBE_TOKENS)
        task = self.start(stream)
        try:
            await stream.reached()
        finally:
            await end_all([task])
        return stream
