"""What goes wrong in a run, and when: a schedule, so that a run with faults is repeatable too.

Times are seconds after the first client may ask. `back_at_s` and `until_s` may be infinite.
`drawn` makes a schedule of a seed, for runs that search for what nobody thought of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from random import Random

from schemas.ids import RegionId, ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCrash:
    """Engine and agent are gone without a word; they come back empty, as another start."""

    replica: ReplicaId
    at_s: float
    back_at_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCrash:
    """The engine's process is gone and its agent is not; it comes back empty."""

    replica: ReplicaId
    at_s: float
    back_at_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHang:
    """No tokens any more, also in running answers; the metrics page still answers."""

    replica: ReplicaId
    at_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlow:
    """Everything takes `factor` times as long."""

    replica: ReplicaId
    at_s: float
    factor: float
    until_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCrash:
    """A region's router is gone, its clients' connections with it; it comes back blank."""

    region: RegionId
    at_s: float
    back_at_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes between two regions."""

    one: RegionId
    other: RegionId
    at_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStreamDown:
    """JetStream has stopped in a region; all else there goes on."""

    region: RegionId
    at_s: float
    until_s: float = inf


Fault = ReplicaCrash | EngineCrash | EngineHang | EngineSlow | RouterCrash | Cut | LeaseStreamDown

LONGEST_S = 20.0  # of a drawn fault; every one ends, so that every request can


def drawn(
    dice: Random,
    *,
    replicas: Sequence[ReplicaId],
    regions: Sequence[RegionId],
    count: int,
    within_s: float,
) -> tuple[Fault, ...]:
    """So many faults that begin within that time, of all kinds but the last.

    None is of one thing twice at once.
    """
    pairs = list(combinations(regions, 2))
    busy: dict[tuple[str, ...], float] = {}
    schedule: list[Fault] = []
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
) -> Fault:
    replica = dice.choice(replicas)
    kind = dice.randrange(6 if pairs else 5)
    if kind == 0:
        return ReplicaCrash(replica=replica, at_s=at_s, back_at_s=until_s)
    if kind == 1:
        return EngineCrash(replica=replica, at_s=at_s, back_at_s=until_s)
    if kind == 2:
        return EngineHang(replica=replica, at_s=at_s, until_s=until_s)
    if kind == 3:
        return EngineSlow(replica=replica, at_s=at_s, until_s=until_s, factor=dice.uniform(2, 10))
    if kind == 4:
        return RouterCrash(region=dice.choice(regions), at_s=at_s, back_at_s=until_s)
    one, other = dice.choice(pairs)
    return Cut(one=one, other=other, at_s=at_s, until_s=until_s)


def _what(fault: Fault) -> tuple[str, ...]:
    """The thing that is faulty."""
    if isinstance(fault, RouterCrash):
        return ("router", fault.region)
    if isinstance(fault, Cut):
        return ("link", fault.one, fault.other)
    if isinstance(fault, LeaseStreamDown):
        return ("lease stream", fault.region)
    return ("replica", fault.replica)
