"""Faults of a run and their times: a schedule, so that a run with faults is repeatable too.

Times are seconds after the first client may send. `until_s` may be infinite. `drawn` makes a
random schedule from a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from random import Random

from schemas.ids import RegionId, ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFault:
    """A fault of one replica."""

    replica: ReplicaId
    at_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFault:
    """A fault of one region."""

    region: RegionId
    at_s: float
    until_s: float = inf


class ReplicaCrash(ReplicaFault):
    """Engine and agent are gone without a message; they come back empty, with a new epoch."""


class EngineCrash(ReplicaFault):
    """The engine's process is gone and its agent is not; it comes back empty."""


class EngineHang(ReplicaFault):
    """No tokens any more, also in running answers; the metrics page still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlow(ReplicaFault):
    """Everything takes `factor` times as long."""

    factor: float


class RouterCrash(RegionFault):
    """A region's routers are gone, with their clients' connections; they come back empty."""


class LeaseStreamDown(RegionFault):
    """JetStream has stopped in a region; all else there goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes between two regions."""

    one: RegionId
    other: RegionId
    at_s: float
    until_s: float = inf


SimFault = ReplicaFault | RegionFault | Cut

LONGEST_S = 20.0  # of a drawn fault; every one ends, so that every request can


def drawn(
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
