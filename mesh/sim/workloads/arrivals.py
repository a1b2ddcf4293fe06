"""Open and closed loops: which client sends which request when.

A maker gives one function: the endless requests of a region's n-th client. *Closed loop*: each
client begins its next tree of requests when the last one is complete, so the load follows the
mesh's speed. *Open loop*: trees begin as a Poisson process, each by a random client, whatever the
mesh does; the rate is in requests, as papers and operators count. `clients` sets each region's
share of the requests in both.

`at_speed` brings an open loop to a load: arrivals and pauses shrink alike, as if the recording's
clock ran faster. With arrivals alone, a session's own requests would stay as far apart as they
were, and a trace of sessions would not reach the load.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count, islice
from typing import Protocol

from mesh.sim.workload import Arrival, ClosedLoopClient, RequestNode, Workload
from mesh.sim.workloads.content import seeded, segment_id
from schemas.ids import RegionId

ClientCounts = Mapping[RegionId, int]
Trees = Callable[[RegionId, int], Iterator[RequestNode]]
WorkloadMaker = Callable[..., Workload]  # by keyword: the four options, and its own

DURATION_S = 600.0
RAMP_S = 5.0  # clients begin within it, so that they don't start as one burst (ours)
ARRIVALS_MAX = 5_000_000


class RateCurve(Protocol):
    """A region's rate at a time, as a multiple of its mean, and the highest it gets."""

    def peak(self, region: RegionId) -> float:
        """The highest multiple."""

    def at(self, region: RegionId, at_s: float) -> float:
        """The multiple at a time, from 0 to `peak`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The load of a workload. `rate_per_s`: of an open loop, None for a closed one."""

    name: str  # the workload's
    clients: ClientCounts
    seed: int
    duration_s: float
    rate_per_s: float | None


def workload_maker(
    name: str,
    clients: Mapping[str, int],
    *,
    rate_per_s: float | None = None,
    duration_s: float = DURATION_S,
) -> Callable[[Callable[..., Workload]], WorkloadMaker]:
    """Decorate a maker: the caller may leave out what the source itself sets, as given here.

    The maker is then called with `clients`, `seed`, `duration_s` and `rate_per_s`, and options of
    its own, all by keyword.
    """
    source_clients = {RegionId(region): count for region, count in clients.items()}
    source_rate_per_s, source_duration_s = rate_per_s, duration_s

    def decorate(make: Callable[..., Workload]) -> WorkloadMaker:
        @wraps(make)
        def maker(
            *,
            clients: ClientCounts | None = None,
            seed: int = 0,
            duration_s: float | None = None,
            rate_per_s: float | None = None,
            **own: object,
        ) -> Workload:
            load = LoadOptions(
                name=name,
                clients=source_clients if clients is None else clients,
                seed=seed,
                duration_s=source_duration_s if duration_s is None else duration_s,
                rate_per_s=source_rate_per_s if rate_per_s is None else rate_per_s,
            )
            return make(load, **own)

        return maker

    return decorate


def endless(
    load: LoadOptions, make: Callable[[random.Random, int], Iterable[RequestNode]]
) -> Trees:
    """Each client's trees, made again and again of its random numbers and an id of its own."""

    def trees(region: RegionId, client: int) -> Iterator[RequestNode]:
        rng = seeded(load.seed, load.name, region, client)
        for number in count():
            yield from make(rng, segment_id(load.seed, load.name, region, client, number))

    return trees


