"""The simulations of a plan: none twice, and no more than were allowed."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mesh.replay.report import Report
from mesh.sim.topology import REGION_LOCAL
from mesh.sim.workload import Workload
from schemas.ids import RegionId

Replicas = Mapping[RegionId, int]
Play = Callable[[Workload, str, Replicas], Report]  # with a topology and a fleet
Key = tuple[str, tuple[tuple[RegionId, int], ...]]


class SimulationsSpent(Exception):
    """The plan has played as many simulations as it may."""


class Simulations:
    """`make` gives the workload anew, because a closed loop is used up by being played."""

    def __init__(
        self,
        make: Callable[[], Workload],
        play: Play,
        *,
        limit: int,
        show: Callable[[int, str], None],
    ) -> None:
        self._make = make
        self._play = play
        self._limit = limit
        self._show = show
        self._known: dict[Key, Report] = {}

    @property
    def count(self) -> int:
        """How many have been played."""
        return len(self._known)

    def whole(self, topology: str, replicas: Replicas) -> Report:
        """All regions together. Raises SimulationsSpent."""
        return self._report(topology, replicas, self._make)

    def alone(self, region: RegionId, replicas: int) -> Report:
        """One region with its own clients and nobody else. Raises SimulationsSpent."""
        return self._report(REGION_LOCAL, {region: replicas}, lambda: only(self._make(), region))

    def largest(self, topology: str) -> tuple[int, Report] | None:
        """Of the fleets that were played, the one with most replicas, and what it did."""
        found = [
            (sum(count for _, count in fleet), report)
            for (played, fleet), report in self._known.items()
            if played == topology
        ]
        return max(found, key=lambda one: one[0], default=None)

    def _report(self, topology: str, replicas: Replicas, make: Callable[[], Workload]) -> Report:
        key = topology, tuple(replicas.items())
        if key not in self._known:
            if self.count >= self._limit:
                raise SimulationsSpent
            fleet = ", ".join(f"{region} {count}" for region, count in replicas.items())
            self._show(self.count + 1, f"{topology}: {fleet}")
            self._known[key] = self._play(make(), topology, replicas)
        return self._known[key]


def only(workload: Workload, region: RegionId) -> Workload:
    """What the clients of one region ask."""
    return replace(
        workload,
        arrivals=tuple(arrival for arrival in workload.arrivals if arrival.region == region),
        clients=tuple(client for client in workload.clients if client.region == region),
    )
