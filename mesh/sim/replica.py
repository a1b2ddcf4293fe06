"""A replica of the twin: the live AgentCore beside the model of an engine.

What `agents.runtime` does with tasks and HTTP is done here by the event queue: scrapes of the
engine at the live cadence, ticks when the core is due, frames to the router that the answer goes
to. Tokens are no events: an answer has a first one and an end, and while it runs the agent sends
its router a progress message once a second in place of frames (live: every half second of a stream,
every five of a silent answer).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agents.core import effects as fx
from agents.core import events as ev
from agents.core.agent import AgentCore
from agents.core.events import NO_USAGE, TokenUsage
from agents.sim.adapters import LoadedAdapters
from agents.sim.events import Finished, NeverFits, PrefillFinished, QueueFull, SimRequest
from agents.sim.profiles import Profile
from mesh.core.model.events import HeldDeltaSeen, HeldPartSeen
from mesh.session.answer import EVENT_STREAM
from mesh.sim.agent_config import agent_config
from mesh.sim.engine import REFUSED_CONNECTION, MetricScrapes, ReplicaEngine
from mesh.sim.event_queue import CoalescingSender
from mesh.sim.kv_events import ReplicaKvEvents
from mesh.sim.running_answer import RunningAnswer, due_progress, end_message
from mesh.sim.session_host import SessionHost
from mesh.sim.workload import SentRequest
from schemas.exchange import H_OFFLINE, WORKING_S, Head, Outcome, Refusal, Refused
from schemas.held import HeldAsk
from schemas.http_statuses import OK
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat

if TYPE_CHECKING:
    from mesh.sim.world import World

BODY = b"{}"  # in place of any body: the agent reads nothing of it
WORKING_CHECK_S = 1.0
PROBE_S = 1.0  # from a probe to its result
STATUS_TOO_LONG, STATUS_QUEUE_FULL = 400, 503


class SimReplica:
    """Call `start` once; `crash` and `restart` are faults. The network calls `receive_…`."""

    def __init__(self, world: "World", name: ReplicaId, site: RegionId, profile: Profile) -> None:
        """`site`: its place on the network; on the bus it belongs to its routers' region."""
        config = world.config
        self.name, self.site = name, site
        most = 0 if config.adapters is None else config.adapters.most
        self.engine = ReplicaEngine(profile, lambda: self._queue.now, config.kv_tokens, most)
        self.core: AgentCore | None = None
        self._world = world
        self._config = config
        self._queue = world.queue
        self._network = world.network
        self._routers = world.region_routers[config.shape.router_of(site)]
        self._region = self._routers[0].site
        self._epoch = 0
        self._scrapes = MetricScrapes(
            self.engine, self._queue, self._on_scrape, lambda: self.outstanding > 0
        )
        self._heartbeats: CoalescingSender[Heartbeat] = CoalescingSender(
            self._queue, 0.0 if config.state_at_once else config.heartbeat_s, self._publish
        )
        self._running: dict[str, RunningAnswer] = {}
        self._by_number: dict[int, RunningAnswer] = {}
        self._receivers: Counter[SessionHost] = Counter()
        # Received, and not dispatched or refused yet.
        self._undecided: dict[str, tuple[SentRequest, SessionHost]] = {}
        # Of those, what waits for room beside online requests: when its router last heard of it.
        self._held: dict[str, float] = {}
        self._last_number = 0
        self._tick_at = float("inf")
        self._wake_number = 0
        self.kv_events: ReplicaKvEvents | None = None
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Refuse: self._refuse,
            fx.HoldWork: self._hold,
            fx.StartRelay: self._start_relay,
            fx.AbortRelay: self._abort,
            fx.SendEnd: self._send_end,
            fx.ResyncRouter: lambda effect: None,  # a cut drops messages here, see `network`
            fx.LogOwnerChange: lambda effect: None,  # for the log of a live agent
            fx.PublishHeartbeat: lambda effect: self._heartbeats.offer(effect.heartbeat),
            fx.ScrapeNow: lambda effect: self._scrapes.scrape_now(),
            fx.LoadAdapter: self._load_adapter,
            fx.ProbeEngine: lambda effect: self._queue.after(PROBE_S, self._probed, self._epoch),
        }

    @property
    def outstanding(self) -> int:
        return 0 if self.core is None else self.core.outstanding

    def start(self) -> None:
        """The agent starts; its first scrape comes at once."""
        self._epoch += 1
        has_offline = self._world.offline is not None
        self.core = AgentCore(
            agent_config(
                self._config, self._region, self.name, self._epoch, self.engine, has_offline
            )
        )
        self._tick_at = float("inf")
        if self._config.kv_events:
            cache = self.engine.sim.cache
            publish = self._publish_held
            queue = self._queue
            self.kv_events = ReplicaKvEvents(self.name, self._epoch, cache, queue, publish)
        self._scrapes.begin(each=has_offline and self._config.offline is not None)
        self._queue.after(WORKING_CHECK_S, self._keep_working, self._epoch)

    def crash(self) -> None:
        """Agent and engine stop without a message."""
        self._world.count_outstanding(-self.outstanding)
        self.core = None
        if self.kv_events is not None:
            self.kv_events.end()
        self._scrapes.end()
        self._tick_at = float("inf")
        self._running.clear()
        self._receivers.clear()
        self._by_number.clear()
        self._undecided.clear()
        self._held.clear()
        self.engine.crash()

    def restart(self) -> None:
        self.engine.restart()
        self.start()

    def crash_engine(self) -> None:
        """The engine's process ends: its answers break off, and scrapes fail."""
        self._scrapes.catch_up()
        self.engine.crash()
        self._scrapes.follow()
        if self.kv_events is not None:
            self.kv_events.follow(self.engine.sim.cache)
        self._by_number.clear()
        for running in list(self._running.values()):
            self._end(running.inbox, Outcome.ENGINE_LOST, "the engine closed the connection")

    def set_rate(self, rate: float) -> None:
        """The engine runs at this share of its speed from now on."""
        self._step()
        self.engine.set_rate(rate)
        self._arm_engine()

    def receive_work(
        self, inbox: str, headers: dict[str, str], request: SentRequest, receiver: SessionHost
    ) -> None:
        """A request, to be answered to `inbox` of `receiver`.

        Where the agent is away, NATS itself reports a subject without subscribers.
        """
        if self.core is None:
            self._send(receiver, receiver.no_responders, inbox)
            return
        self._undecided[inbox] = request, receiver
        body = b'{"max_tokens":%d}' % request.node.answer.tokens if H_OFFLINE in headers else BODY
        self._feed(ev.WorkArrived(inbox, headers, body))

    def receive_cancel(self, inbox: str) -> None:
        if self.core is not None:
            self._feed(ev.CancelArrived(inbox))

    def receive_held_ask(self, ask: HeldAsk) -> None:
        if self.kv_events is not None:
            self.kv_events.asked(ask)

    def receive_keepalive(
        self, region: RegionId, router: RouterId, epoch: int, term: int | None
    ) -> None:
        """`term`: of the lease by which that region owns this replica, if it does."""
        if self.core is not None:
            self._feed(ev.AliveArrived(region, router, epoch, term))

    def answers_to(self, host: SessionHost) -> bool:
        """Whether this replica holds a request for that router or batch runner."""
        if self._receivers[host] > 0:
            return True
        return bool(self._held) and any(to is host for _, to in self._undecided.values())

    def _send(self, to: SessionHost, call: Callable[..., object], *args: Any) -> None:
        self._network.send(self.site, to.site, call, *args)

    def _feed(self, event: ev.AgentEvent) -> None:
        self._scrapes.catch_up()
        self._handle(event, self._queue.now)

    def _handle(self, event: ev.AgentEvent, now: float) -> None:
        core = self.core
        assert core is not None, "a crashed agent receives nothing"
        before = core.outstanding
        for effect in core.handle(event, now):
            self._performers[type(effect)](effect)
        if core.outstanding != before:
            self._world.count_outstanding(core.outstanding - before)
        if core.wake_at < self._tick_at:
            self._tick_at = core.wake_at
            self._queue.at(self._tick_at, self._tick, self._tick_at)

    def _tick(self, at: float) -> None:
        if at == self._tick_at and self.core is not None:
            self._scrapes.catch_up()
            self._tick_at = float("inf")
            self._handle(ev.TimerFired(), self._queue.now)

    def _hold(self, effect: fx.HoldWork) -> None:
        self._held[effect.inbox] = self._queue.now

    def _decided(self, inbox: str) -> tuple[SentRequest, SessionHost]:
        """A request is about to be dispatched or refused."""
        self._held.pop(inbox, None)
        return self._undecided.pop(inbox)

    def _refuse(self, effect: fx.Refuse) -> None:
        _, receiver = self._decided(effect.inbox)
        self._send(receiver, receiver.receive, effect.inbox, effect.message)

    def _start_relay(self, effect: fx.StartRelay) -> None:
        inbox, now = effect.inbox, self._queue.now
        request, receiver = self._decided(inbox)
        self._last_number += 1
        work = effect.work
        running = RunningAnswer(inbox, request, receiver, self._last_number, now, work.offline)
        prefill = work.prefill_tokens or 0
        running.predicted_tokens = max(0, request.node.prompt_tokens - prefill)
        if self.kv_events is not None:
            self.kv_events.submitted(request)
        self._running[inbox] = running
        self._receivers[receiver] += 1
        if self.engine.is_down:
            self._queue.at(now, self._end, inbox, Outcome.ENGINE_LOST, REFUSED_CONNECTION)
            return
        adapter = request.node.adapter
        if adapter and adapter not in self.engine.adapters.paths:
            refused = Refused(Refusal.WRONG_MODEL, self._region, self.name, -1, -1)
            self._queue.at(now, self._refuse_late, inbox, refused)
        else:
            self._submit(running)

    def _submit(self, running: RunningAnswer) -> None:
        inbox, request, now = running.inbox, running.request, self._queue.now
        tokens = request.node.prompt_tokens, request.node.answer.tokens
        try:
            self.engine.submit(SimRequest(running.number, *tokens, request.keys.blocks))
        except NeverFits:
            self._queue.at(now, self._engine_error, inbox, STATUS_TOO_LONG)
        except QueueFull:
            self._queue.at(now, self._engine_error, inbox, STATUS_QUEUE_FULL)
        else:
            self._by_number[running.number] = running
            self._arm_engine()

    def _abort(self, effect: fx.AbortRelay) -> None:
        running = self._running[effect.inbox]
        if self._by_number.pop(running.number, None) is not None:
            self.engine.abort(running.number)
            self._arm_engine()
        if effect.refused is not None and not running.began:
            self._queue.at(self._queue.now, self._refuse_late, effect.inbox, effect.refused)
        else:
            self._queue.at(self._queue.now, self._end, effect.inbox, effect.outcome, effect.detail)

    def _refuse_late(self, inbox: str, refused: Refused) -> None:
        """Refuse an answer of which no frame was sent."""
        running = self._remove(inbox)
        if running is None:
            return
        self._send(running.receiver, running.receiver.receive, inbox, refused)
        self._feed(ev.RelayEnded(inbox=inbox, outcome=Outcome.ENGINE_LOST))

    def _remove(self, inbox: str) -> RunningAnswer | None:
        running = self._running.pop(inbox, None)
        if running is not None:
            self._receivers[running.receiver] -= 1
        return running

    def _load_adapter(self, effect: fx.LoadAdapter) -> None:
        adapters = self._config.adapters
        assert adapters is not None, "its core was given none"
        into = self.engine.begin_load(effect)
        self._queue.after(adapters.load_s, self._loaded, effect, into, adapters.load_s, self._epoch)

    def _loaded(self, effect: fx.LoadAdapter, into: LoadedAdapters, s: float, epoch: int) -> None:
        if epoch == self._epoch and self.core is not None:
            good = self.engine.end_load(effect, into)
            self._feed(ev.AdapterLoadEnded(effect.adapter, good, s))

    def _probed(self, epoch: int) -> None:
        if epoch == self._epoch and self.core is not None:
            self._feed(ev.ProbeEnded(not self.engine.is_stuck))

    def _send_end(self, effect: fx.SendEnd) -> None:
        _, receiver = self._decided(effect.inbox)
        if effect.outcome == Outcome.PREEMPTED:
            self._world.given_back(begun=False)
        self._send(
            receiver, receiver.receive, effect.inbox, end_message(effect.outcome, effect.detail)
        )

    def _publish_held(self, event: HeldDeltaSeen | HeldPartSeen) -> None:
        """What its engine holds, to the routers of its region."""
        for host in self._routers:
            self._network.send_state(self.site, host.site, host.feed, event)

    def _publish(self, heartbeat: Heartbeat) -> None:
        if heartbeat.epoch != self._epoch or self.core is None:
            return
        if self.kv_events is not None:
            heartbeat = replace(heartbeat, held_seq=self.kv_events.seq)
        world, region = self._world, self._region
        here = (*self._routers, *world.leases.adopters_of(region), *world.runners_of(region))
        for host in here:
            self._network.send_state(self.site, host.site, host.receive_heartbeat, heartbeat)

    def _arm_engine(self) -> None:
        self._scrapes.follow()
        wake_at = self.engine.wake_at
        self._wake_number += 1
        if wake_at is not None:
            self._queue.at(wake_at, self._wake, self._wake_number)

    def _wake(self, number: int) -> None:
        if number == self._wake_number:
            self._step()
            self._arm_engine()

    def _step(self) -> None:
        self._scrapes.catch_up()
        for event in self.engine.step():
            if not isinstance(event, PrefillFinished | Finished):
                continue
            running = self._by_number.get(event.request_id)
            if running is None:
                continue  # aborted, after this had happened and before it was read
            if isinstance(event, PrefillFinished):
                running.cached_tokens = event.cached_tokens
                if not running.offline:
                    self._begin(running, OK)
            else:
                self._finished(event.request_id)

    def _begin(self, running: RunningAnswer, status: int) -> None:
        running.began = True
        running.last_message_at = self._queue.now
        is_ok = status == OK
        is_stream = is_ok and not running.offline
        content_type = EVENT_STREAM if is_stream else ""
        head = Head(status, content_type, self.site, self.name)
        self._send(running.receiver, running.receiver.receive_head, running.inbox, head, self)
        self._feed(ev.RelayBegan(running.inbox, is_ok))

    def _finished(self, number: int) -> None:
        running = self._by_number.pop(number)
        node = running.request.node
        usage = TokenUsage(node.prompt_tokens, running.cached_tokens, node.answer.tokens)
        if self.kv_events is not None:
            self.kv_events.answered(running.request)
        if (watch := self._world.watch_cached) is not None:
            watch(node.prompt_tokens, running.predicted_tokens, running.cached_tokens)
        if running.offline:
            self._begin(running, OK)
        self._end(running.inbox, Outcome.DONE, "", usage, streamed=not running.offline)

    def _engine_error(self, inbox: str, status: int) -> None:
        """The engine answers with an HTTP error, which the agent passes on as an answer."""
        running = self._running.get(inbox)
        if running is not None:
            self._begin(running, status)
            self._end(inbox, Outcome.DONE, "", streamed=False)

    def _end(
        self,
        inbox: str,
        outcome: Outcome,
        detail: str,
        usage: TokenUsage = NO_USAGE,
        *,
        streamed: bool = True,
    ) -> None:
        running = self._remove(inbox)
        if running is None:
            return
        self._send(
            running.receiver, running.receiver.receive, inbox, end_message(outcome, detail, usage)
        )
        streamed = running.began and streamed
        if outcome == Outcome.PREEMPTED:
            self._world.given_back(begun=True)
        self._feed(ev.RelayEnded(inbox=inbox, outcome=outcome, usage=usage, streamed=streamed))

    def _on_scrape(self, result: ev.EngineScraped | ev.ScrapeFailed, at: float) -> None:
        if self.engine.has_events:
            self._step()
            self._arm_engine()
        self._handle(result, at)

    def _keep_working(self, epoch: int) -> None:
        """Send each router the inboxes whose answers make progress, once a second."""
        if epoch != self._epoch or self.core is None:
            return
        now = self._queue.now
        progress = due_progress(self._running.values(), now, is_stuck=self.engine.is_stuck)
        for inbox, told_at in self._held.items():
            if now - told_at >= WORKING_S:
                self._held[inbox] = now
                progress.setdefault(self._undecided[inbox][1], []).append(inbox)
        for receiver, inboxes in progress.items():
            self._send(receiver, receiver.receive_progress, inboxes)
        self._queue.after(WORKING_CHECK_S, self._keep_working, epoch)
