"""The engine's load: the one rule of `pending` and the one of `full`, and the speeds learned from
its responses.

Pending requests, not outstanding ones, show whether an engine has room: batch capacity varies with
request length by an order of magnitude, but a waiting request always means that the batch or the
KV cache is full now (SkyWalker, section 3.3).

    pending = what the engine reported as waiting and can still be waiting
            + what was sent to it since, has no first byte, and exceeds the room that it showed

A scrape is up to 100 ms old (a second of an engine at rest), and an engine counts even a request
that it is about to start as waiting, so one such count would make an idle replica refuse work until
the next scrape. Therefore requests without a first byte at the scrape that have one now (or have
ended) no longer wait. Only requests of this agent are corrected; those of the engine's other
clients stay counted.

Room is `batch_max - running - waiting`, or the answers of usual size that fit the free KV cache;
the smaller of the two. Where an engine shows neither, new requests are taken to fit until the next
scrape. An engine that shows no queue has no pending; only `outstanding_max` bounds it.

An engine of a kind without a page is given what its streams show that it computes at once
(`engine_width.py`), unless its operator has said that.

An engine whose page of metrics is broken is one that shows nothing, until the page is back. It is
given at most what it was seen to run at once, or its batch, and no less than an engine of unknown
size is.
"""

from collections import deque
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from agents.core.engine_limit import EngineLimit
from agents.core.engine_results import RecentResults
from agents.core.engine_width import EngineWidth
from agents.core.events import (
    NOTHING_KNOWN,
    PAGES_GOOD,
    EngineReading,
    EngineScraped,
    TokenUsage,
)
from agents.core.loaded_models import LoadedModels
from agents.core.prefill_speed import PrefillEstimator
from agents.core.requests import RequestTable, ScrapeCounters
from schemas.engine_routes import PLAIN_PATHS
from schemas.http import RESPONSES
from schemas.ids import ModelId
from schemas.response_calls import METHODS
from schemas.state import FirstWaiting, KnownRoutes, ModelCard

# Requests in an engine that shows nothing: what a small server batches without its latency
# collapsing.
BLIND_OUTSTANDING_MAX = 8

RATES_MAX = 32
RATE_TOKENS_MIN = 8  # the tokens of a shorter answer may arrive in one burst
ANSWERS_FORGETTING = 0.99  # a memory of about a hundred answers


class LoadCounts(NamedTuple):
    """The replica's load at one moment; None where the engine does not show it."""

    pending: int | None
    running: int | None
    full: bool  # new work would be refused


def pending(
    reading: EngineReading, counters: ScrapeCounters, tokens_per_answer: float | None
) -> int | None:
    """Requests that wait, by the rule above; None for an engine that shows no queue."""
    if reading.waiting is None:
        return None
    waiting = still_waiting(reading.waiting, counters.sent_before, counters.settled)
    if not counters.sent_since:
        return waiting
    space = room(reading, tokens_per_answer)
    return waiting if space is None else waiting + max(0, counters.sent_since - space)


def still_waiting(reported: int, sent_before: int, settled: int) -> int:
    """How many of the requests that the engine reported as waiting can be waiting now."""
    could_wait = max(reported, sent_before + settled)
    return min(reported, could_wait - settled)


def room(reading: EngineReading, tokens_per_answer: float | None) -> int | None:
    """How many more requests would start at once, or None when the engine does not show it."""
    batch = kv = None
    if reading.batch_max is not None and reading.running is not None:
        batch = max(0, reading.batch_max - reading.running - (reading.waiting or 0))
    if reading.kv_capacity_tokens is not None and reading.kv_used_ratio is not None:
        free = reading.kv_capacity_tokens * (1.0 - reading.kv_used_ratio)
        kv = max(0, int(free / tokens_per_answer)) if tokens_per_answer else None
    return kv if batch is None else batch if kv is None else min(batch, kv)


def occupancy(running: int | None, batch_max: int | None) -> float | None:
    """Share of the batch in use; engines may briefly run more than they promise."""
    if running is None or not batch_max:
        return None
    return min(1.0, running / batch_max)


