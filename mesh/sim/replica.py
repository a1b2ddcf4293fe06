"""A replica of the twin: the real AgentCore beside the real model of an engine.

What `agents.runtime` does with tasks and HTTP is done here by the event queue: looks at the
engine at the live cadence, ticks when the core wants them, frames to whoever asked. Tokens
are no events: an answer has a first one and an end, and while it runs its router is told once a
second that it does, in place of the frames (live, of a stream every half second, of a silent one
every five).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agents.core import effects as fx
from agents.core import events as ev
from agents.core.agent import AgentCore
from agents.core.beat import Replica
from agents.core.reading import NO_USAGE, Usage
from agents.sim.events import Finished, FirstToken, NeverFits, QueueFull, SimRequest
from mesh.sim.ask import Ask
from mesh.sim.engine import Engine
from mesh.sim.event_queue import EventQueue
from mesh.sim.looks import REFUSED_CONNECTION, Looks
from mesh.sim.network import Network
from mesh.sim.pace import Pace
from mesh.sim.place import STATUS_OK, Asker, End
from schemas.exchange import WORKING_S, Outcome, Refused
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat

BODY = b"{}"  # stands for any body: the agent reads nothing of it
WORKING_CHECK_S = 1.0
PROBE_S = 1.0  # until it is known whether a probe is answered
STATUS_TOO_LONG, STATUS_QUEUE_FULL = 400, 503


@dataclass(slots=True)
class Running:
    """An answer that the engine works on."""

    inbox: str
    ask: Ask
    asker: Asker
    number: int  # in the engine
    heard_at: float  # when its router was last sent a frame
    cached_tokens: int = 0
    began: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What does not change in a replica's life."""

    name: ReplicaId
    site: RegionId  # where it stands
    region: RegionId  # whose it is on the bus
    heartbeat_s: float
    reading_s: float
    outstanding_max: int
    batch_max: int | None
    beat_gap_s: float  # 0: news at once


