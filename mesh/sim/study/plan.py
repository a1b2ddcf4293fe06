"""The fewest replicas that meet a target, region by region and with the regions joined.

Region-local fleets don't depend on each other, so each region's number is searched alone, in a
world of that region (`least`). A mesh's do, so two fleets are tried and the smaller wins. One
begins with the region-local fleet, and replicas are taken away one at a time, from the region
that has most for its demand first, as long as the target is met (`taken_away`). The other begins
with the aggregate need (SkyWalker's Figure 3b): a total below the first fleet's, searched with
the replicas dealt out to the regions by what they ask, and then taken away likewise. A single
router for all regions (`central:REGION`) is planned as the mesh is.

Every fleet that comes out was played whole and met the target. With a target for throughput, a
region-local fleet grows where another replica adds most. Where the simulations run out, the
smallest fleet that was seen to do is given and said to be no minimum.

Source: Xia et al., "SkyWalker", EuroSys 2026, section 2.2 and Figures 3b and 10. The paper adds
up demand curves; here queueing, caches and the wide area decide, because they are simulated.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from agents.sim.profile import Profile
from mesh.replay.report import Report
from mesh.sim.study.cells import tokens
from mesh.sim.study.search import apportioned, least, taken_away
from mesh.sim.study.simulations import Replicas, Simulations, SimulationsSpent, only
from mesh.sim.study.target import Target, throughput_per_s
from mesh.sim.topology import REGION_LOCAL
from mesh.sim.workload import Workload
from mesh.sim.workloads.capacity import offered
from schemas.ids import RegionId
from schemas.plain_words import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One topology's fleet and the run that shows it does; no fleet where none did.

    `is_least`: the search came to its end; else it ran out of simulations, and a smaller fleet
    might do too. `why_not`: what the largest fleet that was tried missed.
    """

    topology: str
    replicas: Replicas | None
    report: Report | None
    is_least: bool
    why_not: str = ""

    @property
    def total(self) -> int | None:
        """Replicas of all regions."""
        return None if self.replicas is None else sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Who asks how much: each asking region's share, and a first guess at its replicas."""

    shares: Mapping[RegionId, float]
    guesses: Mapping[RegionId, int]


class NothingFits(Exception):
    """Not even the largest fleet meets the target; the message says what it missed."""


def demand_of(workload: Workload, regions: Iterable[RegionId], profile: Profile) -> Demand:
    """What each region asks, by tokens where arrivals are known, else by people."""
    shares: dict[RegionId, float] = {}
    guesses: dict[RegionId, int] = {}
    for region in regions:
        own = only(workload, region)
        asked = len(own.clients) or tokens(arrival.node for arrival in own.arrivals)
        if asked:
            shares[region] = float(asked)
            guesses[region] = _guess(own, profile)
    return Demand(shares=shares, guesses=guesses)