def may_be_packed(reading: EngineReading, kv_free_share: float) -> bool:
    """Whether the batch is full, or less of the memory is free; True if neither is shown."""
    used, running, most = reading.kv_used_ratio, reading.running, reading.batch_max
    if running is None or most is None:
        return used is None or used >= 1.0 - kv_free_share
    return running >= most or (used is not None and used >= 1.0 - kv_free_share)


class AnswerStatistics:
    """Decode rate, prefix hits and size of recent answers.

    A median for the rate, because of truncated answers; decayed sums for the ratios, so that a
    changed working set shows soon.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=RATES_MAX)
        self.decode_tokens_per_s: float | None = None  # of one running request
        self._prompt = self._cached = 0.0
        self._tokens = self._counted = 0.0

    def add(self, usage: TokenUsage, decode_s: float | None) -> None:
        """`decode_s`: first to last token of a streamed answer, None when not observable."""
        prompt, cached, answered = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        if prompt >= 0 and cached >= 0:
            self._prompt = ANSWERS_FORGETTING * self._prompt + prompt
            self._cached = ANSWERS_FORGETTING * self._cached + min(cached, prompt)
        if prompt >= 0 and answered >= 0:
            self._tokens = ANSWERS_FORGETTING * self._tokens + (prompt + answered)
            self._counted = ANSWERS_FORGETTING * self._counted + 1.0
        if decode_s is not None and decode_s > 0.0 and answered >= RATE_TOKENS_MIN:
            self._rates.append((answered - 1) / decode_s)
            self.decode_tokens_per_s = median(self._rates)

    @property
    def prefix_hit_ratio(self) -> float | None:
        return self._cached / self._prompt if self._prompt > 0.0 else None

    @property
    def tokens_per_answer(self) -> float | None:
        """Prompt and completion tokens of a typical answer: what it may hold of the KV cache."""
        return self._tokens / self._counted if self._counted > 0.0 else None


class EngineLoad:
    """Fed with scrapes of the engine and with finished responses."""

    def __init__(self, *, outstanding_max: int, batch_max: int | None, counts_own: bool) -> None:
        """`batch_max`: the operator's, for engines whose metrics don't show it.

        `counts_own`: the engine shows no counts; it runs what this agent sent to it.
        """
        self._outstanding_most = self._usual = outstanding_max
        self.width = EngineWidth() if counts_own and batch_max is None else None
        self.limit = EngineLimit(outstanding_max)
        self.results = RecentResults()
        self.pages = PAGES_GOOD
        self._running_most = 0  # that its page has shown
        self._batch_max = batch_max
        self._shows_nothing = self.counts_own = counts_own  # of its kind; now
        self.prefill = PrefillEstimator()
        self.answers = AnswerStatistics()
        self.reading: EngineReading = NOTHING_KNOWN
        self.held: frozenset[str] = frozenset()  # inboxes of responses that wait for their clients
        self.read_at: float | None = None  # when the last scrape began
        self.models: tuple[ModelId, ...] = ()
        self.cards: dict[ModelId, ModelCard] = {}
        self.adapters: frozenset[ModelId] = frozenset()  # of the models
        self.paths: tuple[str, ...] = ()  # optional ones that it answers
        self.routes: KnownRoutes | None = None  # what else is known of optional paths
        self.system_first = False  # it moves system turns of `/v1/messages`
        self.loaded = LoadedModels()

    @property
    def prefix_hit_ratio(self) -> float | None:
        """Of this agent's requests, else the engine's own since its start."""
        ours = self.answers.prefix_hit_ratio
        return self.reading.prefix_hit_ratio if ours is None else ours

    @property
    def base_models(self) -> tuple[ModelId, ...]:
        """Those that are no adapters, which come and go."""
        return tuple(name for name in self.models if name not in self.adapters)

    def scraped(self, event: EngineScraped) -> None:
        reading = event.reading
        if reading.batch_max is None and self._batch_max is not None:
            reading = replace(reading, batch_max=self._batch_max)
        if reading.running is not None and reading.running > self._running_most:
            self._running_most = reading.running
        if event.pages is not self.pages or event.pages.is_blind:
            reading = self._without_page(event, reading)
        self.reading, self.system_first = reading, event.system_first
        self.read_at, self.held = event.began_at, event.held
        if event.models is not None:
            self.models, self.cards, self.paths = event.models, dict(event.cards), event.paths
            self.adapters, self.routes = event.adapters, event.routes
            names, unknown = self.base_models, event.states_unknown
            self.loaded.listed(names, self.cards, event.states, event.began_at, unknown=unknown)

    def _without_page(self, event: EngineScraped, reading: EngineReading) -> EngineReading:
        """Its pages have changed, or that of metrics is broken."""
        self.pages = event.pages
        outstanding_max = self._outstanding_most
        self.counts_own = self._shows_nothing or event.pages.is_blind
        if event.pages.is_blind:
            if reading.batch_max is None:
                reading = replace(reading, batch_max=self.reading.batch_max)
            known = max(BLIND_OUTSTANDING_MAX, self._running_most, reading.batch_max or 0)
            outstanding_max = min(outstanding_max, known)
        self._usual = outstanding_max
        self.bound(event.began_at)
        return reading

    def bound(self, now: float) -> None:
        """What its width shows, or the time that has passed, may bound what it is given."""
        most = None if self.width is None else self.width.most(now)
        self.limit.set_usual(self._usual if most is None else min(self._usual, most), now)

    @property
    def batch_max(self) -> int | None:
        """Most requests that it runs at once."""
        known = self.reading.batch_max
        return self.width.known if known is None and self.width is not None else known

    def serves(self, model: ModelId, path: str) -> bool:
        """Whether it has the model and answers on that path; a call about a response names none."""
        if path in METHODS:
            return self.answers_on(RESPONSES)
        if model not in self.models or not self.answers_on(path):
            return False
        return self.routes is None or path not in self.routes.lacking.get(model, ())

    def answers_on(self, path: str) -> bool:
        """Whether it answers on that path, or may."""
        if path in PLAIN_PATHS or path in self.paths:
            return True
        return self.routes is not None and path in self.routes.unknown

    def counts(self, counters: ScrapeCounters, outstanding: int, at_engine: int) -> LoadCounts:
        """The load now. `at_engine`: of the outstanding requests, those sent to the engine."""
        waiting = self.pending(counters)
        running = at_engine if self.counts_own else self.reading.running
        full = outstanding >= self.limit.most or (waiting or 0) > 0
        return LoadCounts(waiting, running, full)

    def pending(self, counters: ScrapeCounters) -> int | None:
        """Requests that wait there; None if it shows no queue."""
        return pending(self.reading, counters, self.answers.tokens_per_answer)

    def first_waiting(self, requests: RequestTable, now: float) -> FirstWaiting | None:
        """The first of those that may wait for a slot in a batch whose size the engine does not
        tell. Memory is another reason to wait."""
        waiting, running = self.reading.waiting, self.reading.running
        if not waiting or running is None or self.batch_max is not None:
            return None
        if room(self.reading, self.answers.tokens_per_answer) == 0:
            return None
        return requests.first_waiting(running, waiting, now)

    def learn(
        self,
        usage: TokenUsage,
        sent_at: float,
        began_at: float | None,
        ended_at: float,
        *,
        alone: bool,
        odd: bool,
    ) -> None:
        """Learn from a finished response.

        `began_at`: its first token; None if it was not streamed. `alone`: no other request was
        before its first token when it was sent. `odd`: embeddings: no example of what
        clients' answers take of the engine.
        """
        if not odd:
            self.answers.add(usage, None if began_at is None else ended_at - began_at)
        if began_at is None or not alone or usage.prompt_tokens < 0 or usage.cached_tokens < 0:
            return
        self.prefill.add(max(0, usage.prompt_tokens - usage.cached_tokens), began_at - sent_at)
