"""Attempts that engines failed, by replica and kind, as a metric with few series."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Outcome
from schemas.http_statuses import NOT_IMPLEMENTED, SERVER_ERRORS
from schemas.ids import ReplicaId

NO_CONNECTION, BROKEN, SERVER_ERROR = "connection", "broken", "server_error"
KINDS = (SERVER_ERROR, BROKEN, NO_CONNECTION)
# By what an agent names; other outcomes are no failure of an engine.
_BY_OUTCOME: dict[str, str] = {
    Outcome.ENGINE_LOST: NO_CONNECTION,
    Outcome.ENGINE_BROKEN: BROKEN,
    Outcome.ENGINE_FAILED: BROKEN,
}


def kind_of(status: int | None, outcome: str) -> str | None:
    """The kind of an attempt's failure; None where its engine did not fail it.

    `status`: of the engine's error answer. That it refuses the request (4xx), has too much of them
    (429) or no such route (501) is no failure. `outcome`: that its agent named, or empty.
    """
    if status is None:
        return _BY_OUTCOME.get(outcome)
    is_failure = status in SERVER_ERRORS and status != NOT_IMPLEMENTED
    return SERVER_ERROR if is_failure else None


class ReplicaFailures(Collector):
    """Counts them of the replicas that the router knows; of the others nothing is kept."""

    def __init__(self, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._counts: dict[ReplicaId, dict[str, int]] = {}

    def failed(self, replica: ReplicaId | None, status: int | None, outcome: str) -> None:
        """`replica`: by its name at this router, `region/name` of an adopted one."""
        kind = kind_of(status, outcome)
        if kind is None or replica is None or not self._replicas.remembers(replica):
            return
        counts = self._counts.get(replica)
        if counts is None:
            self._forget_unknown()
            counts = self._counts[replica] = dict.fromkeys(KINDS, 0)
        counts[kind] += 1

    def _forget_unknown(self) -> None:
        for name in [name for name in self._counts if not self._replicas.remembers(name)]:
            del self._counts[name]

    def collect(self) -> Iterator[Metric]:
        """Zero for a replica that failed none, so that its first failure is an increase."""
        family = CounterMetricFamily(
            "mesh_replica_failures",
            "Attempts for this router's own clients that an engine failed, by replica and kind.",
            labels=["replica", "kind"],
        )
        none: dict[str, int] = {}
        for replica in self._replicas:
            name = replica.heartbeat.replica
            counts = self._counts.get(name, none)
            for kind in KINDS:
                family.add_metric([name, kind], counts.get(kind, 0))
        yield family
