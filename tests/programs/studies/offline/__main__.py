"""Offline work across three regions in the twin: idle engines of every region, night side first.

    make study-offline [QUICK=1 | FULL=1]

Three regions whose chat follows their own clocks, and batch jobs beside it: not at all, only in the
region where they were submitted, or anywhere in the mesh. The twin runs the live cores of routers,
batch runners and agents.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import click

from mesh.sim.offline.config import MESH, NONE, REGION_LOCAL
from schemas.problems import counted
from tests.programs.studies.offline.runs import (
    ANSWER_TOKENS,
    ENGINE,
    EVEN,
    LINES_PER_GROUP,
    LOAD,
    OFFICE,
    OFFICE_LINES_PER_S,
    OFFICE_WINDOW_H,
    ONE,
    PROMPT_TOKENS,
    SHARED_TOKENS,
    Play,
    Played,
    play_all,
    spread,
)
from tests.programs.studies.tables.markdown import mark, share, table, times
from tests.support.result_page import result_page

TARGET, TOLERANCE = 1.15, 0.10
ORIGINS = (EVEN, OFFICE, ONE)

WHERE_IT_GAINS = (
    "Where every region has more lines than its engines can do, the mesh can add nothing. It gains "
    "where jobs come unevenly: over regions, or over the day."
)

Runs = Mapping[Play, Played]
Figure = Callable[[Played], float]


def plays(day_s: float, replicas: int, seeds: int) -> list[Play]:
    """Every run. All of one seed have equal online requests, those of one origin equal jobs."""
    found = []
    for seed in range(seeds):
        common = {"seed": seed, "day_s": day_s, "replicas": replicas}
        found.append(Play(origin="", scope=NONE, **common))
        found += [
            Play(origin=origin, scope=scope, **common)
            for origin in ORIGINS
            for scope in (REGION_LOCAL, MESH)
        ]
        found.append(Play(origin=ONE, scope=MESH, by_prefix=False, **common))
    return found


class Tables:
    """What is written of all runs."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._seeds = sorted({play.seed for play in runs})

    def values(
        self, figure: Figure, origin: str, scope: str, by_prefix: bool = True
    ) -> list[float]:
        """Of every seed, in order."""
        what = (origin, scope, by_prefix)
        found = {play.seed: figure(one) for play, one in self._runs.items() if play.what == what}
        return [found[seed] for seed in self._seeds]

    def ratios(self, figure: Figure, ours: tuple[str, str], other: tuple[str, str]) -> list[float]:
        """Of each seed, ours over the other."""
        pairs = zip(self.values(figure, *ours), self.values(figure, *other), strict=True)
        return [one / two if two else math.nan for one, two in pairs]

    def offline(self) -> str:
        """Offline tokens per GPU hour, by where jobs come from."""
        rows = []
        for origin in ORIGINS:
            local = self.values(_per_gpu_hour, origin, REGION_LOCAL)
            mesh = self.values(_per_gpu_hour, origin, MESH)
            ratios = self.ratios(_per_gpu_hour, (origin, MESH), (origin, REGION_LOCAL))
            expired = [self.values(_expired_share, origin, scope) for scope in (REGION_LOCAL, MESH)]
            rows.append(
                [
                    origin,
                    _millions(local),
                    _millions(mesh),
                    _ratio(ratios),
                    mark(spread(ratios)[0] >= TARGET),
                    *(share(spread(values)[0]) for values in expired),
                ]
            )
        head = ["jobs come from", "region-local", "mesh", "mesh to region-local", f"≥ {TARGET}×"]
        return table([*head, "late, region-local", "late, mesh"], rows)

    def online(self) -> str:
        """What online requests notice."""
        rows = []
        none = ("", NONE)
        for origin in ORIGINS:
            for scope in (REGION_LOCAL, MESH):
                p50 = self.ratios(lambda one: one.ttft_p50_s, (origin, scope), none)
                p99 = self.ratios(lambda one: one.ttft_p99_s, (origin, scope), none)
                kept = all(spread(each)[0] <= 1 + TOLERANCE for each in (p50, p99))
                preempted = self.values(_preempted_share, origin, scope)
                rows.append(
                    [
                        f"{origin}, {scope}",
                        _percent(p50),
                        _percent(p99),
                        mark(kept),
                        share(spread(preempted)[0]),
                    ]
                )
        head = ["online requests beside", "TTFT p50", "TTFT p99", f"≤ +{TOLERANCE:.0%}"]
        return table([*head, "aborted per line answered"], rows)

    def prefixes(self) -> str:
        """Subtrees given to one replica each, against lines given regardless of their prefixes."""
        rows = []
        for name, sees in (("by subtree", True), ("regardless of prefixes", False)):
            values = self.values(_per_gpu_hour, ONE, MESH, sees)
            cached = self.values(lambda one: one.cached_share, ONE, MESH, sees)
            rows.append([name, _millions(values), share(spread(cached)[0])])
        return table(["lines of one beginning", "millions per GPU hour", "cached"], rows)

    def control(self) -> str:
        """The price on the links."""
        rows = []
        for origin in ORIGINS:
            sent = self.values(lambda one: one.control_bytes_per_s, origin, MESH)
            moved = self.values(_elsewhere_share, origin, MESH)
            rows.append([origin, f"{spread(sent)[0]:.0f}", share(spread(moved)[0])])
        head = ["jobs come from", "control bytes/s, all links", "lines answered elsewhere"]
        return table(head, rows)

    def head(self, play: Play) -> str:
        """What was played."""
        none = ("", NONE)
        p50, p99 = (
            spread(self.values(figure, *none))[0]
            for figure in (lambda one: one.ttft_p50_s, lambda one: one.ttft_p99_s)
        )
        hour_s = play.day_s / 24
        return (
            f"{play.replicas} × {ENGINE.name} in each of three regions, in chunks of "
            f"{ENGINE.batch_tokens} tokens. Online: chat by each region's clock, {LOAD:.0%} of the "
            f"capacity over the day, with answers of about 4 s. Of the day only the hours are "
            f"scaled, to {hour_s:g} s each, and the windows of jobs with them; requests, "
            "iterations, heartbeats and links keep their own times. Runners' forecasts know no "
            "such hours and have no say.\n\n"
            f"Lines have {PROMPT_TOKENS} tokens, of which {SHARED_TOKENS} are one of many "
            f"beginnings with {LINES_PER_GROUP} lines each, and {ANSWER_TOKENS} of answer. *Every "
            "region alike* and *one region* submit more than can be done at the day's beginning, "
            "without hurry. *Office hours*: jobs come by each region's own clock, "
            f"{OFFICE_LINES_PER_S:g} lines a second and GPU on average, to be answered within "
            f"{OFFICE_WINDOW_H:g} hours.\n\n"
            "The budget of an iteration and the numbers of lines were chosen on seed 0, which is "
            "one of those below.\n\n"
            f"Agents accept iterations of {1e3 * play.budget_s:.0f} ms. Without offline work TTFT "
            f"is {1e3 * p50:.0f} ms (p50) and {1e3 * p99:.0f} ms (p99). Medians of "
            f"{counted(len(self._seeds), 'seed')}, least and most in brackets."
        )


