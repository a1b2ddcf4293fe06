"""Random schedules of faults, the same for the same dice."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

from mesh.sim.config import (
    Cut,
    EngineCrash,
    EngineHang,
    EngineSlow,
    RegionFault,
    ReplicaCrash,
    RouterCrash,
    SimFault,
)
from schemas.ids import RegionId, ReplicaId

LONGEST_S = 20.0  # of a random fault; every one ends, so that every request can


def random_faults(
    dice: Random,
    *,
    replicas: Sequence[ReplicaId],
    regions: Sequence[RegionId],
    count: int,
    within_s: float,
) -> tuple[SimFault, ...]:
    """So many faults that begin within that time, of all kinds but LeaseStreamDown.

    No replica, router or link has two at once.
    """
    pairs = list(combinations(regions, 2))
    busy: dict[tuple[str, ...], float] = {}
    schedule: list[SimFault] = []
    for at_s in sorted(dice.uniform(0.0, within_s) for _ in range(count)):
        until_s = at_s + dice.uniform(0.1, LONGEST_S)
        fault = _one(dice, at_s, until_s, replicas, regions, pairs)
        if busy.get(_what(fault), 0.0) <= at_s:
            busy[_what(fault)] = until_s
            schedule.append(fault)
    return tuple(schedule)


def _one(
    dice: Random,
    at_s: float,
    until_s: float,
    replicas: Sequence[ReplicaId],
    regions: Sequence[RegionId],
    pairs: Sequence[tuple[RegionId, RegionId]],
) -> SimFault:
    replica = dice.choice(replicas)
    kind = dice.randrange(6 if pairs else 5)
    if kind < 3:
        make = (ReplicaCrash, EngineCrash, EngineHang)[kind]
        return make(replica=replica, at_s=at_s, until_s=until_s)
    if kind == 3:
        factor = dice.uniform(2, 10)
        return EngineSlow(replica=replica, at_s=at_s, until_s=until_s, factor=factor)
    if kind == 4:
        return RouterCrash(region=dice.choice(regions), at_s=at_s, until_s=until_s)
    one, other = dice.choice(pairs)
    return Cut(one=one, other=other, at_s=at_s, until_s=until_s)


def _what(fault: SimFault) -> tuple[str, ...]:
    """The thing that is faulty."""
    if isinstance(fault, RegionFault):
        return ("region", fault.region)
    if isinstance(fault, Cut):
        return ("link", fault.one, fault.other)
    return ("replica", fault.replica)
