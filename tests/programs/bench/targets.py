"""What is promised beside other routers, and whether a run bears it out.

A target compares a figure of ours with a limit, with the same figure of another system as a ratio,
or with what a peer adds to the direct path. To add one, add a row to TARGETS; what other commands
measure (the heartbeats' load, the time of decisions) belongs into a table of theirs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.programs.bench.results import Results
from tests.programs.bench.spread import Spread, Verdict, differences, ratios, spread

OURS, DIRECT, SGLANG, VLLM = "mesh", "direct", "sglang-router", "vllm-router"
LAST_RELEASE = "last-release"
LOST_SHARE_MAX = 0.01  # of requests; beyond it a figure is of something else

Rounds = Callable[[Results], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure per round that should be at most `at_most`."""

    text: str
    rounds: Rounds
    at_most: float
    unit: str
    cell: str
    against: str  # the system that it needs beside ours


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target, and its value in a run."""

    target: Target
    seen: Spread | None
    verdict: Verdict | None  # None: not measured, see `why`
    why: str = ""


def against(cell: str, figure: str, other: str) -> Rounds:
    """Ours as a multiple of another's."""
    return lambda found: ratios(found.values(cell, OURS, figure), found.values(cell, other, figure))


def more_added(cell: str, figure: str, other: str) -> Rounds:
    """What ours adds to the direct path, less what the other one adds: the direct path cancels."""
    return lambda found: differences(
        found.values(cell, OURS, figure), found.values(cell, other, figure)
    )


def alone(cell: str, figure: str) -> Rounds:
    """Ours."""
    return lambda found: found.values(cell, OURS, figure)


def _times(text: str, cell: str, figure: str, other: str, at_most: float) -> Target:
    return Target(text, against(cell, figure, other), at_most, "×", cell, other)


def _added(text: str, cell: str, figure: str, other: str, at_most_ms: float = 0.0) -> Target:
    return Target(text, more_added(cell, figure, other), at_most_ms, " ms", cell, other)


# No more than the last release, whatever was added since: only the next release moves these limits.
SINCE_RELEASE = tuple(
    _times(f"{whose} CPU per {what} to the last release's", cell, figure, LAST_RELEASE, 1.0)
    for cell, what in (("plain", "plain request"), ("stream", "32-chunk stream"))
    for figure, whose in (("front_cpu_us", "router"), ("agents_cpu_us", "agents'"))
)
TARGETS = (
    *SINCE_RELEASE,
    _times("router CPU per plain request to sglang-router's", "plain", "front_cpu_us", SGLANG, 1.5),
    _times("router CPU per 32-chunk stream to it", "stream", "front_cpu_us", SGLANG, 1.0),
    _times("whole path's CPU per stream to it", "stream", "path_cpu_us", SGLANG, 1.0),
    *(
        _added(
            f"added TTFT p50, {what}, less sglang-router's, acknowledged at once",
            *(cell, "ttft_p50_ms", SGLANG, at_most_ms),
        )
        for what, cell, at_most_ms in (
            ("one stream", "one-acked", 1.5),
            ("64 streams in step", "many-acked", 2.5),
            ("64 streams out of step", "apart-acked", 1.5),
        )
    ),
    *(
        _added(f"added TTFT {p} at 64 streams, less {peer}'s{how}", cell, f"ttft_{p}_ms", peer)
        for cell, how in (("many", ""), ("many-acked", ", acknowledged at once"))
        for peer in (SGLANG, VLLM)
        for p in ("p50", "p99")
        if (cell, peer, p) != ("many-acked", SGLANG, "p50")  # above
    ),
    _times("1,000 streams: inter-token p99 to direct", "thousand", "gap_p99_ms", DIRECT, 1.5),
    Target(
        *("1,000 streams: router's peak memory", alone("thousand", "router_peak_mb")),
        *(400.0, " MB", "thousand", OURS),
    ),
    _added("100,000 tokens: TTFT p50 added", "long-prompts", "ttft_p50_ms", DIRECT, 10.0),
)


def target_results(found: Results) -> list[TargetResult]:
    """Every target, also those that could not be measured."""
    return [_target_result(target, found) for target in TARGETS]


def _target_result(target: Target, found: Results) -> TargetResult:
    for system in (OURS, target.against):
        if system in found.absent:
            return TargetResult(target, None, None, f"{system} is absent")
        if not found.has(target.cell, system):
            return TargetResult(target, None, None, f"{target.cell} was not played with {system}")
        if lost_share(found, target.cell, system) > LOST_SHARE_MAX:
            return TargetResult(target, None, None, f"{system} failed requests of {target.cell}")
    seen = spread(target.rounds(found))
    if seen is None:
        return TargetResult(target, None, None, f"no round of {target.cell} has both")
    return TargetResult(target, seen, seen.verdict(target.at_most))


def lost_share(found: Results, cell: str, system: str) -> float:
    """Of all requests of all rounds, those that failed."""
    failed = sum(v for v in found.values(cell, system, "failed") if not math.isnan(v))
    answered = sum(v for v in found.values(cell, system, "answered") if not math.isnan(v))
    return failed / (failed + answered) if failed + answered else 0.0
