"""The fewest replicas that meet a target, region by region and with the regions joined.

Region-local fleets don't depend on each other, so each region's number is searched alone
(`least`). A mesh's do, so two fleets are tried and the smaller wins. One begins with the
region-local fleet; replicas are removed one at a time, first from the region that has most for its
demand, as long as the target is met (`without_spare_replicas`). The other begins with the
aggregate need (SkyWalker's Figure 3b): a total below the first fleet's, searched with the replicas
apportioned to the regions by demand, and then reduced likewise. A single router for all regions
(`central:REGION`) is planned as the mesh is.

The searches assume that another replica does not make a fleet that meets its target miss it. That
holds but for noise at the edge, so nothing is inferred: the fleet of a plan was played whole and
met the target, and so was every fleet with one replica less. With a target for throughput, a
region-local fleet grows where another replica adds most. When the simulations run out, the plan
is the smallest fleet that met the target, marked as no minimum.

Every region must meet the target by itself: a fleet that serves two regions well and leaves the
third waiting does not. A request that was shed or failed has no time to first token, so the share
that may be lost is part of the target.

Source: Xia et al., "SkyWalker", EuroSys 2026, section 2.2 and Figures 3b and 10. The paper adds
up demand curves; here queueing, caches and the wide area are simulated.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from agents.sim.profiles import Profile
from mesh.replay.report import RunReport
from mesh.sim.config import REGION_LOCAL
from mesh.sim.study.cells import tokens
from mesh.sim.workload import Workload
from mesh.sim.workloads.capacity import offered
from schemas.ids import RegionId
from schemas.problems import counted

ReplicaCounts = Mapping[RegionId, int]
PlayFleet = Callable[[Workload, str, ReplicaCounts], RunReport]  # with a topology and a fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """Seconds; answers a second over all regions; and the share of requests that may be lost.

    Lines of batch jobs must be answered in their windows, all of them.
    """

    ttft_p90_s: float
    throughput_per_s: float | None = None
    lost_max: float = 0.01

    def missed(self, report: RunReport) -> dict[str, str]:
        """Each region that misses its part and how; empty if none does."""
        found = {region: self._missed(figures) for region, figures in report["regions"].items()}
        missed = {region: why for region, why in found.items() if why}
        for job in report.get("offline", {}).get("jobs", {}).values():
            if left := job["lines"] - job["answered"]:
                missed.setdefault(job["region"], f"{counted(left, 'offline line')} not answered")
        return missed

    def met(self, report: RunReport) -> bool:
        """Whether the whole target is met."""
        return not self.missed(report) and not self.is_slow(report)

    def is_slow(self, report: RunReport) -> bool:
        """Whether there were too few answers a second, over all regions."""
        least_per_s = self.throughput_per_s
        return least_per_s is not None and throughput_per_s(report) < least_per_s

    def _missed(self, figures: RunReport) -> str:
        requests, ok = figures["requests"], figures["ok"]
        if requests - ok > self.lost_max * requests:
            return f"{(requests - ok) / requests:.1%} lost"
        p90_s = figures["ttft_s"]["p90"]
        if p90_s is not None and p90_s > self.ttft_p90_s:
            return f"TTFT p90 {p90_s:.2f} s"
        return ""


def throughput_per_s(report: RunReport) -> float:
    """Complete answers a second."""
    duration_s: float = report["duration_s"]
    return report["ok"] / duration_s if duration_s else 0.0


class SimulationsSpent(Exception):
    """The plan has played as many simulations as it may."""


class Simulations:
    """Plays each fleet once, and no more of them than `limit`.

    `make` gives the workload anew, because playing a closed loop consumes it.
    """

    def __init__(
        self,
        make: Callable[[], Workload],
        play: PlayFleet,
        *,
        limit: int,
        show: Callable[[int, str], None],
    ) -> None:
        self._make = make
        self._play = play
        self._limit = limit
        self._show = show
        self._known: dict[tuple[str, tuple[tuple[RegionId, int], ...]], RunReport] = {}

    @property
    def count(self) -> int:
        return len(self._known)

    def whole(self, topology: str, replicas: ReplicaCounts) -> RunReport:
        """All regions together. Raises SimulationsSpent."""
        return self._report(topology, replicas, self._make)

    def alone(self, region: RegionId, replicas: int) -> RunReport:
        """One region with its own clients alone. Raises SimulationsSpent."""
        return self._report(REGION_LOCAL, {region: replicas}, lambda: only(self._make(), region))

    def largest(self, topology: str) -> tuple[int, RunReport] | None:
        """Of the fleets that were played, the number of replicas and the report of the largest."""
        found = [
            (sum(count for _, count in fleet), report)
            for (played, fleet), report in self._known.items()
            if played == topology
        ]
        return max(found, key=lambda one: one[0], default=None)

    def _report(
        self, topology: str, replicas: ReplicaCounts, make: Callable[[], Workload]
    ) -> RunReport:
        key = topology, tuple(replicas.items())
        if key not in self._known:
            if self.count >= self._limit:
                raise SimulationsSpent
            fleet = ", ".join(f"{region} {count}" for region, count in replicas.items())
            self._show(self.count + 1, f"{topology}: {fleet}")
            self._known[key] = self._play(make(), topology, replicas)
        return self._known[key]


def only(workload: Workload, region: RegionId) -> Workload:
    return replace(
        workload,
        arrivals=tuple(arrival for arrival in workload.arrivals if arrival.region == region),
        clients=tuple(client for client in workload.clients if client.region == region),
    )


def least(fits: Callable[[int], bool], *, guess: int, most: int) -> int | None:
    """The smallest number from 1 to `most` that fits, None if not even `most` does.

    Doubles or halves the guess until it brackets the answer and bisects the rest: about 2·log2 of
    the distance to the guess. When twice the guess doesn't fit, `most` is tried next, so that an
    impossible target is found early.
    """
    above = min(max(guess, 1), most)
    if fits(above):
        below = above // 2
        while below and fits(below):
            below, above = below // 2, below
    else:
        found = _doubled(fits, above, most)
        if found is None:
            return None
        below, above = found
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(middle) else (middle, above)
    return above


def _doubled(fits: Callable[[int], bool], below: int, most: int) -> tuple[int, int] | None:
    """A number that does not fit and a larger one, at most twice that, that does."""
    if below == most:
        return None
    above = min(2 * below, most)
    if not fits(above):
        if above == most or not fits(most):
            return None
        below, above = above, min(2 * above, most)
        while above < most and not fits(above):
            below, above = above, min(2 * above, most)
    return below, above


def without_spare_replicas(
    fleet: ReplicaCounts,
    fits: Callable[[ReplicaCounts], bool],
    order: Callable[[ReplicaCounts], Iterable[RegionId]],
) -> dict[RegionId, int]:
    """The fleet with replicas removed one at a time until no region can spare one more.

    That is a local minimum: trying all fleets of a size would cost millions of simulations.
    `order`: whose replica is tried first. `fleet` must fit; one replica always stays.
    """
    kept = dict(fleet)
    while True:
        smaller = (kept | {key: kept[key] - 1} for key in order(kept) if kept[key] > 0)
        spared = next((one for one in smaller if sum(one.values()) > 0 and fits(one)), None)
        if spared is None:
            return kept
        kept = spared


def apportioned(total: int, shares: Mapping[RegionId, float]) -> dict[RegionId, int]:
    """So many replicas by shares: whole parts first, then the largest remainders (Hamilton)."""
    whole = sum(shares.values())
    exact = {key: total * share / whole for key, share in shares.items()}
    counts = {key: int(part) for key, part in exact.items()}
    ranked = sorted(exact, key=lambda key: counts[key] - exact[key])  # ties as they were named
    for key in ranked[: total - sum(counts.values())]:
        counts[key] += 1
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One topology's fleet and the run in which it met the target; no fleet where none did.

    `is_least`: the search came to its end; else it ran out of simulations, and a smaller fleet
    might do too. `why_not`: what the largest fleet that was tried missed.
    """

    topology: str
    replicas: ReplicaCounts | None
    report: RunReport | None
    is_least: bool
    why_not: str = ""

    @property
    def total(self) -> int | None:
        return None if self.replicas is None else sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionalDemand:
    """Of each region that has clients: its share of the demand, a first guess at its replicas."""

    shares: Mapping[RegionId, float]
    guesses: Mapping[RegionId, int]


