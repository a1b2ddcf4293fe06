"""What the control plane costs: processors and wide-area bytes, by replicas and by regions.

    make control-cost [QUICK=1 | FULL=1]

Heartbeats, digests, gossip, leases, pings and signs of life, and the requests of the last table.
Each scene is a mesh of real processes (`tests.programs.live.control.live`), watched for a few
windows after it has settled; the links of many regions are counted in the twin, which also shows
the kinds of messages apart. Numbers are medians of the windows, with the lowest and the highest.

Two claims are checked. What a region sends to others does not depend on how many replicas it has.
A hundred replicas cost less than a router would pay that asks a hundred engines for their metrics:
llm-d publishes some 7.5 cores for 100 idle pods (its operations guide).
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import uvloop

from tests.programs.live.control.live import Cost, Scene, look
from tests.programs.live.control.twin import (
    CONTROL,
    LinkTraffic,
    control_bytes,
    control_messages,
    traffic_per_s,
)
from tests.programs.options import two_or_more
from tests.programs.studies.tables.markdown import mark, table
from tests.support.result_page import result_page

REPLICAS, REGIONS = (10, 30, 100, 300, 1000), (2, 3, 5, 10)
TWIN_REGIONS = (2, 3, 5, 10, 20)
ELSEWHERE = 10  # replicas of every region whose number is not the question
FEW, REAL_REGIONS = 4, 3  # real agents and engines are two processes each
RATES = (0.0, 3.0, 9.0)
WINDOWS = 3
TWIN_S = 20.0
HEARTBEATS_PER_S = 10.0  # of one replica
POLLING_CORES = 7.5  # llm-d's operations guide: idle, 100 pods
PAIR = ("r00", "r01")
FLAT = 1.25  # a link's bytes beside most replicas over those beside fewest

Read = Callable[[Cost], float]


@result_page("control-cost", "What control costs")
@click.command()
@click.option("--quick", is_flag=True, help="Few replicas and regions, short windows.")
@click.option("--full", is_flag=True, help="Longer windows.")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    multiple=True,
    callback=two_or_more,
    help="Instead of these; two or more.",
)
@click.option("--regions", type=click.IntRange(2), multiple=True, help="Live; instead of these.")
@click.option("--traces", type=click.Path(path_type=Path), help="Not used here.")
def main(
    quick: bool,
    full: bool,
    replicas: tuple[int, ...],
    regions: tuple[int, ...],
    traces: Path | None,
) -> None:
    """Measure scene after scene, and print tables."""
    window_s = 2.0 if quick else 15.0 if full else 6.0
    by_replicas = {
        count: Scene(regions=2, replicas=count, elsewhere=ELSEWHERE)
        for count in replicas or (REPLICAS[:2] if quick else REPLICAS)
    }
    by_regions = {
        count: Scene(regions=count, replicas=ELSEWHERE, elsewhere=ELSEWHERE)
        for count in regions or (REGIONS[:2] if quick else REGIONS)
    }
    by_rate = {
        rate: Scene(
            regions=REAL_REGIONS, replicas=FEW, elsewhere=FEW, requests_per_s=rate, real=True
        )
        for rate in (RATES[:2] if quick else RATES)
    }
    seen = {
        scene: _look(scene, window_s)
        for scene in dict.fromkeys((*by_replicas.values(), *by_regions.values(), *by_rate.values()))
    }
    twin_regions = TWIN_REGIONS[:3] if quick else TWIN_REGIONS
    click.echo(tables(by_replicas, by_regions, by_rate, seen, twin_regions, TWIN_S))


Seen = dict[Scene, list[Cost]]


def tables(
    by_replicas: dict[int, Scene],
    by_regions: dict[int, Scene],
    by_rate: dict[float, Scene],
    seen: Seen,
    twin_regions: Sequence[int],
    twin_s: float,
) -> str:
    """All that is printed. `twin_regions`: so many are counted in the twin, for `twin_s` each."""
    return "\n\n".join(
        [
            _replicas(by_replicas, seen, twin_s),
            _regions(by_regions, seen, twin_regions, twin_s),
            _kinds(twin_regions[-1], twin_s),
            _rates(by_rate, seen),
            _sum(by_replicas, by_rate, seen),
        ]
    )


def _look(scene: Scene, window_s: float) -> list[Cost]:
    with tempfile.TemporaryDirectory() as place:
        costs = uvloop.run(look(scene, Path(place), WINDOWS, window_s))
    measured = (
        f"{_median(costs, _heard):.0f} heartbeats/s, {_spread(costs, _first('router'))} cores"
    )
    click.echo(f"{scene}: {measured} of its router", err=True)
    return costs


def _spread(costs: Sequence[Cost], read: Read, form: str = ".3f") -> str:
    values = [read(cost) for cost in costs]
    shown = (statistics.median(values), min(values), max(values))
    middle, least, most = (format(value, form) for value in shown)
    return f"{middle} ({least}–{most})"


def _median(costs: Sequence[Cost], read: Read) -> float:
    return statistics.median(map(read, costs))


def _first(program: str) -> Read:
    return lambda cost: sum(cost.of(f"{program}-r00"))


def _heard(cost: Cost) -> float:
    return cost.heartbeats_per_s["r00"]


def _to_peer(cost: Cost) -> float:
    return cost.link_bytes_per_s[PAIR] / 1024


def _twin(scene: Scene, twin_s: float) -> LinkTraffic:
    """The first region to the second."""
    return next(
        traffic for (a, b), traffic in traffic_per_s(scene, twin_s).items() if (a, b) == PAIR
    )


def _replicas(scenes: dict[int, Scene], seen: Seen, twin_s: float) -> str:
    rows = []
    for count, scene in scenes.items():
        costs = seen[scene]
        beats = _median(costs, _heard)
        rows.append(
            [
                f"{count} replicas",
                f"{beats / (HEARTBEATS_PER_S * count):.0%}",
                _spread(costs, _first("router")),
                _spread(costs, _first("nats")),
                _spread(costs, _to_peer, ".1f"),
                _spread(costs, lambda cost: cost.link_messages_per_s[PAIR], ".1f"),
                f"{control_bytes(_twin(scene, twin_s)) / 1024:.1f}",
            ]
        )
    head = [
        "idle, live, two regions",
        *("heartbeats on time", "router, cores", "nats-server, cores"),
        *("KiB/s to the peer", "messages/s", "twin, KiB/s"),
    ]
    return table(head, rows)


def _regions(scenes: dict[int, Scene], seen: Seen, counts: Sequence[int], twin_s: float) -> str:
    rows = []
    for count in counts:
        scene = Scene(regions=count, replicas=ELSEWHERE, elsewhere=ELSEWHERE)
        traffic = _twin(scene, twin_s)
        costs = seen.get(scene)
        live = ["–"] * 5
        if count in scenes and costs is not None:
            live = [
                _spread(costs, _median_of("router")),
                _spread(costs, _median_of("nats")),
                _spread(costs, _link_kib_per_s, ".1f"),
                _spread(costs, lambda cost: max(cost.link_bytes_per_s.values()) / 1024, ".1f"),
                f"{_median(costs, _link_kib_per_s) * (count - 1):.0f}",
            ]
        per_link = control_bytes(traffic) / 1024
        rows.append(
            [
                f"{count} regions",
                *live,
                f"{per_link:.1f}",
                f"{control_messages(traffic):.1f}",
                f"{per_link * (count - 1):.0f}",
            ]
        )
    head = [
        f"idle, {ELSEWHERE} replicas each",
        *("router, cores", "nats-server, cores", "KiB/s a direction", "busiest"),
        *("a region to all", "twin: KiB/s", "messages/s", "a region to all"),
    ]
    return table(head, rows)


def _median_of(program: str) -> Read:
    return lambda cost: statistics.median(cost.of(f"{program}-"))


def _link_kib_per_s(cost: Cost) -> float:
    return statistics.median(cost.link_bytes_per_s.values()) / 1024


def _kinds(most: int, twin_s: float) -> str:
    """What a link carries, by kind."""
    few = _twin(Scene(regions=2, replicas=ELSEWHERE, elsewhere=ELSEWHERE), twin_s)
    many = _twin(Scene(regions=most, replicas=ELSEWHERE, elsewhere=ELSEWHERE), twin_s)
    head = ["twin, one direction of a link", "messages/s", "B/s, 2 regions", f"{most} regions"]
    rows = [
        [
            kind,
            f"{few.messages[kind]:.1f}",
            f"{few.payload_bytes[kind]:.0f}",
            f"{many.payload_bytes[kind]:.0f}",
        ]
        for kind in CONTROL
    ]
    return table(head, rows)


def _rates(scenes: dict[float, Scene], seen: Seen) -> str:
    rows = []
    for rate, scene in scenes.items():
        costs = seen[scene]
        rows.append(
            [
                f"{rate:g} requests/s",
                _spread(costs, lambda cost: statistics.mean(cost.of("agent-"))),
                _spread(costs, _median_of("router")),
                _spread(costs, _median_of("nats")),
                _spread(costs, _link_kib_per_s, ".1f"),
            ]
        )
    head = [
        f"live, {REAL_REGIONS} regions of {FEW} real agents",
        *("agent, cores each", "router, cores", "nats-server, cores", "KiB/s a direction"),
    ]
    return table(head, rows)


def _slope(scenes: dict[int, Scene], seen: Seen, read: Read) -> tuple[float, float]:
    """Least squares over all windows: cores of 100 replicas more, and cores of none.

    Over the heartbeats that really arrived: a machine that is too small gives fewer of them.
    """
    costs = [cost for scene in scenes.values() for cost in seen[scene]]
    found = statistics.linear_regression([_heard(cost) for cost in costs], [*map(read, costs)])
    return found.slope * 100 * HEARTBEATS_PER_S, found.intercept


def _sum(replicas: dict[int, Scene], rates: dict[float, Scene], seen: Seen) -> str:
    """The fit and the claims."""
    router, router_none = _slope(replicas, seen, _first("router"))
    nats, nats_none = _slope(replicas, seen, _first("nats"))
    idle = seen[rates[min(rates)]]
    agents = 100 * _median(idle, lambda cost: statistics.mean(cost.of("agent-")))
    whole = router + nats + agents
    rows = [
        ["router", f"{router:.3f}", f"{router_none:.3f}"],
        ["nats-server", f"{nats:.3f}", f"{nats_none:.3f}"],
        ["agents, one beside each engine", f"{agents:.2f}", ""],
        ["together", f"{whole:.2f}", f"{router_none + nats_none:.3f}"],
    ]
    fewest, most = min(replicas), max(replicas)
    at_few, at_most = (_median(seen[replicas[count]], _to_peer) for count in (fewest, most))
    claims = [
        [
            f"a link beside {most} replicas over one beside {fewest}, ≤ {FLAT}",
            f"{at_most / at_few:.2f}×",
            mark(at_most <= FLAT * at_few),
        ],
        [
            f"cores of 100 idle replicas, < {POLLING_CORES}",
            f"{whole:.2f}",
            mark(whole < POLLING_CORES),
        ],
    ]
    fit = table(["idle, least squares", "cores per 100 replicas", "with none"], rows)
    return f"{fit}\n\n{table(['claim', 'measured', ''], claims)}"


if __name__ == "__main__":
    main()
