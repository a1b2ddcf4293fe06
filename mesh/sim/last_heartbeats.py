"""A region's last-value stream: what routers read of replicas when they start.

Live, JetStream keeps the last heartbeat of every replica, and a router that starts reads them
all (`mesh.adapters.bus`), so it need not wait for the next beats, which may be seconds away. What
is lost on its way to the router is not in here either: the stream stands where the router does.
"""

from collections.abc import Iterator

from schemas.ids import ReplicaId
from schemas.state import Heartbeat


class LastHeartbeats:
    """Of one router's replicas. Outlives the router's crashes, as the stream does."""

    __slots__ = ("_by_replica",)

    def __init__(self) -> None:
        self._by_replica: dict[ReplicaId, Heartbeat] = {}

    def __iter__(self) -> Iterator[Heartbeat]:
        return iter(tuple(self._by_replica.values()))

    def keep(self, beat: Heartbeat) -> None:
        """It is the replica's last word from now on."""
        self._by_replica[beat.replica] = beat
