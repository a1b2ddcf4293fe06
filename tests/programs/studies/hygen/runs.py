"""One run of a simulated engine with online and offline requests, and what it measured.

Latencies are those of the online requests that came within the run; it goes on, with offline work
as before, until the last of them has ended. Throughput is counted within the run's duration: prompt
tokens when their prefill ends, answer tokens as they come. A time between tokens (TBT) is from one
token of a request to its next, preemptions included.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agents.core.slo_profile import Measure
from agents.sim.engine import EngineSim
from agents.sim.events import Decoded, Finished, PrefillFinished, SimEvent, SimRequest
from mesh.replay.tally import percentile
from tests.programs.studies.hygen.two_phase import TwoPhaseEngine
from tests.programs.studies.hygen.workloads import OFFLINE_IDS, Arrival

BACKLOG = 64  # offline requests that wait at any time, where the supply is without end
ROUNDING_S = 1e-9
LATE_S = 3600.0  # a run that isn't over so long after its duration is overloaded


@dataclass(frozen=True, slots=True)
class Supply:
    """Offline requests: as many as the engine takes, or at a fixed rate."""

    requests: Iterator[SimRequest]
    rate_per_s: float = math.inf
    backlog: int = BACKLOG


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run measured; rates are per second of its duration."""

    latency: Mapping[Measure, float]
    online_tokens_s: float
    offline_tokens_s: float
    offline_requests_s: float
    offline_waits_s: Mapping[int, float]  # until the first token, or the run's end
    hit_ratio: float
    preemptions: int

    @property
    def tokens_s(self) -> float:
        """Of both."""
        return self.online_tokens_s + self.offline_tokens_s

    def wait_max_s(self, offline: Container[int] | None = None) -> float:
        """The longest wait of an offline request, or of one among these."""
        waits = self.offline_waits_s.items()
        return max((w for key, w in waits if offline is None or key in offline), default=0.0)

    def wait_mean_s(self) -> float:
        """The mean wait of offline requests."""
        return math.fsum(self.offline_waits_s.values()) / max(len(self.offline_waits_s), 1)


