"""A whole profiling run: play without offline work, measure, then look for the budget.

About a quarter of the time is for the measurement. The rest is divided among the run without
offline work and those of the search: each plays the same arrivals and lengths, with new prompts.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agents.core.engine_curves import EngineCurves
from agents.core.latency_predictor import BatchLoad, IterationTimes
from agents.core.offline_admission import OfflineAdmission
from agents.core.offline_profile import OfflineProfile, ProfileTrial
from agents.core.slo_profile import Limits, Measure, SloProfile, keeps, levels, limits_of, search
from agents.profiler import curves
from agents.profiler.engine import ProfiledEngine
from agents.profiler.load import Lengths, OnlineRequest, poisson
from agents.profiler.measurement import Measured, Measurement
from agents.profiler.stream import EngineUnusable
from agents.profiler.trial import Trial, TrialResult

MEASURING_SHARE, MEASURING_S_MAX = 0.25, 120.0
CALIBRATION_S = 60.0
LEVELS = 31  # five runs of the search: 2⁵ - 1
RUNS = 6
PLAYING_SHARE = 0.85  # of a run's time: the last answers come after it
WIDEST_MIN = 1.5  # the largest budget is that many times the smallest, at least
FAILED_SHARE_MAX = 0.01  # of the online requests of the run without offline work

Say = Callable[[str], None]


class ObjectiveNotKept(Exception):
    """No budget keeps the objectives; the message says which one is broken, and by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to profile for. Give `rate_per_s` or a `trace`."""

    duration_s: float
    tolerances: Mapping[Measure, float]
    limits: Limits
    rate_per_s: float | None = None
    trace: Sequence[OnlineRequest] = ()
    online: Lengths
    offline: Lengths
    chunk_tokens: int | None = None
    burst_s: float = 0.0
    offline_priority: int | None = None
    seed: int = 0
    calibrates: bool = False


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """One run of the search."""

    budget_s: float
    result: TrialResult
    kept: bool


@dataclass(frozen=True, slots=True)
class Found:
    """`profile` is None if no budget keeps the objectives."""

    measured: Measured
    alone: TrialResult
    limits: Limits
    trials: tuple[BudgetTrial, ...]
    profile: OfflineProfile | None


class ProfilingRun:
    """Run it once, on an engine that is connected."""

    def __init__(self, engine: ProfiledEngine, plan: Plan, dice: random.Random, say: Say) -> None:
        self._engine = engine
        self._plan = plan
        self._dice = dice
        self._say = say
        self._measuring_s = min(MEASURING_SHARE * plan.duration_s, MEASURING_S_MAX)
        self._trial_s = PLAYING_SHARE * (plan.duration_s - self._measuring_s) / RUNS
        self._online = self._arrivals()

    async def run(self) -> Found:
        """Raises EngineUnusable and ObjectiveNotKept."""
        plan = self._plan
        alone = await self._alone()
        limits = dict(plan.limits)
        if plan.tolerances:
            limits |= limits_of(alone.latency_s, plan.tolerances)
        if not keeps(alone.latency_s, limits):
            broken = shortfall(alone.latency_s, limits)
            raise ObjectiveNotKept(f"even without offline work {broken}")
        measurement = Measurement(self._engine, self._measuring_s, self._dice, plan.chunk_tokens)
        measured = await measurement.run(self._say)
        self._say(describe(measured))
        calibrated = await self._curves(measured.chunk_tokens)
        values = self._budgets(measured)
        found, trials = await self._search(limits, values, self._draft(measured, limits))
        if found.knob is None:
            return Found(measured, alone, limits, trials, None)
        profile = replace(
            self._draft(measured, limits),
            latency_budget_s=found.knob,
            measured_at=int(time.time()),
            trials=tuple(map(_as_written, trials)),
            curves=calibrated,
        )
        return Found(measured, alone, limits, trials, profile)

    async def _curves(self, chunk_tokens: int) -> EngineCurves | None:
        if not self._plan.calibrates:
            return None
        seconds = calibration_s(self._plan.duration_s)
        return await curves.measured(self._engine, seconds, chunk_tokens, self._say)

    def _arrivals(self) -> Sequence[OnlineRequest]:
        plan, context = self._plan, self._engine.context_tokens
        if plan.rate_per_s is not None:
            dice = random.Random(plan.seed)
            found = poisson(dice, plan.rate_per_s, self._trial_s, plan.online, context)
        else:
            in_time = [request for request in plan.trace if request.at_s < self._trial_s]
            found = [r for r in in_time if r.prompt_tokens + r.output_tokens <= context]
            if len(found) < len(in_time):
                self._say(
                    f"{len(in_time) - len(found)} of {len(in_time)} requests of the trace are "
                    f"longer than the engine's context of {context} tokens: they are left out"
                )
        if not found:
            raise EngineUnusable(
                f"no online request comes in the {self._trial_s:.0f} s of a run: "
                "raise --duration-s or --online-rps, or give another --trace"
            )
        self._say(f"{len(found)} online requests in {self._trial_s:.0f} s, in each of {RUNS} runs")
        return found

    async def _alone(self) -> TrialResult:
        self._say("online requests without offline work")
        alone = await self._play(None)
        if alone.failed > FAILED_SHARE_MAX * alone.online:
            raise EngineUnusable(
                f"{alone.failed} of {alone.online} online requests failed: {alone.problem}"
            )
        if alone.unanswered:
            raise EngineUnusable(
                f"{alone.unanswered} of {alone.online} online requests had no end in time, without "
                "any offline work: the engine can't serve that online load, lower it"
            )
        return alone

    async def _search(
        self, limits: Limits, values: tuple[float, ...], draft: OfflineProfile
    ) -> tuple[SloProfile, tuple[BudgetTrial, ...]]:
        trials: list[BudgetTrial] = []
        steps = search(limits, values)
        try:
            budget_s = next(steps)
            while True:
                self._say(f"offline work with a budget of {budget_s * 1000:.1f} ms")
                result = await self._play(replace(draft, latency_budget_s=budget_s))
                latency = {} if result.failed or result.unanswered else result.latency_s
                trials.append(BudgetTrial(budget_s, result, keeps(latency, limits)))
                budget_s = steps.send(latency)
        except StopIteration as end:
            found: SloProfile = end.value
        return found, tuple(trials)

    async def _play(self, profile: OfflineProfile | None) -> TrialResult:
        admission = None if profile is None else OfflineAdmission(profile, refreshes=False)
        plan = self._plan
        trial = Trial(
            self._engine, self._online, plan.offline, admission, self._dice, plan.offline_priority
        )
        return await trial.run()

    def _draft(self, measured: Measured, limits: Limits) -> OfflineProfile:
        """The profile without its budget."""
        computing, waiting = measured.predictor.coefficients
        return OfflineProfile(
            engine=self._engine.kind,
            model=self._engine.model,
            measured_at=0,
            computing=computing,
            waiting=waiting,
            latency_budget_s=1.0,
            burst_s=self._plan.burst_s,
            limits_s=dict(limits),
            chunk_tokens=measured.chunk_tokens,
            prefill_tokens_max=measured.chunk_tokens,
            predictor_error=measured.error,
        )

    def _budgets(self, measured: Measured) -> tuple[float, ...]:
        """From one online and one offline request that decode, to the fullest iteration."""
        plan, times = self._plan, measured.predictor
        online = plan.online.prompt_tokens + plan.online.output_tokens
        offline = plan.offline.prompt_tokens + plan.offline.output_tokens
        least_s = times.predict_s(BatchLoad().with_decode(online).with_decode(offline))
        return levels(
            least_s,
            max(WIDEST_MIN * least_s, self._fullest_s(times, measured, max(online, offline))),
            LEVELS,
        )

    def _fullest_s(self, times: IterationTimes, measured: Measured, context: int) -> float:
        decodes = self._engine.batch_max or measured.decodes_max
        load = BatchLoad(0, decodes * context, 0, decodes, 0)
        return times.predict_s(load.with_prefill(measured.chunk_tokens, context))


def calibration_s(duration_s: float) -> float:
    """Seconds for an engine's curves, in a run of so many; they come on top of it."""
    return min(CALIBRATION_S, duration_s)


def shortfall(latency_s: Mapping[Measure, float], limits: Limits) -> str:
    """Which limits a run broke, for people."""
    broken = []
    for measure, limit_s in limits.items():
        seen_s = latency_s.get(measure)
        if seen_s is None:
            broken.append(f"{measure} can't be measured: no answer had two tokens")
        elif seen_s > limit_s:
            broken.append(f"{measure} is {seen_s * 1000:.1f} ms, its limit {limit_s * 1000:.1f} ms")
    return "; ".join(broken) or "online requests failed"


def describe(measured: Measured) -> str:
    """What the measurement found, in a line."""
    error = f"mean error of the prediction: {measured.error:.1%}"
    return (
        f"{measured.samples} iterations timed in {measured.seconds:.0f} s, up to "
        f"{measured.decodes_max} requests at once, chunks of {measured.chunk_tokens} prompt "
        f"tokens; {error}, on {measured.held_out} iterations that the fit had not"
    )


def _as_written(trial: BudgetTrial) -> ProfileTrial:
    return ProfileTrial(
        budget_s=trial.budget_s,
        latency_s=dict(trial.result.latency_s),
        kept=trial.kept,
        offline_tokens_per_s=trial.result.offline_tokens_per_s,
    )