def workload(
    load: LoadOptions,
    trees: Trees,
    *,
    requests_per_tree: float = 1.0,
    trees_at_once: int = 1,
    curve: RateCurve | None = None,
    **facts: object,
) -> Workload:
    """Open loop if the load has a rate, else closed loop. Raises ValueError for what can't be.

    `trees_at_once`: how many begin at one arrival.
    """
    _check(load)
    facts = {
        "workload": load.name,
        "clients": dict(load.clients),
        "seed": load.seed,
        "duration_s": load.duration_s,
        "rate_per_s": load.rate_per_s,
        **facts,
    }
    if load.rate_per_s is None:
        clients = _closed_loop(load, trees)
        return Workload(name=load.name, clients=clients, until_s=load.duration_s, facts=facts)
    rate_per_s = load.rate_per_s / requests_per_tree / trees_at_once
    arrivals = _open_loop(load, trees, rate_per_s, trees_at_once, curve)
    return Workload(name=load.name, arrivals=arrivals, facts=facts)


def _check(load: LoadOptions) -> None:
    counts = load.clients.values()
    if not counts or min(counts) < 0 or not any(counts):
        raise ValueError("clients: give each region a number from 0, and one of them at least 1")
    if load.duration_s <= 0:
        raise ValueError(f"duration_s must be above 0, got {load.duration_s}")
    if load.rate_per_s is not None and load.rate_per_s <= 0:
        raise ValueError(f"rate_per_s must be above 0, got {load.rate_per_s}")
    if load.duration_s * (load.rate_per_s or 0.0) > ARRIVALS_MAX:
        raise ValueError(
            f"{load.rate_per_s} requests/s for {load.duration_s} s are more than {ARRIVALS_MAX}: "
            "lower one of them"
        )


def _closed_loop(load: LoadOptions, trees: Trees) -> tuple[ClosedLoopClient, ...]:
    rng = seeded(load.seed, "ramp")
    return tuple(
        ClosedLoopClient(region, trees(region, number), rng.uniform(0.0, RAMP_S))
        for region, users in load.clients.items()
        for number in range(users)
    )


def _open_loop(
    load: LoadOptions,
    trees: Trees,
    arrivals_per_s: float,
    trees_at_once: int,
    curve: RateCurve | None,
) -> tuple[Arrival, ...]:
    per_client_s = arrivals_per_s / sum(load.clients.values())
    found: list[Arrival] = []
    for region, users in load.clients.items():
        rng = seeded(load.seed, "arrivals", region)
        clients = [trees(region, number) for number in range(users)]
        for at_s in _times(region, per_client_s * users, load.duration_s, curve, rng):
            nodes = islice(rng.choice(clients), trees_at_once)
            found += [Arrival(at_s, region, node) for node in nodes]
    found.sort(key=lambda arrival: arrival.at_s)
    return tuple(found)


def _times(
    region: RegionId,
    per_s: float,
    duration_s: float,
    curve: RateCurve | None,
    rng: random.Random,
) -> Iterator[float]:
    """A Poisson process; with a curve, one at its peak rate, thinned (Lewis and Shedler 1979)."""
    if per_s == 0:
        return
    peak = curve.peak(region) if curve else 1.0
    at_s = rng.expovariate(per_s * peak)
    while at_s < duration_s:
        if curve is None or rng.random() * peak < curve.at(region, at_s):
            yield at_s
        at_s += rng.expovariate(per_s * peak)


def at_speed(workload: Workload, speed: float) -> Workload:
    """The workload with arrivals and pauses `speed` times as fast. Raises ValueError.

    A closed loop has no speed: its clients continue when they are answered.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    if workload.clients:
        raise ValueError(f"{workload.name} is a closed loop: change the number of clients")
    if speed == 1:
        return workload
    arrivals = tuple(
        Arrival(arrival.at_s / speed, arrival.region, _faster(arrival.node, speed))
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals, facts=workload.facts | {"at_speed": speed})


def _faster(root: RequestNode, speed: float) -> RequestNode:
    # From the leaves up and without recursion: chains of agents are hundreds of nodes long.
    order = [root]
    for node in order:
        order.extend(node.children)
    done: dict[int, RequestNode] = {}
    for node in reversed(order):
        children = tuple(done[id(child)] for child in node.children)
        done[id(node)] = replace(node, pause_s=node.pause_s / speed, children=children)
    return done[id(root)]