class NothingFits(Exception):
    """Not even the largest fleet meets the target; the message says what it missed."""


def demand_of(
    workload: Workload,
    regions: Iterable[RegionId],
    profile: Profile,
    offline: Collection[RegionId] = (),
) -> RegionalDemand:
    """Each region's demand, by tokens where arrivals are known, else by clients.

    `offline`: regions that have batch jobs, and perhaps no clients.
    """
    shares: dict[RegionId, float] = {}
    guesses: dict[RegionId, int] = {}
    for region in regions:
        own = only(workload, region)
        demand = len(own.clients) or tokens(arrival.node for arrival in own.arrivals)
        demand = demand or int(region in offline)
        if demand:
            shares[region] = float(demand)
            guesses[region] = _guess(own, profile)
    return RegionalDemand(shares=shares, guesses=guesses)


def _guess(workload: Workload, profile: Profile) -> int:
    """Replicas that the work alone would fill; 1 where only a simulation shows it."""
    try:
        return max(1, ceil(offered(workload, profile)))
    except ValueError:  # a closed loop, or all requests at once
        return 1


class Planner:
    """Plans one topology after the other; later ones start from what the earlier ones needed."""

    def __init__(
        self,
        simulations: Simulations,
        target: PlanTarget,
        demand: RegionalDemand,
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

        def fits(replicas: ReplicaCounts) -> bool:
            met = self._target.met(self._simulations.whole(topology, self._with_zeros(replicas)))
            if met and (not best or sum(replicas.values()) < sum(best.values())):
                best.clear()
                best.update(replicas)
            return met

        search = self._region_local if topology == REGION_LOCAL else self._joined
        is_least, why_not = True, ""
        try:
            search(fits, topology)
        except SimulationsSpent:
            is_least, why_not = False, self._why_spent(topology)
        except NothingFits as error:
            why_not = str(error)
        if not best:
            return Plan(
                topology=topology, replicas=None, report=None, is_least=False, why_not=why_not
            )
        self._known = dict(best)
        replicas = self._with_zeros(best)
        report = self._simulations.whole(topology, replicas)
        return Plan(topology=topology, replicas=replicas, report=report, is_least=is_least)

    def _joined(self, fits: Callable[[ReplicaCounts], bool], topology: str) -> None:
        shares = self._demand.shares
        guess, most = self._guess, self._replicas_max * len(shares)
        known = self._known
        if known and fits(known):
            fewest = sum(without_spare_replicas(known, fits, self._richest_first).values())
            if fewest == 1:
                return
            guess = most = fewest - 1
        total = least(lambda count: fits(apportioned(count, shares)), guess=guess, most=most)
        if total is not None:
            without_spare_replicas(apportioned(total, shares), fits, self._richest_first)
        elif not known or not fits(known):
            largest = self._simulations.whole(topology, self._with_zeros(apportioned(most, shares)))
            raise NothingFits(self._why_not(most, largest))

    def _region_local(self, fits: Callable[[ReplicaCounts], bool], topology: str) -> None:
        fleet = {region: self._alone(region) for region in self._demand.shares}
        while not fits(fleet):
            report = self._simulations.whole(topology, self._with_zeros(fleet))
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

    def _to_grow(self, fleet: ReplicaCounts, report: RunReport) -> RegionId:
        """The first region that misses its own part, or where another replica adds most."""
        missed = self._target.missed(report)
        if missed:
            return RegionId(next(iter(missed)))
        room = [region for region in fleet if fleet[region] < self._replicas_max]
        return max(room or fleet, key=lambda region: self._gain_per_s(region, fleet[region]))

    def _gain_per_s(self, region: RegionId, count: int) -> float:
        more = self._simulations.alone(region, min(count + 1, self._replicas_max))
        return throughput_per_s(more) - throughput_per_s(self._simulations.alone(region, count))

    def _richest_first(self, fleet: ReplicaCounts) -> list[RegionId]:
        return sorted(fleet, key=lambda region: -fleet[region] / self._demand.shares[region])

    def _with_zeros(self, replicas: ReplicaCounts) -> dict[RegionId, int]:
        """With a 0 for regions that need none."""
        return {region: replicas.get(region, 0) for region in self._regions}

    def _why_spent(self, topology: str) -> str:
        words = f"no fleet did in {counted(self._simulations.count, 'simulation')}"
        largest = self._simulations.largest(topology)
        if largest is None or self._target.met(largest[1]):  # one region's alone, perhaps
            return words
        return f"{words}; the largest: {self._why_not(*largest)}"

    def _why_not(self, replicas: int, report: RunReport) -> str:
        reasons = [f"{region} {why}" for region, why in self._target.missed(report).items()]
        if self._target.is_slow(report):
            reasons.append(f"{throughput_per_s(report):.2f} answers/s")
        return f"{counted(replicas, 'replica')} can't meet the target: {', '.join(reasons)}"
