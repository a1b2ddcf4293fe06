"""A replica of the twin: the live AgentCore beside the model of an engine.

What `agents.runtime` does with tasks and HTTP is done here by the event queue: scrapes of the
engine at the live cadence, ticks when the core wants them, frames to the requesting router. Tokens
are no events: an answer has a first one and an end, and while it runs the agent sends its router
a progress message once a second in place of frames (live: every half second of a stream, every
five of a silent answer).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agents.core import effects as fx
from agents.core import events as ev
from agents.core.agent import AgentCore
from agents.core.events import NO_USAGE, TokenUsage
from agents.core.heartbeat import ReplicaConfig
from agents.sim.events import Finished, NeverFits, PrefillFinished, QueueFull, SimRequest
from mesh.sim.ask import Ask
from mesh.sim.config import WorldConfig
from mesh.sim.engine import REFUSED_CONNECTION, MetricScrapes, ReplicaEngine
from mesh.sim.event_queue import CoalescingSender, EventQueue
from mesh.sim.network import Network
from mesh.sim.place import STATUS_OK, Asker, End
from schemas.exchange import WORKING_S, Outcome, Refused
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat

BODY = b"{}"  # stands for any body: the agent reads nothing of it
WORKING_CHECK_S = 1.0
PROBE_S = 1.0  # from a probe to its result
STATUS_TOO_LONG, STATUS_QUEUE_FULL = 400, 503


@dataclass(slots=True)
class RunningAnswer:
    """An answer that the engine produces."""

    inbox: str
    ask: Ask
    asker: Asker
    number: int  # in the engine
    sent_at: float  # the last message about it to its router
    cached_tokens: int = 0
    began: bool = False


class SimReplica:
    """Call `start` once; `crash` and `restart` are faults. The network calls `hear_…`."""

    def __init__(
        self,
        name: ReplicaId,
        site: RegionId,
        config: WorldConfig,
        engine: ReplicaEngine,
        queue: EventQueue,
        network: Network,
        routers: Sequence[Asker],
        inside: Callable[[int], None],
        adopters: Callable[[RegionId], Iterable[Asker]],
    ) -> None:
        """`site`: its place on the network; on the bus it belongs to its routers' region.

        `routers` and that region's `adopters` receive its heartbeats. `inside` is called with each
        change of the number of answers that it holds.
        """
        self.name, self.site = name, site
        self.engine = engine
        self.core: AgentCore | None = None
        self._config = config
        self._region = routers[0].site
        self._queue = queue
        self._network = network
        self._routers = routers
        self._inside = inside
        self._adopters = adopters
        self._epoch = 0
        self._scrapes = MetricScrapes(
            engine, queue, config.reading_s, self._on_scrape, lambda: self.outstanding > 0
        )
        self._heartbeats: CoalescingSender[Heartbeat] = CoalescingSender(
            queue, 0.0 if config.news_at_once else config.heartbeat_s, self._publish
        )
        self._running: dict[str, RunningAnswer] = {}
        self._by_number: dict[int, RunningAnswer] = {}
        self._askers: Counter[Asker] = Counter()
        self._asks: dict[str, tuple[Ask, Asker]] = {}  # received, and not dispatched or refused yet
        self._last_number = 0
        self._tick_at = float("inf")
        self._wake_number = 0
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Refuse: self._refuse,
            fx.StartRelay: self._hand,
            fx.AbortRelay: self._abort,
            fx.SendEnd: self._finish,
            fx.ResyncRouter: lambda effect: None,  # a cut drops messages here, see `network`
            fx.LogOwnerChange: lambda effect: None,  # for the log of a live agent
            fx.PublishHeartbeat: lambda effect: self._heartbeats.offer(effect.heartbeat),
            fx.ScrapeNow: lambda effect: self._scrapes.hurry(),
            fx.ProbeEngine: lambda effect: self._queue.after(PROBE_S, self._probed, self._epoch),
        }

    @property
    def outstanding(self) -> int:
        """How many answers the agent holds."""
        return 0 if self.core is None else self.core.outstanding

    def start(self) -> None:
        """The agent starts; its first scrape comes at once."""
        self._epoch += 1
        self.core = AgentCore(
            ReplicaConfig(
                region=self._region,
                replica=self.name,
                epoch=self._epoch,
                engine="vllm",
                outstanding_max=self._config.outstanding_max,
                heartbeat_s=self._config.heartbeat_s,
                batch_max=self.engine.profile.max_seqs if self._config.batch_max_told else None,
            )
        )
        self._tick_at = float("inf")
        self._scrapes.begin()
        self._queue.after(WORKING_CHECK_S, self._keep_working, self._epoch)

    def crash(self) -> None:
        """Agent and engine stop without a message."""
        self._inside(-self.outstanding)
        self.core = None
        self._scrapes.end()
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
        """The engine's process is gone: its answers break off, and scrapes fail."""
        self.engine.crash()
        self._by_number.clear()
        for running in list(self._running.values()):
            self._end(running.inbox, Outcome.ENGINE_LOST, "the engine closed the connection")

    def set_rate(self, rate: float) -> None:
        """The engine runs at this share of its speed from now on."""
        self._step()
        self.engine.set_rate(rate)
        self._arm_engine()

    def hear_work(self, inbox: str, headers: dict[str, str], ask: Ask, asker: Asker) -> None:
        """A request. NATS itself reports a subject without subscribers."""
        if self.core is None:
            self._send(asker, asker.hear_nobody, inbox)
            return
        before = self.core.outstanding
        self._asks[inbox] = ask, asker
        self._feed(ev.WorkArrived(inbox, headers, BODY))
        self._asks.pop(inbox, None)
        self._inside(self.outstanding - before)

    def hear_cancel(self, inbox: str) -> None:
        """The router cancels this answer."""
        if self.core is not None:
            self._feed(ev.CancelArrived(inbox))

    def hear_alive(self, region: RegionId, router: RouterId, epoch: int, term: int | None) -> None:
        """A router is alive, and owns this replica under that term, if given."""
        if self.core is not None:
            self._feed(ev.AliveArrived(region, router, epoch, term))

    def answers_to(self, asker: Asker) -> bool:
        """Whether this replica holds an answer for that router."""
        return self._askers[asker] > 0

    def _send(self, asker: Asker, call: Callable[..., None], *args: Any) -> None:
        self._network.send(self.site, asker.site, call, *args)

    def _feed(self, event: ev.AgentEvent) -> None:
        core = self.core
        assert core is not None, "a crashed agent receives nothing"
        for effect in core.handle(event, self._queue.now):
            self._performers[type(effect)](effect)
        if core.wake_at < self._tick_at:
            self._tick_at = core.wake_at
            self._queue.at(self._tick_at, self._tick, self._tick_at)

    def _tick(self, at: float) -> None:
        if at == self._tick_at and self.core is not None:
            self._tick_at = float("inf")
            self._feed(ev.TimerFired())

    def _refuse(self, effect: fx.Refuse) -> None:
        _, asker = self._asks[effect.inbox]
        self._send(asker, asker.hear_refused, effect.inbox, effect.message)

    def _hand(self, effect: fx.StartRelay) -> None:
        ask, asker = self._asks[effect.inbox]
        self._last_number += 1
        now = self._queue.now
        running = RunningAnswer(effect.inbox, ask, asker, self._last_number, now)
        self._running[effect.inbox] = running
        self._askers[asker] += 1
        if self.engine.is_down:
            self._queue.at(now, self._end, effect.inbox, Outcome.ENGINE_LOST, REFUSED_CONNECTION)
            return
        tokens = ask.node.prompt_tokens, ask.node.answer.tokens
        try:
            self.engine.submit(SimRequest(running.number, *tokens, ask.keys.blocks))
        except NeverFits:
            self._queue.at(now, self._engine_error, effect.inbox, STATUS_TOO_LONG)
        except QueueFull:
            self._queue.at(now, self._engine_error, effect.inbox, STATUS_QUEUE_FULL)
        else:
            self._by_number[running.number] = running
            self._arm_engine()

    def _abort(self, effect: fx.AbortRelay) -> None:
        running = self._running[effect.inbox]
        if self._by_number.pop(running.number, None) is not None:
            self.engine.abort(running.number)
            self._arm_engine()
        if effect.refused is not None and not running.began:
            self._queue.at(self._queue.now, self._leave, effect.inbox, effect.refused)
        else:
            self._queue.at(self._queue.now, self._end, effect.inbox, effect.outcome, effect.detail)

    def _leave(self, inbox: str, refused: Refused) -> None:
        """Refuse an answer of which no frame was sent (late refusal)."""
        running = self._remove(inbox)
        if running is None:
            return
        self._send(running.asker, running.asker.hear_refused, inbox, refused)
        self._feed(ev.RelayEnded(inbox=inbox, outcome=Outcome.ENGINE_LOST))
        self._inside(-1)

    def _remove(self, inbox: str) -> RunningAnswer | None:
        running = self._running.pop(inbox, None)
        if running is not None:
            self._askers[running.asker] -= 1
        return running

    def _probed(self, epoch: int) -> None:
        if epoch == self._epoch and self.core is not None:
            self._feed(ev.ProbeEnded(not self.engine.is_stuck))

    def _finish(self, effect: fx.SendEnd) -> None:
        _, asker = self._asks[effect.inbox]
        self._send(asker, asker.hear_end, effect.inbox, End(effect.outcome, effect.detail))

    def _publish(self, beat: Heartbeat) -> None:
        if beat.epoch != self._epoch or self.core is None:
            return
        for router in (*self._routers, *self._adopters(self._region)):
            self._network.send_state(self.site, router.site, router.hear_heartbeat, beat)

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
            if isinstance(event, PrefillFinished):
                self._first_token(event)
            elif isinstance(event, Finished):
                self._finished(event.request_id)

    def _first_token(self, event: PrefillFinished) -> None:
        running = self._by_number[event.request_id]
        running.cached_tokens = event.cached_tokens
        self._begin(running, STATUS_OK)

    def _begin(self, running: RunningAnswer, status: int) -> None:
        running.began = True
        running.sent_at = self._queue.now
        self._send(running.asker, running.asker.hear_first, running.inbox, self, status)
        self._feed(ev.RelayBegan(running.inbox, status == STATUS_OK))

    def _finished(self, number: int) -> None:
        running = self._by_number.pop(number)
        node = running.ask.node
        usage = TokenUsage(node.prompt_tokens, running.cached_tokens, node.answer.tokens)
        self._end(running.inbox, Outcome.DONE, "", usage)

    def _engine_error(self, inbox: str, status: int) -> None:
        """The engine answers with an HTTP error, which the agent passes on as an answer."""
        running = self._running.get(inbox)
        if running is not None:
            self._begin(running, status)
            self._end(inbox, Outcome.DONE, "", status=status)

    def _end(
        self,
        inbox: str,
        outcome: Outcome,
        detail: str,
        usage: TokenUsage = NO_USAGE,
        status: int = STATUS_OK,
    ) -> None:
        running = self._remove(inbox)
        if running is None:
            return
        end = End(outcome, detail, usage, status)
        self._send(running.asker, running.asker.hear_end, inbox, end)
        streamed = running.began and status == STATUS_OK
        self._feed(ev.RelayEnded(inbox=inbox, outcome=outcome, usage=usage, streamed=streamed))
        self._inside(-1)

    def _on_scrape(self, result: ev.EngineScraped | ev.ScrapeFailed) -> None:
        if self.engine.has_events:
            self._step()
            self._arm_engine()
        self._feed(result)

    def _keep_working(self, epoch: int) -> None:
        if epoch != self._epoch or self.core is None:
            return
        now = self._queue.now
        progress: dict[Asker, list[str]] = {}
        for running in self._running.values():
            streams = running.began and not self.engine.is_stuck
            if streams or now - running.sent_at >= WORKING_S:
                running.sent_at = now
                progress.setdefault(running.asker, []).append(running.inbox)
        for asker, inboxes in progress.items():
            self._send(asker, asker.hear_progress, inboxes)
        self._queue.after(WORKING_CHECK_S, self._keep_working, epoch)
