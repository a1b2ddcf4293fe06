"""Performing what AgentCore decides: the one place where events and effects meet the world."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from agents.adapters.bus import AgentBus
from agents.adapters.engine import Engine
from agents.adapters.frames import FrameWriter
from agents.adapters.relay import Relay
from agents.config import AgentConfig
from agents.core import effects
from agents.core.agent import AgentCore
from agents.core.events import (
    AnswerEnded,
    DrainAsked,
    EngineFailed,
    EngineRead,
    Event,
    Left,
    ProbeEnded,
    StopAsked,
    Tick,
)
from agents.core.stall import PROBE_TIMEOUT_S
from infra.ending import end_all
from infra.limited_log import LimitedLog
from schemas import subjects
from schemas.exchange import Credit, End, Frame, Outcome, Placed
from schemas.ids import ModelId
from schemas.state import Heartbeat, ReplicaState
from schemas.wire import encode

log = logging.getLogger(__name__)

IDLE_READ_INTERVAL_S = 0.1
SILENCE_CHECK_S = 1.0
LOOK_GAP_MIN_S = 0.01  # between looks that something asked for
WHY_EVERY_S = 5.0  # between two reasons of one state: an engine may alternate
ABORT_TIMEOUT_S = 2.0  # for END frames of aborted answers to go out
FAULT_OF_OURS = "the agent failed on this answer; its log says why"


class Agent:
    """The core with its hands. Start `read_engine` and `keep_time` in tasks, then feed it."""

    def __init__(
        self,
        config: AgentConfig,
        core: AgentCore,
        bus: AgentBus,
        engine: Engine,
        clock: Callable[[], float],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._core = core
        self._bus = bus
        self._engine = engine
        self._clock = clock
        self._tasks = tasks
        self._who = encode(Placed(config.region, config.replica))
        self._writers: dict[str, FrameWriter] = {}  # of answers that have not ended
        self._relays: dict[str, tuple[Relay, asyncio.Task[None]]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._look_now = asyncio.Event()
        self._waking_at = float("inf")
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.ready = asyncio.Event()  # set when the replica first takes work
        self._state: ReplicaState | None = None  # that was logged, and why, and when again
        self._why = ""
        self._why_due_at = float("-inf")
        self._registered: tuple[ModelId, ...] | None = None
        self._log = LimitedLog(log, clock)
        self._performers: dict[type[Any], Callable[[Any], Awaitable[None]]] = {
            effects.Refuse: self._refuse,
            effects.AskBody: self._ask_body,
            effects.Hand: self._hand,
            effects.Abort: self._abort,
            effects.Finish: self._finish,
            effects.SpeakUp: self._speak_up,
            effects.OwnerChanged: self._owner_changed,
            effects.Beat: self._beat,
            effects.LookNow: self._look,
            effects.Probe: self._probe,
        }

    async def feed(self, event: Event) -> None:
        """Let the core decide about an event, and do what it says. Never waits for an answer."""
        for effect in self._core.handle(event, self._clock()):
            await self._performers[type(effect)](effect)
        if self._core.wake_at < self._waking_at:
            self._hurry.set()
        if self._core.outstanding:
            self._quiet.clear()
        else:
            self._quiet.set()

    def credit(self, credit: Credit) -> None:
        """The client of one answer has come so far, and its router may miss some of it."""
        if (found := self._relays.get(credit.inbox)) is not None:
            found[0].credit(credit.consumed_bytes)
        if credit.missing_from >= 0:
            self._bus.outbox.repeat(credit.inbox, credit.missing_from)

    def heartbeat(self) -> Heartbeat:
        """The replica as it is now."""
        return self._core.heartbeat(self._clock())

    async def keep_time(self) -> None:
        """Tick whenever the core wants it. Runs for ever."""
        while True:
            await self.feed(Tick())
            self._hurry.clear()
            self._waking_at = self._core.wake_at
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._waking_at - self._clock())):
                    await self._hurry.wait()

    async def read_engine(self) -> None:
        """Look at the engine, again and again, one look at a time. Runs for ever."""
        while True:
            self._look_now.clear()
            look = await self._engine.look()
            await self.feed(look)
            self._tell_state(look)
            if self._core.models != self._registered and self._core.models:
                self._registered = self._core.models
                await self._bus.register(self._config.engine_kind, self._registered)
            await self._pause(look.began_at)

    async def keep_working(self) -> None:
        """Tell routers of long silent answers that they are still worked on. Runs for ever."""
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            for writer in list(self._writers.values()):
                writer.break_silence()
            self._bus.outbox.forget()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Take nothing new, finish what runs for `timeout_s` or until `at_once`, then leave."""
        await self.feed(DrainAsked())
        log.info("draining: %d answers to finish", self._core.outstanding)
        waits = [asyncio.create_task(event.wait()) for event in (at_once, self._quiet)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        await self.feed(StopAsked())
        await self._bus.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._quiet.wait()
        await self.cut()
        await self._bus.flush()  # GONE, said before the last END, would fail a whole answer
        await self.feed(Left())
        await self._bus.flush()

    async def cut(self) -> None:
        """End every answer that still runs, without a word."""
        probing = [] if self._probing is None else [self._probing]
        await end_all([*probing, *(task for _, task in self._relays.values())])

    async def _refuse(self, effect: effects.Refuse) -> None:
        log.info("refused: %s %s", effect.message.reason, effect.detail)
        writer = self._writers.pop(effect.inbox, None) or self._writer(effect.inbox)
        writer.say(Frame.REFUSED, effect.message)

    async def _ask_body(self, effect: effects.AskBody) -> None:
        writer = self._writers[effect.inbox] = self._writer(effect.inbox)
        writer.say(Frame.BODY_WANTED, effect.message)

    async def _hand(self, effect: effects.Hand) -> None:
        writer = self._writers.setdefault(effect.inbox, self._writer(effect.inbox))
        relay = Relay(
            effect,
            engine=self._engine,
            frames=writer,
            region=self._config.region,
            replica=self._config.replica,
            clock=self._clock,
            began=self.feed,
        )
        task = self._tasks.create_task(self._serve(effect.inbox, relay))
        self._relays[effect.inbox] = relay, task

    async def _serve(self, inbox: str, relay: Relay) -> None:
        try:
            ended = await relay.run()
        except Exception:  # a fault of ours in one answer must not end the others
            log.exception("%s: the answer failed inside the agent", inbox)
            ended = AnswerEnded(inbox=inbox, outcome=Outcome.ENGINE_BROKEN)
            await self._finish(effects.Finish(inbox, ended.outcome, FAULT_OF_OURS))
        del self._relays[inbox]
        self._writers.pop(inbox, None)
        await self.feed(ended)

    async def _abort(self, effect: effects.Abort) -> None:
        if (found := self._relays.get(effect.inbox)) is not None:
            found[0].abort(effect.outcome, effect.detail, effect.refused)

    async def _finish(self, effect: effects.Finish) -> None:
        end = End(
            outcome=effect.outcome,
            detail=effect.detail,
            prompt_tokens=-1,
            cached_tokens=-1,
            completion_tokens=-1,
            ttft_s=-1.0,
        )
        writer = self._writers.pop(effect.inbox, None) or self._writer(effect.inbox)
        writer.say(Frame.END, end)

    async def _speak_up(self, effect: effects.SpeakUp) -> None:
        router = subjects.inbox_prefix(*effect.router)
        self._bus.outbox.speak_up(router)
        for inbox, writer in self._writers.items():
            if inbox.startswith(f"{router}."):
                writer.speak()

    async def _owner_changed(self, effect: effects.OwnerChanged) -> None:
        (region, router), config = effect.router, self._config
        by = "its own region" if region == config.region else f"region {region}"
        text = "replica %s/%s is owned by %s now, as its router %s says, by term %d"
        args = (config.region, config.replica, by, router, effect.term)
        self._log.warning("owner", by, text, *args)

    async def _beat(self, effect: effects.Beat) -> None:
        await self._bus.beat(effect.heartbeat)

    async def _look(self, effect: effects.LookNow) -> None:
        self._engine.want_models()
        self._look_now.set()

    async def _probe(self, effect: effects.Probe) -> None:
        self._probing = self._tasks.create_task(self._probed(effect))

    async def _probed(self, effect: effects.Probe) -> None:
        answered = await self._engine.probe(effect.path, effect.model, PROBE_TIMEOUT_S)
        await self.feed(ProbeEnded(answered))

    def _writer(self, inbox: str) -> FrameWriter:
        return FrameWriter(self._bus.outbox.to(inbox), self._clock, self._who)

    def _tell_state(self, look: EngineRead | EngineFailed) -> None:
        state, now = self._core.state, self._clock()
        hung = self._core.down_because(now)
        why = hung or (
            look.detail if isinstance(look, EngineFailed) else ", ".join(self._core.models)
        )
        # While it is ready, a single look may fail without a consequence.
        is_news = state is not ReplicaState.READY and why != self._why
        if state is not self._state or (is_news and now >= self._why_due_at):
            level = logging.INFO if hung is None else logging.WARNING
            where = f"{self._config.region}/{self._config.replica}"
            log.log(level, "%s is %s: %s", where, state, why)
            self._state, self._why, self._why_due_at = state, why, now + WHY_EVERY_S
        if state is ReplicaState.READY:
            self.ready.set()

    async def _pause(self, began_at: float) -> None:
        """Until the next look is due, or at once when something asks for it."""
        interval_s = self._config.read_interval_ms / 1000
        idle = not self._core.outstanding
        until = began_at + (max(interval_s, IDLE_READ_INTERVAL_S) if idle else interval_s)
        await asyncio.sleep(LOOK_GAP_MIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await self._look_now.wait()
