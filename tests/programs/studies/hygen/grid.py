"""The paper's grid: four measures, five tolerances; profiled on one half, judged on the other.

Runs are kept by their setting, and searches share a fixed set of levels, so that the twenty cells
cost some dozens of runs. A trial's latencies are relative to the run of the same requests without
offline work, and the worst of three stretches of the first half of the trace: a budget that is just
right for one is too large for another, whose 99th percentile alone is lower.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from agents.core.latency_predictor import LatencyPredictor
from agents.core.slo_profile import Limits, Measure, keeps, levels, limits_of
from agents.sim.engine import EngineSim
from agents.sim.profiles import A100_MISTRAL, Profile
from agents.sim.profiling_run import profiling_run
from mesh.core.offline.offline_queue import OfflineQueue
from mesh.replay.trace import Trace
from tests.programs.studies.hygen.admission import offline_profile, play_at_agent
from tests.programs.studies.hygen.runs import Outcome, Supply, play
from tests.programs.studies.hygen.two_phase import TwoPhaseEngine
from tests.programs.studies.hygen.workloads import (
    Arrival,
    Stretch,
    TraceKind,
    documents,
    online,
    recorded,
)
from tests.support.profiled import largest_knob

# Sarathi-Serve's chunk, on the A100's times. Nothing is added before the scheduler sees a request:
# a constant in every TTFT would make a tolerance of it easy to keep.
PROFILE = replace(A100_MISTRAL, batch_tokens=512, arrival_s=0.0)
TOLERANCES = (0.05, 0.1, 0.2, 0.3, 0.5)
PROFILED = (0, 1, 2)  # stretches of the first half of the trace
JUDGED = 3  # the beginning of its second half
# What of a tolerance is used when a budget is profiled: no two parts of a trace are alike.
HEADROOM = 0.85
BUDGETS_S = levels(0.0108, 0.120, 65)  # a decode iteration of the A100 to twice a full chunk
RATES_PER_S = levels(0.005, 1.28, 65)  # of HyGen*: offline requests
AGENT_BUDGETS_S = BUDGETS_S[::2]
# At the agent a budget limits each iteration (0), or is a mean: the profiled stretches decide.
BURSTS_S = (0.0, 2.0)


Run = Callable[[float, int], Outcome]  # of a knob and a stretch


def queue(utility_ratio: float = 1.0) -> OfflineQueue:
    """An offline queue with dice of its own."""
    return OfflineQueue(random.Random(1), utility_ratio=utility_ratio)


@dataclass(frozen=True, slots=True)
class Setting:
    """A workload: requests of a kind at a rate, for a time where profiled and where judged."""

    kind: TraceKind
    rate_per_s: float
    profiled_s: float
    judged_s: float

    def stretch(self, place: int) -> Stretch:
        """Where in the trace a stretch is."""
        if place == JUDGED:
            return Stretch(self.kind.span_s / 2, self.judged_s)
        return Stretch(place * self.kind.span_s / 2 / len(PROFILED), self.profiled_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """Objectives on the judged stretch. `knob` is None where none kept them when profiled.

    `profiled_tokens_s`: total throughput where it was profiled, summed over the stretches.
    """

    limits: Limits  # of relative latency
    knob: float | None
    profiled: Mapping[Measure, float]
    relative: Mapping[Measure, float]
    outcome: Outcome
    profiled_tokens_s: float
    burst_s: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the online requests kept the objective."""
        return keeps(self.relative, self.limits)


