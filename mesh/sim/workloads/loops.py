"""The two ways to ask: clients who wait for their answers, and arrivals that wait for nobody.

A maker gives one function: the endless work of a region's n-th client. *Closed loop*: each client
begins its next tree when the last one is complete, and the load follows the mesh's speed.
*Open loop*: trees begin as a Poisson process, each by a client taken at random, whatever the mesh
does; the rate is told in requests, because that is what papers and operators count.

`clients` means the same in both: how many people a region has, hence its share of the work.
Rejected: a rate per region as another argument. A day's curve needs more than that anyway and
brings its own rhythm.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from mesh.sim.workload import Arrival, Client, Node, Workload
from mesh.sim.workloads.names import seeded
from schemas.ids import RegionId

Clients = Mapping[RegionId, int]
Value = TypeVar("Value")
Trees = Callable[[RegionId, int], Iterator[Node]]

RAMP_S = 5.0  # clients begin within it, so that they don't start as one burst (ours)
ARRIVALS_MAX = 5_000_000


class Rhythm(Protocol):
    """A region's rate at a time, as a multiple of its mean, and the highest it gets."""

    def peak(self, region: RegionId) -> float:
        """The highest multiple."""

    def at(self, region: RegionId, at_s: float) -> float:
        """The multiple at a time, from 0 to `peak`."""


class Pace(NamedTuple):
    """How long and, open loop, how fast. `trees_at_once`: what begins at one arrival."""

    duration_s: float
    rate_per_s: float | None
    requests_per_tree: float = 1.0
    trees_at_once: int = 1


def given(value: Value | None, otherwise: Value) -> Value:
    """The caller's value, or the source's own where the caller gave none."""
    return otherwise if value is None else value


def workload(
    name: str,
    clients: Clients,
    trees: Trees,
    pace: Pace,
    *,
    seed: int,
    rhythm: Rhythm | None = None,
    **facts: object,
) -> Workload:
    """Open loop if the pace has a rate, else closed loop. Raises ValueError for what can't be."""
    _check(clients, pace)
    facts = {
        "workload": name,
        "clients": dict(clients),
        "seed": seed,
        "duration_s": pace.duration_s,
        "rate_per_s": pace.rate_per_s,
        **facts,
    }
    if pace.rate_per_s is None:
        people = _people(clients, trees, seed)
        return Workload(name=name, clients=people, until_s=pace.duration_s, facts=facts)
    arrivals = _arrivals(clients, trees, pace, pace.rate_per_s, rhythm, seed)
    return Workload(name=name, arrivals=arrivals, facts=facts)


def _check(clients: Clients, pace: Pace) -> None:
    if not clients or min(clients.values()) < 0 or not any(clients.values()):
        raise ValueError("clients: give each region a number from 0, and one of them at least 1")
    if pace.duration_s <= 0:
        raise ValueError(f"duration_s must be above 0, got {pace.duration_s}")
    if pace.rate_per_s is not None and pace.rate_per_s <= 0:
        raise ValueError(f"rate_per_s must be above 0, got {pace.rate_per_s}")
    if pace.duration_s * (pace.rate_per_s or 0.0) > ARRIVALS_MAX:
        raise ValueError(
            f"{pace.rate_per_s} requests/s for {pace.duration_s} s are more than {ARRIVALS_MAX}: "
            "ask for less of one of them"
        )


def _people(clients: Clients, trees: Trees, seed: int) -> tuple[Client, ...]:
    rng = seeded(seed, "ramp")
    return tuple(
        Client(region, trees(region, number), rng.uniform(0.0, RAMP_S))
        for region, count in clients.items()
        for number in range(count)
    )


def _arrivals(
    clients: Clients,
    trees: Trees,
    pace: Pace,
    rate_per_s: float,
    rhythm: Rhythm | None,
    seed: int,
) -> tuple[Arrival, ...]:
    per_client_s = rate_per_s / pace.requests_per_tree / pace.trees_at_once / sum(clients.values())
    found: list[Arrival] = []
    for region, count in clients.items():
        rng = seeded(seed, "arrivals", region)
        work = [trees(region, number) for number in range(count)]
        for at_s in _times(region, per_client_s * count, pace.duration_s, rhythm, rng):
            asking = rng.choice(work)
            for _, node in zip(range(pace.trees_at_once), asking, strict=False):
                found.append(Arrival(at_s, region, node))
    found.sort(key=lambda arrival: arrival.at_s)
    return tuple(found)


def _times(
    region: RegionId,
    per_s: float,
    duration_s: float,
    rhythm: Rhythm | None,
    rng: random.Random,
) -> Iterator[float]:
    """A Poisson process; with a rhythm, one at its peak rate, thinned (Lewis and Shedler 1979)."""
    if per_s == 0:
        return
    peak = rhythm.peak(region) if rhythm else 1.0
    at_s = rng.expovariate(per_s * peak)
    while at_s < duration_s:
        if rhythm is None or rng.random() * peak < rhythm.at(region, at_s):
            yield at_s
        at_s += rng.expovariate(per_s * peak)
