"""The same runs with HyGen at the agent: AgentCore and its admission before an ordinary engine.

The engine is the simulator's own, without any notion of offline work. An agent decides before it,
as it would live: it scrapes the engine every 50 ms, publishes heartbeats, and takes work messages.
Online requests come from a router, documents from a batch runner that keeps their order, hands out
what the last heartbeat had room for, and takes back what was preempted. Time is virtual, and
messages take none.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agents.core import effects as fx
from agents.core import events as ev
from agents.core.agent import AgentCore
from agents.core.events import TokenUsage
from agents.core.latency_predictor import LatencyPredictor
from agents.core.offline_profile import OfflineProfile
from agents.core.replica_config import ReplicaConfig
from agents.core.slo_profile import Measure
from agents.sim.engine import EngineSim
from agents.sim.events import Decoded, Finished, PrefillFinished, SimEvent, SimRequest
from agents.sim.profiles import Profile
from schemas import subjects
from schemas.exchange import (
    H_DEADLINE_MS,
    H_MAY_QUEUE,
    H_MODEL,
    H_OFFLINE,
    H_PATH,
    H_PREFILL_TOKENS,
    Outcome,
)
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat
from tests.programs.studies.hygen.runs import LATE_S, Meters
from tests.programs.studies.hygen.runs import Outcome as RunOutcome
from tests.programs.studies.hygen.workloads import OFFLINE_IDS, Arrival
from tests.support.profiled import coefficients_of

REGION, REPLICA, MODEL = RegionId("us"), ReplicaId("g0"), ModelId("m")
ROUTER, RUNNER = RouterId("r1"), RouterId("batch-0")
SCRAPE_EVERY_S = 0.05
HEARTBEAT_S = 0.1
ALIVE_EVERY_S = 1.0
OUTSTANDING_MAX = 4096
KNOWN = {H_MODEL: MODEL, H_PATH: "/v1/completions", H_DEADLINE_MS: "3600000"}


def offline_profile(
    profile: Profile, predictor: LatencyPredictor, budget_s: float, burst_s: float
) -> OfflineProfile:
    """As `mesh-agent profile` would write it for that engine."""
    return OfflineProfile(
        engine="vllm",
        model=MODEL,
        measured_at=0,
        **coefficients_of(predictor),
        latency_budget_s=budget_s,
        burst_s=burst_s,
        kv_share=0.9,  # as much as the scheduler inside the engine may take
        limits_s={Measure.TBT_MEAN: budget_s},
        chunk_tokens=profile.batch_tokens,
        prefill_tokens_max=2 * profile.batch_tokens,
    )


class AgentPlayer:
    """An agent beside an engine, requests that come, and the meters; time never runs backwards."""

    def __init__(
        self,
        engine: EngineSim,
        offline: OfflineProfile,
        supply: Iterator[SimRequest],
        duration_s: float,
    ) -> None:
        self.engine = engine
        self.meters = Meters(duration_s)
        self.now = 0.0
        self.core = AgentCore(
            ReplicaConfig(
                region=REGION,
                replica=REPLICA,
                epoch=1,
                engine="vllm",
                outstanding_max=OUTSTANDING_MAX,
                heartbeat_s=HEARTBEAT_S,
                batch_max=engine.profile.max_seqs,
                offline=offline,
            )
        )
        self._supply = supply
        self._back: list[int] = []  # documents that were given back, by number
        self._asked: dict[str, SimRequest] = {}
        self._inboxes: dict[int, str] = {}  # of requests in the engine
        self._numbers = 0
        self._cached: dict[int, int] = {}
        self._known: dict[int, SimRequest] = {}
        self._computed: Counter[int] = Counter()
        self._due: deque[ev.AgentEvent] = deque()
        self._scrape_s = self._alive_s = 0.0
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.StartRelay: self._start,
            fx.AbortRelay: self._abort,
            fx.SendEnd: lambda effect: self._given_back(effect.inbox),
            fx.Refuse: lambda effect: self._given_back(effect.inbox),
            fx.PublishHeartbeat: lambda effect: self._beat(effect.heartbeat),
        }

    def submit(self, request: SimRequest) -> None:
        """An online request comes now."""
        self.meters.submit(request, self.now)
        self._send(request, ROUTER, {H_MAY_QUEUE: "1"})

    def advance(self, until_s: float) -> None:
        """Let the engine and the agent run up to a time."""
        while True:
            wake_at = self.engine.wake_at
            engine_s = math.inf if wake_at is None else wake_at
            next_s = min(engine_s, self.core.wake_at, self._scrape_s, self._alive_s)
            if next_s > until_s:
                break
            self.now = max(self.now, next_s)
            if engine_s <= self.now:
                self._see(self.engine.step(self.now).events)
            elif self._alive_s <= self.now:
                self._alive_s = self.now + ALIVE_EVERY_S
                for router in (ROUTER, RUNNER):
                    self._feed(ev.AliveArrived(REGION, router, 1))
            elif self._scrape_s <= self.now:
                self._scrape_s = self.now + SCRAPE_EVERY_S
                self._feed(ev.EngineScraped(self.now, self._reading(), (MODEL,)))
            else:
                self._feed(ev.TimerFired())
        self.now = until_s

    def _see(self, events: Sequence[SimEvent]) -> None:
        self.meters.see(events)
        for event in events:
            if event.at <= self.meters.duration_s:
                self._count(event)
        for event in events:
            if isinstance(event, PrefillFinished):
                if event.request_id not in self._inboxes:
                    continue  # an event before this one made the agent abort it
                self._cached[event.request_id] = event.cached_tokens
                self._feed(ev.RelayBegan(self._inboxes[event.request_id]))
            elif isinstance(event, Finished) and event.request_id in self._inboxes:
                self._finished(event.request_id)

    def _count(self, event: SimEvent) -> None:
        """Tokens of documents that have not ended: they are lost if one is aborted."""
        if isinstance(event, Decoded):
            for number in event.request_ids:
                if number >= OFFLINE_IDS:
                    self._computed[number] += event.tokens
        elif isinstance(event, PrefillFinished) and event.request_id >= OFFLINE_IDS:
            self._computed[event.request_id] += self._known[event.request_id].prompt_tokens + 1

    def _finished(self, number: int) -> None:
        inbox = self._inboxes.pop(number)
        request = self._asked.pop(inbox)
        self._known.pop(number, None)
        self._computed.pop(number, None)
        cached = self._cached.pop(number, 0)
        usage = TokenUsage(request.prompt_tokens, cached, request.output_tokens)
        self._feed(ev.RelayEnded(inbox=inbox, outcome=Outcome.DONE, usage=usage, streamed=True))

    def _reading(self) -> ev.EngineReading:
        stats = self.engine.stats(self.now)
        return ev.EngineReading(
            waiting=stats.waiting,
            running=stats.running,
            kv_used_ratio=stats.kv_utilization,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            progress=(stats.prompt_tokens, stats.generated_tokens, stats.kv_utilization),
        )

    def _send(self, request: SimRequest, router: RouterId, headers: dict[str, str]) -> None:
        self._numbers += 1
        inbox = subjects.inbox(REGION, router, self._numbers)
        self._asked[inbox] = request
        tokens = {H_PREFILL_TOKENS: str(request.prompt_tokens)}
        body = b'{"max_tokens":%d}' % request.output_tokens
        self._feed(ev.WorkArrived(inbox, {**KNOWN, **tokens, **headers}, body))

    def _feed(self, event: ev.AgentEvent) -> None:
        self._due.append(event)
        if len(self._due) > 1:
            return  # it was fed by an effect of an event that is being handled
        while self._due:
            for effect in self.core.handle(self._due[0], self.now):
                if (perform := self._performers.get(type(effect))) is not None:
                    perform(effect)
            self._due.popleft()

    def _start(self, effect: fx.StartRelay) -> None:
        request = self._asked[effect.inbox]
        self._inboxes[request.id] = effect.inbox
        self.engine.submit(request, self.now)

    def _abort(self, effect: fx.AbortRelay) -> None:
        number = self._asked[effect.inbox].id
        self._see(self.engine.step(self.now).events)
        if number in self._inboxes:
            self.engine.abort(number, self.now)
            del self._inboxes[number]
            self.meters.tokens[1] -= self._computed.pop(number, 0)
            self._given_back(effect.inbox)
        self._feed(ev.RelayEnded(inbox=effect.inbox, outcome=effect.outcome))

    def _given_back(self, inbox: str) -> None:
        heapq.heappush(self._back, self._asked.pop(inbox).id)

    def _beat(self, heartbeat: Heartbeat) -> None:
        """The runner hands out documents in their order while there is room for them."""
        room = heartbeat.offline_room_tokens or 0
        while room > 0:
            request = self._next_document()
            room -= request.total_tokens
            if room < 0:
                heapq.heappush(self._back, request.id)
                break
            self._send(request, RUNNER, {H_OFFLINE: "1"})

    def _next_document(self) -> SimRequest:
        if self._back:
            return self._known[heapq.heappop(self._back)]
        request = next(self._supply)
        self._known[request.id] = request
        self.meters.submit(request, self.now)
        return request


def play_at_agent(
    engine: EngineSim,
    offline: OfflineProfile,
    online: Sequence[Arrival],
    supply: Iterator[SimRequest],
    duration_s: float,
) -> RunOutcome:
    """Play a run to the end of its last online request."""
    player = AgentPlayer(engine, offline, supply, duration_s)
    for arrival in online:
        player.advance(arrival.at_s)
        player.submit(arrival.request)
    player.advance(duration_s)
    while player.meters.online_open and player.now < duration_s + LATE_S:
        player.advance(player.now + 1.0)
    return player.meters.outcome(engine, player.now)