def _per_gpu_hour(one: Played) -> float:
    return one.offline_per_gpu_hour


def _expired_share(one: Played) -> float:
    ended = one.answered + one.expired
    return one.expired / ended if ended else math.nan


def _preempted_share(one: Played) -> float:
    return one.preempted / one.answered if one.answered else math.nan


def _elsewhere_share(one: Played) -> float:
    return one.elsewhere / one.answered if one.answered else math.nan


def _millions(values: Sequence[float]) -> str:
    middle, least, most = (value / 1e6 for value in spread(values))
    return f"{middle:.1f} ({least:.1f}–{most:.1f})"


def _ratio(values: Sequence[float]) -> str:
    middle, least, most = spread(values)
    return f"{times(middle)} ({times(least)}–{times(most)})"


def _percent(ratios: Sequence[float]) -> str:
    middle, least, most = (value - 1 for value in spread(ratios))
    return f"{middle:+.1%} ({least:+.1%} to {most:+.1%})"


def written(runs: Runs) -> Iterator[str]:
    """The page, part by part."""
    tables = Tables(runs)
    yield tables.head(next(iter(runs)))
    yield f"**Offline tokens per GPU hour**, millions\n\n{tables.offline()}"
    yield WHERE_IT_GAINS
    yield f"**Online requests**, against the same without offline work\n\n{tables.online()}"
    yield f"**Prefixes**, jobs from one region, mesh\n\n{tables.prefixes()}"
    yield f"**Control traffic**\n\n{tables.control()}"


@result_page("offline", "Offline work across regions")
@click.command()
@click.option("--quick", is_flag=True, help="A short form: one seed, a shorter day.")
@click.option("--full", is_flag=True, help="A long form: a longer day.")
@click.option("--seeds", type=click.IntRange(1, 20), default=None, help="Repetitions.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True)
def main(quick: bool, full: bool, seeds: int | None, jobs: int) -> None:
    """Play a day of three regions with batch jobs, and print the tables."""
    began_s = time.monotonic()
    day_s = 48.0 if quick else 720.0 if full else 180.0
    asked = plays(day_s, 1, seeds or (1 if quick else 3))

    def show(done: int, play: Play) -> None:
        click.echo(f"[{done}/{len(asked)}] {play.origin} {play.scope} {play.seed}", err=True)

    found = play_all(asked, jobs, show)
    for part in written(found):
        click.echo(f"{part}\n")
    click.echo(f"{len(found)} runs, {time.monotonic() - began_s:.0f} s", err=True)


if __name__ == "__main__":
    main()