@dataclass(slots=True)
class Meters:
    """Follows an engine's events."""

    duration_s: float
    submitted_s: dict[int, float] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    last_token_s: dict[int, float] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[tuple[float, int]] = field(default_factory=list)
    waits_s: dict[int, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    ended: list[int] = field(default_factory=lambda: [0, 0])
    online_open: int = 0

    def submit(self, request: SimRequest, now: float) -> None:
        """Note a request that enters the engine."""
        self.submitted_s[request.id] = now
        self.prompts[request.id] = request.prompt_tokens
        if request.id < OFFLINE_IDS:
            self.online_open += 1
        else:
            self.waits_s[request.id] = math.inf

    def see(self, events: Sequence[SimEvent]) -> None:
        """Count what happened."""
        for event in events:
            if isinstance(event, PrefillFinished):
                self._first_token(event)
            elif isinstance(event, Decoded):
                self._decoded(event)
            elif isinstance(event, Finished):
                offline = event.request_id >= OFFLINE_IDS
                self.online_open -= not offline
                self.ended[offline] += event.at <= self.duration_s
                self.last_token_s.pop(event.request_id, None)

    def _first_token(self, event: PrefillFinished) -> None:
        key = event.request_id
        waited_s = event.at - self.submitted_s[key]
        if key < OFFLINE_IDS:
            self.ttft_s.append(waited_s)
            self.last_token_s[key] = event.at
        else:
            self.waits_s[key] = waited_s
        if event.at <= self.duration_s:
            self.tokens[key >= OFFLINE_IDS] += self.prompts[key] + 1

    def _decoded(self, event: Decoded) -> None:
        online = [key for key in event.request_ids if key < OFFLINE_IDS]
        if event.at <= self.duration_s:
            self.tokens[0] += event.tokens * len(online)
            self.tokens[1] += event.tokens * (len(event.request_ids) - len(online))
        began_s = event.at - event.tokens * event.gap_s
        steady = event.tokens * len(online)
        for key in online:
            if began_s - self.last_token_s[key] > ROUNDING_S:  # it was preempted
                self.gaps_s.append((event.at - self.last_token_s[key], 1))
                steady -= 1
            self.last_token_s[key] = event.at
        if steady:
            self.gaps_s.append((event.gap_s, steady))

    def outcome(self, engine: EngineSim, now: float) -> Outcome:
        """What was seen, at the end of the run."""
        waits_s = {
            key: min(waited, self.duration_s - self.submitted_s[key])
            for key, waited in self.waits_s.items()
            if self.submitted_s[key] < self.duration_s
        }
        stats = engine.stats(now)
        return Outcome(
            latency=self._latency(),
            online_tokens_s=self.tokens[0] / self.duration_s,
            offline_tokens_s=self.tokens[1] / self.duration_s,
            offline_requests_s=self.ended[1] / self.duration_s,
            offline_waits_s=waits_s,
            hit_ratio=stats.hit_ratio,
            preemptions=stats.preemptions,
        )

    def _latency(self) -> dict[Measure, float]:
        if not self.ttft_s or not self.gaps_s:
            return {}
        count = sum(weight for _, weight in self.gaps_s)
        return {
            Measure.TTFT_MEAN: math.fsum(self.ttft_s) / len(self.ttft_s),
            Measure.TTFT_P99: percentile(sorted(self.ttft_s), 0.99),
            Measure.TBT_MEAN: math.fsum(gap * weight for gap, weight in self.gaps_s) / count,
            Measure.TBT_P99: _weighted(sorted(self.gaps_s), 0.99 * count),
        }


class Player:
    """An engine, the requests that come, and the meters; time never runs backwards."""

    def __init__(self, engine: EngineSim, supply: Supply | None, duration_s: float) -> None:
        self.engine = engine
        self.meters = Meters(duration_s)
        self.now = 0.0
        self._supply = supply
        endless = supply is None or supply.rate_per_s == math.inf
        self._offline_due_s = math.inf if endless else 0.0

    def submit(self, request: SimRequest) -> None:
        """A request comes now."""
        self.meters.submit(request, self.now)
        self.engine.submit(request, self.now)

    def advance(self, until_s: float) -> None:
        """Let the engine run up to a time, and offline requests come."""
        while True:
            self._refill()
            wake_at = self.engine.wake_at
            wake_s = math.inf if wake_at is None else wake_at
            if min(wake_s, self._offline_due_s) > until_s:
                break
            if self._offline_due_s <= wake_s:
                self._offline_comes()
            else:
                self.now = max(self.now, wake_s)
                self.meters.see(self.engine.step(self.now).events)
        self.now = until_s

    def _refill(self) -> None:
        supply, engine = self._supply, self.engine
        if supply is None or supply.rate_per_s < math.inf:
            return
        assert isinstance(engine, TwoPhaseEngine)
        while engine.offline_waiting < supply.backlog:
            self.submit(next(supply.requests))

    def _offline_comes(self) -> None:
        assert self._supply is not None
        self.now = max(self.now, self._offline_due_s)
        self._offline_due_s += 1.0 / self._supply.rate_per_s
        self.submit(next(self._supply.requests))


def play(
    engine: EngineSim, online: Sequence[Arrival], supply: Supply | None, duration_s: float
) -> Outcome:
    """Play a run to the end of its last online request."""
    player = Player(engine, supply, duration_s)
    for arrival in online:
        player.advance(arrival.at_s)
        player.submit(arrival.request)
    player.advance(duration_s)
    while player.meters.online_open and player.now < duration_s + LATE_S:
        player.advance(player.now + 1.0)
    return player.meters.outcome(engine, player.now)


def _weighted(ordered: Sequence[tuple[float, int]], rank: float) -> float:
    """The value below which `rank` of the weights lie."""
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= rank:
            return value
    return ordered[-1][0]
