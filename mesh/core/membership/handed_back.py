"""Answers that still run on replicas which were handed back, and who must hear if those are lost.

Work that runs when replicas change hands is finished where it is, and nobody but the last adopter
knows who waits for it: peers that asked here, and clients of ours. So it goes on hearing the
heartbeats of these replicas, and places nothing there. Lost is a replica whose agent restarts or
leaves, and one that falls silent while its region's routers are heard: when both are silent the
link is cut, and the answer may come by another. A replica is heard until its agent has nothing
left, or nobody waits any more, for WATCH_S_MAX at most; what runs longer ends by its own silence.

Rejected: telling the region's routers who waits (a message for each answer, to somebody who may be
gone as well), and LOST at the hand-back itself (nearly all of these answers end well).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica import ForwardedAnswer, Replica, replica_name_at
from schemas.ids import RegionId, ReplicaId
from schemas.state import Heartbeat, ReplicaState

T = TypeVar("T")

WATCH_S_MAX = 60.0  # longer than nearly all answers; heartbeats cross the link meanwhile


class AdoptedAttempt(NamedTuple):
    """An attempt of a client's request of ours."""

    key: int
    attempt: int


class HandedBackAttempt(NamedTuple):
    """A replica that was lost, and who waited for its answers; `orphans`: peers' inboxes."""

    name: ReplicaId
    orphans: tuple[str, ...]
    ours: tuple[AdoptedAttempt, ...]
    why: str


@dataclass(slots=True)
class HandBackWatch:
    """One replica; `name` as our tables knew it."""

    name: ReplicaId
    region: RegionId
    epoch: int
    since: float
    heard_at: float
    relayed: tuple[ForwardedAnswer, ...]
    ours: tuple[AdoptedAttempt, ...]

    def gone(self, why: str, now: float) -> HandedBackAttempt:
        """What is to be told."""
        waiting = tuple(owed.inbox for owed in self.relayed if owed.deadline > now)
        return HandedBackAttempt(self.name, waiting, self.ours, why)


class HandedBack:
    """One router's. `regions` are to be heard."""

    def __init__(self, home: RegionId, settings: RouterSettings) -> None:
        self._home = home
        self._lost_s = settings.heartbeat_lost_s
        self._on_the_way_s = settings.handoff_s_max
        self._waiting_max = settings.relayed_max
        self._watched: dict[ReplicaId, HandBackWatch] = {}

    @property
    def regions(self) -> frozenset[RegionId]:
        """Whose heartbeats are still wanted."""
        return frozenset(watch.region for watch in self._watched.values())

    def keep(self, replica: Replica, ours: Collection[AdoptedAttempt], now: float) -> None:
        """It is handed back; nobody needs it watched for whom nobody waits.

        Whoever waits since an earlier time of the same epoch still does; of too many, the latest.
        """
        beat = replica.heartbeat
        if replica.relayed or ours:
            before = self._watched.get(beat.replica)
            is_same = before and before.epoch == beat.epoch
            relayed, awaited = (before.relayed, before.ours) if before and is_same else ((), ())
            self._watched[beat.replica] = HandBackWatch(
                beat.replica,
                beat.region,
                beat.epoch,
                since=now,
                heard_at=now,
                relayed=self._joined(relayed, replica.relayed),
                ours=self._joined(awaited, ours),
            )

    def _joined(self, before: Iterable[T], now: Iterable[T]) -> tuple[T, ...]:
        return tuple(dict.fromkeys((*before, *now)))[-self._waiting_max :]

    def hear(self, beat: Heartbeat, now: float) -> HandedBackAttempt | None:
        """A replica speaks, if it is still the one that has the work."""
        if not self._watched:  # nearly always, and asked at every heartbeat
            return None
        name = replica_name_at(beat.region, beat.replica, self._home)
        watch = self._watched.get(name)
        if watch is None or beat.epoch < watch.epoch:
            return None
        if beat.epoch > watch.epoch or beat.state is ReplicaState.GONE:
            del self._watched[name]
            return watch.gone("the agent restarted or left", now)
        watch.heard_at = now
        if not beat.outstanding and now - watch.since > self._on_the_way_s:
            del self._watched[name]
        return None

    def expire(
        self,
        now: float,
        is_living: Callable[[RegionId], bool],
        waits: Callable[[AdoptedAttempt], bool],
    ) -> list[HandedBackAttempt]:
        """Replicas lost by their silence. `is_living`: whether a region's routers are heard;
        `waits`: whether an attempt of ours is still under way."""
        found = []
        for name, watch in list(self._watched.items()):
            is_awaited = any(owed.deadline > now for owed in watch.relayed)
            is_awaited = is_awaited or any(map(waits, watch.ours))
            if not is_living(watch.region):
                watch.heard_at = now  # its silence says nothing, and begins anew afterwards
            is_silent = now - watch.heard_at > self._lost_s
            if is_awaited and is_silent:
                found.append(watch.gone("no heartbeat since it was handed back", now))
            if is_silent or not is_awaited or now - watch.since > WATCH_S_MAX:
                del self._watched[name]
        return found
