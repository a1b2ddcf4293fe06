"""The runs of `make study-offline`: a compressed day of online load, and batch jobs beside it.

What is scaled: the hours alone. A day of 24 hours takes `day_s`, so the online rate follows its
curve 480 times as fast in three minutes; requests, answers, iterations, heartbeats and round trips
keep their own durations. A chat's answer takes about 4 s of these engines, half an hour of that
day: the load changes little while a request runs, as in a real day. Completion windows are scaled
with the hours. The runners' forecast knows hours of the clock and not of that day, so it has no say
here: lines go where there is room now.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from agents.sim.profiles import PROFILES
from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.offline.config import NONE, OfflineConfig
from mesh.sim.offline.jobs import OfflineSpec, SimJob, make_job
from mesh.sim.workload import Workload
from mesh.sim.workloads import make
from mesh.sim.workloads.capacity import speed_for_load
from mesh.sim.workloads.content import seeded
from mesh.sim.workloads.daily_load import CHAT_SWING, Day, offsets_of
from mesh.sim.world import run
from schemas.ids import RegionId

# In chunks of 2,048 tokens: one of 8,192 would keep online requests waiting for 240 ms.
ENGINE = replace(PROFILES["h100-llama3.1-8b"], batch_tokens=2048)
# An iteration without offline work takes 7 ms and decodes 25 chats in 8: what is left is taken.
BUDGET_S = 0.009
REGIONS = tuple(map(RegionId, ("us", "eu", "ap")))
CLIENTS = dict.fromkeys(REGIONS, 40)
LOAD = 0.3  # of the fleet's capacity, over the day
RATE_GUESS_PER_S = 5.0
# Lines like those of an evaluation: a few shots that many questions share.
PROMPT_TOKENS, SHARED_TOKENS, ANSWER_TOKENS = 1000, 880, 100
LINES_PER_GROUP = 20
LINES_PER_BACKLOG_JOB, LINES_PER_OFFICE_JOB = 2000, 200

# Where jobs come from.
EVEN, ONE, OFFICE = "every region alike", "one region", "office hours"
BACKLOG_WINDOW_S = 30 * 86_400.0  # no line is in a hurry
BACKLOG_LINES_PER_S = 20.0  # and replica: more than can be done
OFFICE_LINES_PER_S = 6.0  # and replica: about half of that
OFFICE_WINDOW_H = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One run. `by_prefix`: lines that share a beginning go to one replica."""

    origin: str
    scope: str
    seed: int
    day_s: float
    replicas: int  # of each region
    by_prefix: bool = True
    budget_s: float = BUDGET_S
    burst_s: float = 0.0

    @property
    def what(self) -> tuple[str, str, bool]:
        """Without the seed."""
        return self.origin, self.scope, self.by_prefix


@dataclass(frozen=True, slots=True)
class Played:
    """What one run measured."""

    offline_per_gpu_hour: float
    ttft_p50_s: float
    ttft_p99_s: float
    control_bytes_per_s: float  # of offline work, over all links
    cached_share: float  # of offline prompts' tokens
    answered: int
    expired: int
    preempted: int
    given_back: int
    elsewhere: int
    by_region: dict[str, int]


def online(seed: int, day_s: float, replicas: int) -> Workload:
    """A day of chat, each region by its own clock."""
    rate_per_s = RATE_GUESS_PER_S * _speed(day_s, replicas)
    return _diurnal(seed, day_s, rate_per_s)


def _diurnal(seed: int, day_s: float, rate_per_s: float) -> Workload:
    return make("diurnal", clients=CLIENTS, seed=seed, duration_s=day_s, rate_per_s=rate_per_s)


def _speed(day_s: float, replicas: int) -> float:
    total = replicas * len(REGIONS)
    return speed_for_load(_diurnal(0, day_s, RATE_GUESS_PER_S), ENGINE, total, LOAD)


