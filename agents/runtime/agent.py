"""Feeds AgentCore with events and performs its effects."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from agents.adapters import adapter_loads
from agents.adapters.bus import AgentBus
from agents.adapters.engine import EngineClient
from agents.adapters.engine_request import ReplicaSite
from agents.adapters.measured_prompt import measured
from agents.adapters.outbox import FrameWriter
from agents.adapters.relay import Relay
from agents.config import AgentConfig
from agents.core import effects
from agents.core.agent import AgentCore
from agents.core.engine_health import PROBE_TIMEOUT_S
from agents.core.engine_results import ResultsLog
from agents.core.events import (
    PAGES_GOOD,
    AgentEvent,
    DrainFinished,
    DrainRequested,
    EngineScraped,
    PagesSeen,
    ProbeEnded,
    PromptMeasured,
    RelayEnded,
    ScrapeFailed,
    StopRequested,
    TimerFired,
)
from agents.core.known_speed import KnownSpeed, of_last_run
from agents.core.offline_work import OfflineTotals
from agents.core.prefill_speed import PrefillLine
from agents.core.scrape_pace import ScrapePace
from agents.runtime.held_prompts import HeldPrompts
from infra.process import LimitedLog, end_all
from infra.services import EndpointFigures
from schemas import subjects
from schemas.exchange import Credit, End, Frame, Outcome, Placed
from schemas.ids import ModelId
from schemas.state import Heartbeat, ReplicaState
from schemas.wire import encode

log = logging.getLogger(__name__)

SILENCE_CHECK_S = 1.0
SCRAPE_GAP_MIN_S = 0.01  # between scrapes that something requested
WHY_EVERY_S = 5.0  # between two reasons of one state: an engine may alternate
ABORT_TIMEOUT_S = 2.0  # for END frames of aborted responses to go out
WITHOUT_METRICS = "until it is back the agent counts its own requests, as for kind openai"
WITHOUT_MODELS = "until it is back the models are those last listed"
DRAINED = "an operator drained it; `mesh undrain` lets it take work again"
FAULT_OF_OURS = "the agent failed on this response; its log has the reason"


class Agent:
    """The host of the core. Run `scrape_engine`, `keep_time` and `keep_alive` in tasks, and feed it
    events."""

    def __init__(
        self,
        config: AgentConfig,
        core: AgentCore,
        bus: AgentBus,
        engine: EngineClient,
        clock: Callable[[], float],
        tasks: asyncio.TaskGroup,
        held: HeldPrompts | None = None,
    ) -> None:
        """`held`: where the engine's KV events are followed."""
        self._held = held
        self._config = config
        self._core = core
        self._bus = bus
        self._engine = engine
        self._clock = clock
        self._tasks = tasks
        self._where = encode(Placed(config.region, config.replica))
        region, replica = config.region, config.replica
        self._site = ReplicaSite(region, replica, config.engine_kind, config.kv_transfer)
        self._writers: dict[str, FrameWriter] = {}  # of responses that have not ended
        self._relays: dict[str, tuple[Relay, asyncio.Task[None]]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[PromptMeasured] | None = None
        self._loading: set[asyncio.Task[None]] = set()  # adapters
        self._is_leaving = False
        self._is_closed = False
        self._wake_earlier = asyncio.Event()
        self._scrape_now = asyncio.Event()
        self._pace = ScrapePace(config.read_interval_ms / 1000)
        self._next_scrape: asyncio.TimerHandle | None = None
        self._waking_at = float("inf")
        self._idle = asyncio.Event()  # while no request is outstanding
        self._idle.set()
        self.ready = asyncio.Event()  # set when the replica first takes work, or could
        self.announced = asyncio.Event()  # set when the first heartbeat is sent
        self._logged_state: ReplicaState | None = None
        self._logged_why = ""
        self._why_due_at = float("-inf")
        self._pages_seen = PAGES_GOOD
        self._results_log = ResultsLog()
        self._logged_width: int | None = None
        self._registered: tuple[tuple[ModelId, ...], str | None] | None = None
        self._log = LimitedLog(log, clock)
        self._performers: dict[type[Any], Callable[[Any], Awaitable[None]]] = {
            effects.DropWork: self._drop_work,
            effects.Refuse: self._refuse,
            effects.RequestBody: self._request_body,
            effects.HoldWork: self._hold_work,
            effects.StartRelay: self._start_relay,
            effects.AbortRelay: self._abort_relay,
            effects.SendEnd: self._send_end,
            effects.ResyncRouter: self._resync_router,
            effects.LogOwnerChange: self._log_owner_change,
            effects.PublishHeartbeat: self._publish_heartbeat,
            effects.ScrapeNow: self._request_scrape,
            effects.ProbeEngine: self._probe_engine,
            effects.MeasurePrompt: self._measure_prompt,
            effects.StopMeasuring: self._stop_measuring,
            effects.LogSpeedProbe: self._log_speed_probe,
            effects.LoadAdapter: self._load_adapter,
        }

    async def feed(self, event: AgentEvent) -> None:
        """Let the core decide about an event, and perform it. Never waits for a response."""
        if self._is_closed:
            return
        core = self._core
        for effect in core.handle(event, self._clock()):
            await self._performers[type(effect)](effect)
        if core.wake_at < self._waking_at:
            self._wake_earlier.set()
        if core.outstanding:
            self._idle.clear()
        else:
            self._idle.set()

    def credit(self, credit: Credit) -> None:
        """One client's progress, and the first frame that its router misses, if any."""
        if (found := self._relays.get(credit.inbox)) is not None:
            found[0].credit(credit.consumed_bytes)
        if credit.missing_from >= 0:
            self._bus.outbox.retransmit(credit.inbox, credit.missing_from)

    def heartbeat(self) -> Heartbeat:
        return self._core.heartbeat(self._clock())

    def learned_speed(self) -> KnownSpeed | None:
        """Of its engine, for the next run: by clients' answers, else by a probe; None before."""
        beat, models = self.heartbeat(), self._engine.base_models
        if beat.prefill_s_per_token is None or not models:
            return self._core.state.speed.known
        line = PrefillLine(beat.prefill_s_per_token, beat.prefill_base_s or 0.0)
        return of_last_run(beat.engine, models, line)

    def offline_totals(self) -> OfflineTotals:
        return self._core.offline_totals

    def figures(self) -> EndpointFigures:
        """Of the subject on which it takes work."""
        totals, open_now = self._core.totals, self._core.outstanding
        refused = self._core.heartbeat(self._clock()).refused_total
        return EndpointFigures(
            requests=totals.ended + open_now,
            errors=totals.failed,
            ended=totals.ended,
            processing_s=totals.engine_s,
            last_error=totals.last_failure or "",
            more={"outstanding": open_now, "cancelled": totals.cancelled, "refused": refused},
        )

    def status(self) -> str:
        """What it does, in one line for people."""
        what = self._logged_why if self._core.replica_state is self._logged_state else ""
        state = f"{self._core.replica_state}: {what}" if what else str(self._core.replica_state)
        return f"{state}; {self._core.outstanding} requests under way"

    async def keep_time(self) -> None:
        """Wake the core whenever it is due. Runs for ever."""
        while True:
            await self.feed(TimerFired())
            self._wake_earlier.clear()
            self._waking_at = self._core.wake_at
            wait_s = max(0.0, self._waking_at - self._clock())
            timer = asyncio.get_running_loop().call_later(wait_s, self._wake_earlier.set)
            try:
                await self._wake_earlier.wait()
            finally:
                timer.cancel()

    async def scrape_engine(self) -> None:
        """Scrape the engine again and again, one scrape at a time. Runs for ever."""
        self._engine.on_kept_lost(self._lost_connection)
        while True:
            self._scrape_now.clear()
            scrape = await self._engine.scrape()
            await self.feed(scrape)
            self._log_state(scrape)
            if isinstance(scrape, EngineScraped):
                self._log_pages(scrape.pages)
            models, version = shown = self._core.models, self._engine.version
            if models and shown != self._registered:
                self._registered = shown
                kind = self._config.engine_kind
                await self._bus.register(kind, version, models, self.figures)
                self._compare_profile(models)
            await self._pause(scrape)

    async def keep_alive(self) -> None:
        """Send WORKING frames when they are due. Runs for ever."""
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            for writer in list(self._writers.values()):
                writer.keep_alive()
            self._bus.outbox.forget()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Take nothing new, finish what runs for `timeout_s` or until `at_once`, then leave."""
        self._is_leaving = True
        await self.feed(DrainRequested())
        log.info("draining: %d requests to finish", self._core.outstanding)
        waits = [asyncio.create_task(event.wait()) for event in (at_once, self._idle)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        await self.feed(StopRequested())
        await self._bus.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._idle.wait()
        await self.cut()
        await self._bus.flush()  # a GONE that overtakes the last END would fail a whole response
        await self.feed(DrainFinished())
        await self._bus.flush()

    async def cut(self) -> None:
        """Cancel every relay that still runs; no END frame is sent."""
        probes = [task for task in (self._probing, self._measuring) if task is not None]
        await end_all([*probes, *self._loading, *(task for _, task in self._relays.values())])

    async def close(self) -> None:
        """Cancel every relay, and ignore what still arrives until the bus is closed."""
        self._is_closed = True
        await self.cut()

    async def _drop_work(self, effect: effects.DropWork) -> None:
        self._bus.drop_work(effect.inbox, effect.size_bytes)

    async def _refuse(self, effect: effects.Refuse) -> None:
        log.info("refused: %s %s", effect.message.reason, effect.detail)
        self._last_writer(effect.inbox).send(Frame.REFUSED, encode(effect.message))

    async def _request_body(self, effect: effects.RequestBody) -> None:
        writer = self._writers[effect.inbox] = self._writer(effect.inbox)
        writer.send(Frame.BODY_WANTED, encode(effect.message))

    async def _hold_work(self, effect: effects.HoldWork) -> None:
        if effect.inbox not in self._writers:
            self._writers[effect.inbox] = self._writer(effect.inbox)

    async def _start_relay(self, effect: effects.StartRelay) -> None:
        inbox = effect.inbox
        self._end_rest()
        if (writer := self._writers.get(inbox)) is None:
            writer = self._writers[inbox] = self._writer(inbox)
        relay = Relay(
            effect,
            engine=self._engine,
            frames=writer,
            site=self._site,
            clock=self._clock,
            began=self.feed,
            adapter=self._core.adapter_of(effect.work),
        )
        self._relays[inbox] = relay, self._tasks.create_task(self._run_relay(inbox, relay))
        if self._held is not None:
            self._held.started(inbox, effect.work.path, effect.body)

    async def _run_relay(self, inbox: str, relay: Relay) -> None:
        try:
            ended = await relay.run()
        except Exception:  # a fault of ours in one response must not end the others
            log.exception("%s: the response failed inside the agent", inbox)
            ended = RelayEnded(inbox=inbox, outcome=Outcome.ENGINE_BROKEN)
            await self._send_end(effects.SendEnd(inbox, ended.outcome, FAULT_OF_OURS))
        del self._relays[inbox]
        self._writers.pop(inbox, None)
        if self._held is not None:
            self._held.ended(inbox)
        await self.feed(ended)

    async def _abort_relay(self, effect: effects.AbortRelay) -> None:
        if (found := self._relays.get(effect.inbox)) is not None:
            found[0].abort(effect.outcome, effect.detail, effect.refused)

    async def _send_end(self, effect: effects.SendEnd) -> None:
        end = End(
            outcome=effect.outcome,
            detail=effect.detail,
            prompt_tokens=-1,
            cached_tokens=-1,
            completion_tokens=-1,
            ttft_s=-1.0,
        )
        self._last_writer(effect.inbox).send(Frame.END, encode(end))

    async def _resync_router(self, effect: effects.ResyncRouter) -> None:
        router = subjects.inbox_prefix(*effect.router)
        self._bus.outbox.resync(router)
        for inbox, writer in self._writers.items():
            if inbox.startswith(f"{router}."):
                writer.working()

    async def _log_owner_change(self, effect: effects.LogOwnerChange) -> None:
        (region, router), config = effect.router, self._config
        by = "its own region" if region == config.region else f"region {region}"
        text = "replica %s/%s is owned by %s now, by a keep-alive of its router %s, term %d"
        args = (config.region, config.replica, by, router, effect.term)
        self._log.warning("owner", by, text, *args)

    async def _publish_heartbeat(self, effect: effects.PublishHeartbeat) -> None:
        beat = effect.heartbeat
        if self._held is not None:
            beat = replace(beat, held_seq=self._held.seq)
        await self._bus.publish_heartbeat(beat)
        if beat.results is not None or self._results_log.is_told:
            self._log_results(beat)
        width = self._core.state.engine.width
        if width is not None and width.known != self._logged_width:
            text = "%s/%s: engine computes %s at once, as its streams show"
            log.info(text, beat.region, beat.replica, width.known or "more than that")
            self._logged_width = width.known
        self.announced.set()

    async def _request_scrape(self, effect: effects.ScrapeNow) -> None:
        self._engine.refresh_models()
        self._scrape_now.set()

    async def _probe_engine(self, effect: effects.ProbeEngine) -> None:
        self._probing = self._tasks.create_task(self._probe(effect))

    async def _probe(self, effect: effects.ProbeEngine) -> None:
        answered = await self._engine.probe(effect.path, effect.model, PROBE_TIMEOUT_S)
        await self.feed(ProbeEnded(answered))

    async def _measure_prompt(self, effect: effects.MeasurePrompt) -> None:
        self._end_rest()  # a request of another client is to stop it
        self._measuring = asyncio.create_task(measured(self._engine, effect, self._clock))
        self._tasks.create_task(self._report_measured(self._measuring))

    async def _report_measured(self, measuring: asyncio.Task[PromptMeasured]) -> None:
        try:
            await asyncio.wait([measuring])
        finally:
            await end_all([measuring])
        await self.feed(PromptMeasured() if measuring.cancelled() else measuring.result())

    async def _stop_measuring(self, effect: effects.StopMeasuring) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    async def _log_speed_probe(self, effect: effects.LogSpeedProbe) -> None:
        level = logging.INFO if effect.known else logging.WARNING
        log.log(level, "%s/%s: %s", self._config.region, self._config.replica, effect.text)

    async def _load_adapter(self, effect: effects.LoadAdapter) -> None:
        task = self._tasks.create_task(self._load(effect))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, effect: effects.LoadAdapter) -> None:
        await self.feed(await adapter_loads.perform(self._engine, effect, self._clock))

    def _writer(self, inbox: str) -> FrameWriter:
        return FrameWriter(self._bus.outbox.sender(inbox), self._clock, self._where)

    def _last_writer(self, inbox: str) -> FrameWriter:
        """For the last frame of a response."""
        return self._writers.pop(inbox, None) or self._writer(inbox)

    def _log_state(self, scrape: EngineScraped | ScrapeFailed) -> None:
        state, now = self._core.replica_state, self._clock()
        hung = self._core.down_because(now)
        why = hung or (
            scrape.detail if isinstance(scrape, ScrapeFailed) else ", ".join(self._core.models)
        )
        if is_drained := state is ReplicaState.DRAINING and not self._is_leaving:
            why = DRAINED
        # While it is ready, a single scrape may fail without a consequence.
        new_why = state is not ReplicaState.READY and why != self._logged_why
        if state is not self._logged_state or (new_why and now >= self._why_due_at):
            level = logging.INFO if hung is None else logging.WARNING
            where = f"{self._config.region}/{self._config.replica}"
            log.log(level, "%s is %s: %s", where, state, why)
            self._logged_state, self._logged_why = state, why
            self._why_due_at = now + WHY_EVERY_S
        if state is ReplicaState.READY or is_drained:
            self.ready.set()

    def _log_pages(self, pages: PagesSeen) -> None:
        """When a page of an engine that is up breaks, or the other one instead, and when all can be
        read again."""
        had, self._pages_seen = self._pages_seen, pages
        where = f"{self._config.region}/{self._config.replica}"
        is_new = had.problem is None or had.is_blind is not pages.is_blind
        if pages.problem is not None and is_new:
            consequence = WITHOUT_METRICS if pages.is_blind else WITHOUT_MODELS
            log.warning("%s: a page of the engine fails: %s; %s", where, pages.problem, consequence)
        elif pages.problem is None and had.problem is not None:
            log.info("%s: the pages of the engine can be read again", where)

    def _log_results(self, beat: Heartbeat) -> None:
        """When the engine begins to fail requests, and when it answers again."""
        if beat.state is not ReplicaState.READY:
            return
        clears = self._core.state.engine.results.clears
        if (line := self._results_log.line(beat.results, clears, self._clock())) is not None:
            level = logging.WARNING if self._results_log.is_told else logging.INFO
            log.log(level, "%s/%s: %s", beat.region, beat.replica, line)

    def _compare_profile(self, models: tuple[ModelId, ...]) -> None:
        profile = self._config.profile
        if profile is not None and profile.model not in models:
            text = "the profile is of model %s, the engine serves %s: its budget may not fit"
            self._log.warning("profile", profile.model, text, profile.model, ", ".join(models))

    async def _pause(self, scrape: EngineScraped | ScrapeFailed) -> None:
        """Until the next scrape is due, or soon when something requests it."""
        ended_at = self._clock()
        interval_s = self._pace.next_in_s(
            scrape,
            is_busy=self._core.outstanding > 0,
            is_connected=self._engine.is_connected,
        )
        self._scrape_in(scrape.began_at + interval_s - ended_at)
        await self._scrape_now.wait()
        early_s = ended_at + SCRAPE_GAP_MIN_S - self._clock()
        if early_s > 0:
            await asyncio.sleep(early_s)

    def _end_rest(self) -> None:
        """A request goes to the engine."""
        if self._pace.rests:
            self._pace.woken()
            self._scrape_in(self._pace.busy_s)

    def _scrape_in(self, wait_s: float) -> None:
        if self._next_scrape is not None:
            self._next_scrape.cancel()
        loop = asyncio.get_running_loop()
        self._next_scrape = loop.call_later(max(0.0, wait_s), self._scrape_now.set)

    def _lost_connection(self) -> None:
        """The engine closed a connection that nobody used: it may be gone."""
        if self._pace.rests:
            self._pace.woken()
            self._engine.refresh_models()
            self._scrape_now.set()