@dataclass(slots=True)
class Bench:
    """The runs of one workload."""

    setting: Setting
    trace: Trace | None
    profile: Profile = PROFILE
    predictor: LatencyPredictor = field(
        default_factory=lambda: LatencyPredictor(profiling_run(PROFILE))
    )
    _arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    _outcomes: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def arrivals(self, place: int) -> list[Arrival]:
        """The online requests of a stretch."""
        if place not in self._arrivals:
            stretch = self.setting.stretch(place)
            self._arrivals[place] = online(
                self.setting.kind, self.trace, stretch, self.setting.rate_per_s
            )
        return self._arrivals[place]

    def alone(self, place: int) -> Outcome:
        """Online requests only: Sarathi."""
        return self._played(("alone", place), EngineSim(self.profile), None, place)

    def sarathi_plus(self, place: int) -> Outcome:
        """Online first, and offline work in every token that is left."""
        engine = TwoPhaseEngine(self.profile, queue())
        return self._played(("sarathi++", place), engine, Supply(documents(place)), place)

    def hygen(self, budget_s: float, place: int) -> Outcome:
        """Two phases within a budget, by the predictor as the profiling run trained it."""
        engine = TwoPhaseEngine(self.profile, queue(), predictor=self.predictor, budget_s=budget_s)
        return self._played(("hygen", budget_s, place), engine, Supply(documents(place)), place)

    def hygen_star(self, rate_per_s: float, place: int) -> Outcome:
        """Offline requests at a fixed rate, without a budget."""
        engine = TwoPhaseEngine(self.profile, queue())
        supply = Supply(documents(place), rate_per_s)
        return self._played(("hygen*", rate_per_s, place), engine, supply, place)

    def at_agent(self, budget_s: float, place: int, *, burst_s: float) -> Outcome:
        """An agent's admission before an engine that knows nothing of offline work."""
        key = ("agent", budget_s, burst_s, place)
        if key not in self._outcomes:
            self._outcomes[key] = play_at_agent(
                EngineSim(self.profile),
                offline_profile(self.profile, self.predictor, budget_s, burst_s),
                self.arrivals(place),
                documents(place),
                self.setting.stretch(place).duration_s,
            )
        return self._outcomes[key]

    def pure_offline(self) -> Outcome:
        """No online request at all."""
        key = ("pure",)
        if key not in self._outcomes:
            engine = TwoPhaseEngine(self.profile, queue())
            supply = Supply(documents(JUDGED))
            self._outcomes[key] = play(engine, [], supply, self.setting.judged_s)
        return self._outcomes[key]

    def relative(self, outcome: Outcome, place: int) -> dict[Measure, float]:
        """Latencies over those of the same requests alone."""
        alone = self.alone(place).latency
        return {measure: outcome.latency[measure] / alone[measure] for measure in alone}

    def cell(self, tolerances: Mapping[Measure, float]) -> Cell:
        """HyGen with the budget profiled for these tolerances."""
        return self._cell(self.hygen, BUDGETS_S, tolerances)

    def star_cell(self, tolerances: Mapping[Measure, float]) -> Cell:
        """HyGen* with the rate profiled for these tolerances."""
        return self._cell(self.hygen_star, RATES_PER_S, tolerances)

    def agent_cell(self, tolerances: Mapping[Measure, float]) -> Cell:
        """The same at the agent, with the meaning of the budget that let in more when profiled."""
        found = []
        for burst_s in BURSTS_S:
            run = partial(self.at_agent, burst_s=burst_s)
            cell = self._cell(run, AGENT_BUDGETS_S, tolerances)
            found.append(replace(cell, burst_s=burst_s))
        return max(found, key=lambda cell: cell.profiled_tokens_s)

    def _cell(
        self, run: Run, knobs: tuple[float, ...], tolerances: Mapping[Measure, float]
    ) -> Cell:
        alone = dict.fromkeys(Measure, 1.0)
        aimed_at = limits_of(alone, {each: HEADROOM * t for each, t in tolerances.items()})
        found = largest_knob(lambda knob: self._worst(run, knob, aimed_at), aimed_at, knobs).knob
        outcomes = [self.alone(p) if found is None else run(found, p) for p in (*PROFILED, JUDGED)]
        return Cell(
            limits_of(alone, tolerances),
            found,
            alone if found is None else self._worst(run, found, aimed_at),
            self.relative(outcomes[-1], JUDGED),
            outcomes[-1],
            sum(outcome.tokens_s for outcome in outcomes[:-1]),
        )

    def _worst(self, run: Run, knob: float, limits: Limits) -> dict[Measure, float]:
        """Of the profiled stretches, up to the first that breaks a limit."""
        worst = dict.fromkeys(Measure, 0.0)
        for place in PROFILED:
            seen = self.relative(run(knob, place), place)
            worst = {measure: max(worst[measure], seen[measure]) for measure in seen}
            if not keeps(seen, limits):
                break
        return worst

    def _played(
        self, key: tuple[object, ...], engine: EngineSim, supply: Supply | None, place: int
    ) -> Outcome:
        if key not in self._outcomes:
            duration_s = self.setting.stretch(place).duration_s
            self._outcomes[key] = play(engine, self.arrivals(place), supply, duration_s)
        return self._outcomes[key]


def bench(setting: Setting, traces: Path | None) -> Bench:
    """The runs of a workload, recorded where the folder has it, else generated."""
    return Bench(setting, recorded(setting.kind, traces))
