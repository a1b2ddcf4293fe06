"""How large a world the twin can play: a thousand replicas, ten regions, as many requests as asked.

    make study-scale REQUESTS=50000

A chat in open loop (`mesh.sim.workloads.skywalker`) at most of what the fleet can do; regions
form a ring, neighbours 50 ms apart. Each policy is played in a process of its own, on one core, to
the end of its last conversation, so time and memory are those of one run.

A run has three parts. The fleet fills, then it is full for as long as requests come, and then the
last conversations come to their end; only the middle grows with the number of requests. Its price,
CPU seconds a simulated second once a quarter of the arrivals are behind, shows what a million would
take: that many seconds for the arrivals, and the rest of this run as it was.

What is sampled and not kept whole: times, above a million values of one measure
(`mesh.replay.tally`). A percentile is then one of a uniform sample of a million: the share of
requests below a shown p99 is 99% to within 0.02 points, nineteen times in twenty.
"""

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import click

from infra.process import collect_seldom
from mesh.core.model.settings import RouterSettings
from mesh.replay.report import RunReport
from mesh.sim.config import WorldConfig
from mesh.sim.rtt import RttTable
from mesh.sim.workload import Workload
from mesh.sim.workloads import make
from mesh.sim.world import run
from schemas.ids import RegionId
from tests.programs.options import known_policies
from tests.programs.studies.tables.markdown import table
from tests.support.result_page import result_page

PROFILE = "l4-llama3.1-8b"
RATE_PER_S = 0.8  # of one replica; a fleet of L4 can do about 1.1 of such requests
NEIGHBOURS_MS = 50.0
PEOPLE = 100  # in each region, taking turns
FULL_FROM = 0.25  # of the arrivals' time
MILLION = 1_000_000


class Size(NamedTuple):
    """What is played."""

    requests: int
    replicas: int
    regions: int
    seed: int

    @property
    def arrive_s(self) -> float:
        """How long requests begin to come."""
        return self.requests / (RATE_PER_S * self.replicas)


class Mark(NamedTuple):
    """A moment of a run: virtual seconds, CPU seconds, requests ended."""

    at_s: float
    cpu_s: float
    ended: int


class Cost(NamedTuple):
    """What a run was and what it took."""

    policy: str
    report: RunReport
    made_s: float
    wall_s: float
    cpu_s: float
    per_virtual_s: float  # CPU seconds, while the fleet is full
    peak_bytes: int


class Watch:
    """Notes how far a run is, once a simulated second, and prints it now and then."""

    def __init__(self, policy: str, size: Size) -> None:
        self.marks: list[Mark] = []
        self._policy = policy
        self._size = size
        self._told_at = time.monotonic()

    def progress(self, ended: int, at_s: float) -> None:
        """As `mesh.sim.world` wants it."""
        self.marks.append(Mark(at_s, time.process_time(), ended))
        if time.monotonic() - self._told_at >= 10.0:
            self._told_at = time.monotonic()
            click.echo(f"{self._policy}: {ended} requests, {at_s:.0f} s simulated", err=True)

    def per_virtual_s(self) -> float:
        """CPU seconds a simulated second while requests come and the fleet is full."""
        since, until = FULL_FROM * self._size.arrive_s, self._size.arrive_s
        full = [mark for mark in self.marks if since <= mark.at_s <= until]
        if len(full) < 2:
            return float("nan")
        return (full[-1].cpu_s - full[0].cpu_s) / (full[-1].at_s - full[0].at_s)


def workload(size: Size) -> Workload:
    """The chat of all regions."""
    return make(
        "chat",
        clients=dict.fromkeys(regions(size), PEOPLE),
        seed=size.seed,
        duration_s=size.arrive_s,
        rate_per_s=RATE_PER_S * size.replicas,
    )


def regions(size: Size) -> list[RegionId]:
    """Their names, in the ring's order."""
    return [RegionId(f"r{number}") for number in range(size.regions)]


def world(policy: str, size: Size) -> WorldConfig:
    """The fleet, its regions in a ring."""
    names = regions(size)
    distances = {
        (one, other): NEIGHBOURS_MS * min(apart, len(names) - apart)
        for at, one in enumerate(names)
        for apart, other in enumerate(names[at + 1 :], 1)
    }
    least, more = divmod(size.replicas, len(names))
    return WorldConfig(
        regions={name: [PROFILE] * (least + (at < more)) for at, name in enumerate(names)},
        rtt=RttTable(distances),
        settings=RouterSettings(policy=policy),
        seed=size.seed,
    )


def play(policy: str, size: Size) -> Cost:
    """One run, measured; meant for a process of its own."""
    began_at = time.perf_counter()
    asked = workload(size)
    made_s = time.perf_counter() - began_at
    collect_seldom()  # all that a world keeps is alive
    watch = Watch(policy, size)
    began_at, cpu_s = time.perf_counter(), time.process_time()
    report = run(asked, world(policy, size), progress=watch.progress)
    return Cost(
        policy=policy,
        report=report,
        made_s=made_s,
        wall_s=time.perf_counter() - began_at,
        cpu_s=time.process_time() - cpu_s,
        per_virtual_s=watch.per_virtual_s(),
        peak_bytes=_peak_bytes(),
    )


def written(size: Size, costs: list[Cost]) -> str:
    """The table, with what a million requests would take."""
    head = [
        *("policy", "requests", "lost", "TTFT p90 s", "simulated s", "wall s", "CPU s"),
        *("requests/s of CPU", "peak GiB", "CPU s per s, full", "a million, h"),
    ]
    rows = []
    for cost in costs:
        report = cost.report
        million_s = cost.cpu_s + cost.per_virtual_s * (
            MILLION / (RATE_PER_S * size.replicas) - size.arrive_s
        )
        rows.append(
            [
                cost.policy,
                f"{report['requests']:,}",
                f"{report['shed'] + report['failed']:,}",
                f"{report['ttft_s']['p90'] or 0:.3f}",
                f"{report['duration_s']:.0f}",
                f"{cost.wall_s:.0f}",
                f"{cost.cpu_s:.0f}",
                f"{report['requests'] / cost.cpu_s:.0f}",
                f"{cost.peak_bytes / 2**30:.2f}",
                f"{cost.per_virtual_s:.2f}",
                f"{million_s / 3600:.2f}",
            ]
        )
    title = f"**{size.replicas} replicas in {size.regions} regions, one core a run**"
    return f"{title}\n\n{table(head, rows)}"


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@result_page("scale", "How large a world the twin plays")
@click.command()
@click.option("--requests", type=click.IntRange(1), default=20_000, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--regions", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("mesh", "skywalker"),
    callback=known_policies,
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True)
def main(
    requests: int, replicas: int, regions: int, policies: tuple[str, ...], seed: int, jobs: int
) -> None:
    """Play a large world and print what it took: time, memory, and what a million would take."""
    size = Size(requests, replicas, regions, seed)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        playing = [pool.submit(play, policy, size) for policy in policies]
        costs = [future.result() for future in playing]
    click.echo(written(size, costs))


if __name__ == "__main__":
    main()