def jobs(play: Play) -> tuple[SimJob, ...]:
    """The batch jobs of one run."""
    total = play.replicas * len(REGIONS)
    if play.origin == OFFICE:
        return tuple(_office_jobs(play, total))
    lines = math.ceil(BACKLOG_LINES_PER_S * total * play.day_s)
    origins = (REGIONS[0],) if play.origin == ONE else REGIONS
    return tuple(
        _job(play, number, origins[number % len(origins)])
        for number in range(max(len(origins), math.ceil(lines / LINES_PER_BACKLOG_JOB)))
    )


def _office_jobs(play: Play, replicas: int) -> list[SimJob]:
    """As many an hour as that hour has clients, by each region's clock."""
    day = Day(play.day_s, offsets_of(CLIENTS), CHAT_SWING)
    lines = OFFICE_LINES_PER_S * replicas * play.day_s
    count = max(len(REGIONS), round(lines / LINES_PER_OFFICE_JOB))
    dice = seeded(play.seed, "office hours")
    window_s = OFFICE_WINDOW_H / 24 * play.day_s
    found: list[SimJob] = []
    while len(found) < count:
        region, at_s = dice.choice(REGIONS), dice.uniform(0.0, play.day_s)
        # Squared: jobs are submitted by people at work, more than chats are.
        if dice.random() < (day.at(region, at_s) / day.peak(region)) ** 2:
            found.append(_job(play, len(found), region, at_s, window_s, LINES_PER_OFFICE_JOB))
    return found


def _job(
    play: Play,
    number: int,
    region: RegionId,
    at_s: float = 0.0,
    window_s: float = BACKLOG_WINDOW_S,
    lines: int = LINES_PER_BACKLOG_JOB,
) -> SimJob:
    spec = OfflineSpec(
        region=region,
        source=lines,
        prompt=PROMPT_TOKENS,
        answer=ANSWER_TOKENS,
        shared=SHARED_TOKENS,
        groups=lines // LINES_PER_GROUP,
        window=window_s,
        at=at_s,
    )
    return make_job(spec, number, REGIONS, play.seed)


def played(play: Play) -> Played:
    """Play one run: it ends with its day."""
    offline = None
    if play.scope != NONE:
        offline = OfflineConfig(
            jobs=jobs(play),
            scope=play.scope,
            by_prefix=play.by_prefix,
            budget_s=play.budget_s,
            burst_s=play.burst_s,
        )
    config = WorldConfig(
        regions=dict.fromkeys(REGIONS, (ENGINE,) * play.replicas),
        settings=RouterSettings(policy="mesh", queue_delay_s_max=0.0),
        seed=play.seed,
        until_s=play.day_s,
        offline=offline,
    )
    return _figures(run(online(play.seed, play.day_s, play.replicas), config))


def _figures(report: dict[str, Any]) -> Played:
    offline = report.get("offline", {})
    tokens = offline.get("tokens", {})
    return Played(
        offline_per_gpu_hour=offline.get("tokens_per_gpu_hour", 0.0),
        ttft_p50_s=report["ttft_s"]["p50"],
        ttft_p99_s=report["ttft_s"]["p99"],
        control_bytes_per_s=sum(offline.get("control_bytes_per_s", {}).values()),
        cached_share=tokens["cached"] / tokens["prompt"] if tokens.get("prompt") else math.nan,
        answered=offline.get("answered", 0),
        expired=offline.get("expired", 0),
        preempted=offline.get("preempted", 0),
        given_back=offline.get("given_back", 0),
        elsewhere=offline.get("elsewhere", 0),
        by_region=dict(offline.get("tokens_by_region", {})),
    )


def play_all(
    plays: Sequence[Play], jobs_at_once: int, show: Callable[[int, Play], None]
) -> dict[Play, Played]:
    """Every run's figures, so many at a time. `show` is called with how many are done."""
    found: dict[Play, Played] = {}
    # Spawned, not forked: a fork would copy threads. The pool ends its processes with the block.
    with ProcessPoolExecutor(jobs_at_once, mp_context=get_context("spawn")) as pool:
        playing = {pool.submit(played, play): play for play in plays}
        try:
            for future in as_completed(playing):
                found[playing[future]] = future.result()
                show(len(found), playing[future])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)