class Planner:
    """Plans one topology after the other; later ones start from what the earlier ones needed."""

    def __init__(
        self,
        simulations: Simulations,
        target: Target,
        demand: Demand,
        regions: Iterable[RegionId],
        *,
        replicas_max: int,
    ) -> None:
        """`replicas_max`: of one region."""
        self._simulations = simulations
        self._target = target
        self._demand = demand
        self._regions = tuple(regions)
        self._replicas_max = replicas_max
        self._guess = sum(demand.guesses.values())
        self._known: dict[RegionId, int] = {}  # the fleet of the plan before

    def plan(self, topology: str) -> Plan:
        """The fewest replicas with this topology."""
        best: dict[RegionId, int] = {}

        def fits(replicas: Replicas) -> bool:
            met = self._target.met(self._simulations.whole(topology, self._all(replicas)))
            if met and (not best or sum(replicas.values()) < sum(best.values())):
                best.clear()
                best.update(replicas)
            return met

        search = self._region_local if topology == REGION_LOCAL else self._joined
        is_least, why_not = True, ""
        try:
            search(fits, topology)
        except SimulationsSpent:
            is_least, why_not = False, self._spent(topology)
        except NothingFits as error:
            why_not = str(error)
        if not best:
            return Plan(
                topology=topology, replicas=None, report=None, is_least=False, why_not=why_not
            )
        self._known = dict(best)
        replicas = self._all(best)
        report = self._simulations.whole(topology, replicas)
        return Plan(topology=topology, replicas=replicas, report=report, is_least=is_least)

    def _joined(self, fits: Callable[[Replicas], bool], topology: str) -> None:
        shares = self._demand.shares
        guess, most = self._guess, self._replicas_max * len(shares)
        known = self._known
        if known and fits(known):
            fewest = sum(taken_away(known, fits, self._richest_first).values())
            if fewest == 1:
                return
            guess = most = fewest - 1
        total = least(lambda count: fits(apportioned(count, shares)), guess=guess, most=most)
        if total is not None:
            taken_away(apportioned(total, shares), fits, self._richest_first)
        elif not known or not fits(known):
            largest = self._simulations.whole(topology, self._all(apportioned(most, shares)))
            raise NothingFits(self._why_not(most, largest))

    def _region_local(self, fits: Callable[[Replicas], bool], topology: str) -> None:
        fleet = {region: self._alone(region) for region in self._demand.shares}
        while not fits(fleet):
            report = self._simulations.whole(topology, self._all(fleet))
            region = self._to_grow(fleet, report)
            if fleet[region] == self._replicas_max:
                raise NothingFits(self._why_not(sum(fleet.values()), report))
            fleet[region] += 1

    def _alone(self, region: RegionId) -> int:
        def fits(count: int) -> bool:
            return not self._target.missed(self._simulations.alone(region, count))

        most = self._replicas_max
        found = least(fits, guess=self._demand.guesses[region], most=most)
        if found is None:
            raise NothingFits(self._why_not(most, self._simulations.alone(region, most)))
        return found

    def _to_grow(self, fleet: Replicas, report: Report) -> RegionId:
        """The first region that misses its own part, or where another replica adds most."""
        missed = self._target.missed(report)
        if missed:
            return RegionId(next(iter(missed)))
        room = [region for region in fleet if fleet[region] < self._replicas_max]
        return max(room or fleet, key=lambda region: self._gain_per_s(region, fleet[region]))

    def _gain_per_s(self, region: RegionId, count: int) -> float:
        more = self._simulations.alone(region, min(count + 1, self._replicas_max))
        return throughput_per_s(more) - throughput_per_s(self._simulations.alone(region, count))

    def _richest_first(self, fleet: Replicas) -> list[RegionId]:
        return sorted(fleet, key=lambda region: -fleet[region] / self._demand.shares[region])

    def _all(self, replicas: Replicas) -> dict[RegionId, int]:
        """With a 0 for regions that need none: they are there, and may ask next time."""
        return {region: replicas.get(region, 0) for region in self._regions}

    def _spent(self, topology: str) -> str:
        words = f"no fleet did in {counted(self._simulations.count, 'simulation')}"
        largest = self._simulations.largest(topology)
        if largest is None or self._target.met(largest[1]):  # one region's alone, perhaps
            return words
        return f"{words}; the largest: {self._why_not(*largest)}"

    def _why_not(self, replicas: int, report: Report) -> str:
        reasons = [f"{region} {why}" for region, why in self._target.missed(report).items()]
        if self._target.is_slow(report):
            reasons.append(f"{throughput_per_s(report):.2f} answers/s")
        return f"{counted(replicas, 'replica')} can't meet the target: {', '.join(reasons)}"


def _guess(workload: Workload, profile: Profile) -> int:
    """Replicas that the work alone would fill; 1 where only a simulation can tell."""
    try:
        return max(1, ceil(offered(workload, profile)))
    except ValueError:  # a closed loop, or all requests at once
        return 1