class SimReplica:
    """`start` it; `crash` and `start` again for a fault. `hear_…` is what the bus brings."""

    def __init__(
        self,
        plan: ReplicaPlan,
        engine: Engine,
        queue: EventQueue,
        network: Network,
        routers: Sequence[Asker],
        inside: Callable[[int], None],
        adopters: Callable[[RegionId], Iterable[Asker]] = lambda region: (),
    ) -> None:
        """`routers` hear its heartbeats, and so do a region's `adopters`.

        `inside` is told how many answers more it holds.
        """
        self.name, self.site = plan.name, plan.site
        self.engine = engine
        self.core: AgentCore | None = None
        self._plan = plan
        self._queue = queue
        self._network = network
        self._routers = routers
        self._inside = inside
        self._adopters = adopters
        self._epoch = 0
        self._looks = Looks(engine, queue, plan.reading_s, self._seen, lambda: self.outstanding > 0)
        self._beats: Pace[Heartbeat] = Pace(queue, plan.beat_gap_s, self._publish)
        self._running: dict[str, Running] = {}
        self._by_number: dict[int, Running] = {}
        self._askers: Counter[Asker] = Counter()
        self._asks: dict[str, tuple[Ask, Asker]] = {}  # taken, and not handed over or refused yet
        self._last_number = 0
        self._tick_at = float("inf")
        self._wake_number = 0
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Refuse: self._refuse,
            fx.Hand: self._hand,
            fx.Abort: self._abort,
            fx.Finish: self._finish,
            # A cut swallows what is sent meanwhile: harder than life (`network`).
            fx.SpeakUp: lambda effect: None,
            fx.OwnerChanged: lambda effect: None,  # for the log of a live agent
            fx.Beat: lambda effect: self._beats.offer(effect.heartbeat),
            fx.LookNow: lambda effect: self._looks.hurry(),
            fx.Probe: lambda effect: self._queue.after(PROBE_S, self._probed, self._epoch),
        }

    @property
    def outstanding(self) -> int:
        """Answers that the agent holds."""
        return 0 if self.core is None else self.core.outstanding

    def start(self) -> None:
        """The agent begins, beside whatever engine is there; its first look comes at once."""
        self._epoch += 1
        self.core = AgentCore(
            Replica(
                region=self._plan.region,
                replica=self.name,
                epoch=self._epoch,
                engine="vllm",
                outstanding_max=self._plan.outstanding_max,
                heartbeat_s=self._plan.heartbeat_s,
                batch_max=self._plan.batch_max,
            )
        )
        self._tick_at = float("inf")
        self._looks.begin()
        self._queue.after(WORKING_CHECK_S, self._keep_working, self._epoch)

    def crash(self) -> None:
        """Agent and engine are gone."""
        self._inside(-self.outstanding)
        self.core = None
        self._looks.end()
        self._tick_at = float("inf")
        self._running.clear()
        self._askers.clear()
        self._by_number.clear()
        self._asks.clear()
        self.engine.crash()

    def restart(self) -> None:
        """Both come back, empty."""
        self.engine.restart()
        self.start()

    def crash_engine(self) -> None:
        """The engine is gone: its answers break off, and the next looks fail."""
        self.engine.crash()
        self._by_number.clear()
        for running in list(self._running.values()):
            self._end(running.inbox, Outcome.ENGINE_LOST, "the engine closed the connection")

    def set_rate(self, rate: float) -> None:
        """The engine runs at this share of its speed from now on."""
        self._step()
        self.engine.set_rate(rate)
        self._arm_engine()

    # What the bus brings.

    def hear_work(self, inbox: str, headers: dict[str, str], ask: Ask, asker: Asker) -> None:
        """A request. A bus on which nobody listens says so itself."""
        if self.core is None:
            self._network.send(self.site, asker.site, asker.hear_nobody, inbox)
            return
        before = self.core.outstanding
        self._asks[inbox] = ask, asker
        self._feed(ev.WorkArrived(inbox, headers, BODY))
        self._asks.pop(inbox, None)
        self._inside(self.outstanding - before)

    def hear_cancel(self, inbox: str) -> None:
        """Nobody waits for this answer."""
        if self.core is not None:
            self._feed(ev.CancelArrived(inbox))

    def hear_alive(self, region: RegionId, router: RouterId, epoch: int, term: int | None) -> None:
        """A router lives, and owns this replica under that term, if it says so."""
        if self.core is not None:
            self._feed(ev.AliveArrived(region, router, epoch, term))

    def answers_to(self, asker: Asker) -> bool:
        """Whether that router waits for something from here."""
        return self._askers[asker] > 0

    # The core and its effects.

    def _feed(self, event: ev.Event) -> None:
        core = self.core
        assert core is not None, "a crashed agent hears nothing"
        for effect in core.handle(event, self._queue.now):
            self._performers[type(effect)](effect)
        if core.wake_at < self._tick_at:
            self._tick_at = core.wake_at
            self._queue.at(self._tick_at, self._tick, self._tick_at)

    def _tick(self, at: float) -> None:
        if at == self._tick_at and self.core is not None:
            self._tick_at = float("inf")
            self._feed(ev.Tick())

    def _refuse(self, effect: fx.Refuse) -> None:
        _, asker = self._asks[effect.inbox]
        self._network.send(self.site, asker.site, asker.hear_refused, effect.inbox, effect.message)

    def _hand(self, effect: fx.Hand) -> None:
        ask, asker = self._asks[effect.inbox]
        self._last_number += 1
        now = self._queue.now
        running = Running(effect.inbox, ask, asker, self._last_number, now)
        self._running[effect.inbox] = running
        self._askers[asker] += 1
        if self.engine.is_down:
            self._queue.at(now, self._end, effect.inbox, Outcome.ENGINE_LOST, REFUSED_CONNECTION)
            return
        node = ask.node
        request = SimRequest(
            running.number, node.prompt_tokens, node.answer.tokens, ask.keys.blocks
        )
        try:
            self.engine.submit(request)
        except NeverFits:
            self._queue.at(now, self._engine_error, effect.inbox, STATUS_TOO_LONG)
        except QueueFull:
            self._queue.at(now, self._engine_error, effect.inbox, STATUS_QUEUE_FULL)
        else:
            self._by_number[running.number] = running
            self._arm_engine()

    def _abort(self, effect: fx.Abort) -> None:
        running = self._running[effect.inbox]
        if self._by_number.pop(running.number, None) is not None:
            self.engine.abort(running.number)
            self._arm_engine()
        if effect.refused is not None and not running.began:
            self._queue.at(self._queue.now, self._leave, effect.inbox, effect.refused)
        else:
            self._queue.at(self._queue.now, self._end, effect.inbox, effect.outcome, effect.detail)

    def _leave(self, inbox: str, refused: Refused) -> None:
        """An answer of which nothing was said is refused after all."""
        running = self._running.pop(inbox, None)
        if running is None:
            return
        asker = running.asker
        self._askers[asker] -= 1
        self._network.send(self.site, asker.site, asker.hear_refused, inbox, refused)
        self._feed(ev.AnswerEnded(inbox=inbox, outcome=Outcome.ENGINE_LOST))
        self._inside(-1)

    def _probed(self, epoch: int) -> None:
        if epoch == self._epoch and self.core is not None:
            lives = not (self.engine.is_down or self.engine.stands_still)
            self._feed(ev.ProbeEnded(lives))

    def _finish(self, effect: fx.Finish) -> None:
        _, asker = self._asks[effect.inbox]
        end = End(effect.outcome, effect.detail)
        self._network.send(self.site, asker.site, asker.hear_end, effect.inbox, end)

    def _publish(self, beat: Heartbeat) -> None:
        if beat.epoch != self._epoch or self.core is None:
            return
        for router in (*self._routers, *self._adopters(self._plan.region)):
            self._network.send_state(self.site, router.site, router.hear_heartbeat, beat)

    # The engine.

    def _arm_engine(self) -> None:
        wake_at = self.engine.wake_at
        self._wake_number += 1
        if wake_at is not None:
            self._queue.at(wake_at, self._wake, self._wake_number)

    def _wake(self, number: int) -> None:
        if number == self._wake_number:
            self._step()
            self._arm_engine()

    def _step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, FirstToken):
                self._first_token(event)
            elif isinstance(event, Finished):
                self._finished(event.request_id)

    def _first_token(self, event: FirstToken) -> None:
        running = self._by_number[event.request_id]
        running.cached_tokens = event.cached_tokens
        self._begin(running, STATUS_OK)

    def _begin(self, running: Running, status: int) -> None:
        running.began = True
        running.heard_at = self._queue.now
        asker = running.asker
        self._network.send(self.site, asker.site, asker.hear_first, running.inbox, self, status)
        self._feed(ev.AnswerBegan(running.inbox, status == STATUS_OK))

    def _finished(self, number: int) -> None:
        running = self._by_number.pop(number)
        node = running.ask.node
        usage = Usage(node.prompt_tokens, running.cached_tokens, node.answer.tokens)
        self._end(running.inbox, Outcome.DONE, "", usage)

    def _engine_error(self, inbox: str, status: int) -> None:
        """The engine answers with an error of its own, which is an answer for all that."""
        running = self._running.get(inbox)
        if running is not None:
            self._begin(running, status)
            self._end(inbox, Outcome.DONE, "", status=status)

    def _end(
        self,
        inbox: str,
        outcome: Outcome,
        detail: str,
        usage: Usage = NO_USAGE,
        status: int = STATUS_OK,
    ) -> None:
        running = self._running.pop(inbox, None)
        if running is None:
            return
        asker = running.asker
        self._askers[asker] -= 1
        end = End(outcome, detail, usage, status)
        self._network.send(self.site, asker.site, asker.hear_end, inbox, end)
        streamed = running.began and status == STATUS_OK
        self._feed(ev.AnswerEnded(inbox=inbox, outcome=outcome, usage=usage, streamed=streamed))
        self._inside(-1)

    def _seen(self, look: ev.EngineRead | ev.EngineFailed) -> None:
        if self.engine.owes_events:
            self._step()
            self._arm_engine()
        self._feed(look)

    def _keep_working(self, epoch: int) -> None:
        if epoch != self._epoch or self.core is None:
            return
        now = self._queue.now
        told: dict[Asker, list[str]] = {}
        for running in self._running.values():
            streams = running.began and not self.engine.stands_still
            if streams or now - running.heard_at >= WORKING_S:
                running.heard_at = now
                told.setdefault(running.asker, []).append(running.inbox)
        for asker, inboxes in told.items():
            self._network.send(self.site, asker.site, asker.hear_progress, inboxes)
        self._queue.after(WORKING_CHECK_S, self._keep_working, epoch)
