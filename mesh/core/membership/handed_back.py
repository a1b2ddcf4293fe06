"""Answers that still run on replicas which were handed back: who is notified if they are lost.

Work that runs when replicas change hands is finished there, and only the last adopter knows who
waits for it: peers that forwarded here, and own clients. So it goes on receiving these replicas'
heartbeats, and places nothing there. A replica is lost if its agent restarts or leaves, or falls
silent while its region's routers are not silent: if both are, the link is cut, and the answer may
come by another. A replica is watched until its agent has nothing left or nobody waits any more, for
WATCH_S_MAX at most; answers that run longer end by their own silence.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica import ForwardedAnswer, Replica, replica_name_at
from schemas.ids import RegionId, ReplicaId
from schemas.state import Heartbeat, ReplicaState

T = TypeVar("T")

WATCH_S_MAX = 60.0  # longer than nearly all answers


class AdoptedAttempt(NamedTuple):
    """An attempt of an own client's request."""

    key: int
    attempt: int


class LostWatch(NamedTuple):
    """A replica that was lost, and what waited for its answers; `orphans`: peers' inboxes."""

    name: ReplicaId
    orphans: tuple[str, ...]
    ours: tuple[AdoptedAttempt, ...]
    why: str


@dataclass(slots=True)
class HandBackWatch:
    """One replica; `name` as in the tables before."""

    name: ReplicaId
    region: RegionId
    epoch: int
    since: float
    seen_at: float
    relayed: tuple[ForwardedAnswer, ...]
    ours: tuple[AdoptedAttempt, ...]

    def gone(self, why: str, now: float) -> LostWatch:
        """It is lost: what waits for it."""
        waiting = tuple(answer.inbox for answer in self.relayed if answer.deadline > now)
        return LostWatch(self.name, waiting, self.ours, why)


class HandedBack:
    """The watched replicas of one router."""

    def __init__(self, home: RegionId, settings: RouterSettings) -> None:
        self._home = home
        self._lost_s = settings.heartbeat_lost_s
        self._on_the_way_s = settings.handoff_s_max
        self._waiting_max = settings.relayed_max
        self.watched: dict[ReplicaId, HandBackWatch] = {}

    @property
    def regions(self) -> frozenset[RegionId]:
        """Regions whose heartbeats are still needed."""
        return frozenset(watch.region for watch in self.watched.values())

    def keep(self, replica: Replica, ours: Collection[AdoptedAttempt], now: float) -> None:
        """It is handed back: watch it if any answer of it is waited for.

        Answers of an earlier time with the same epoch still count; of too many, the latest.
        """
        beat = replica.heartbeat
        if replica.relayed or ours:
            before = self.watched.get(beat.replica)
            is_same = before and before.epoch == beat.epoch
            relayed, awaited = (before.relayed, before.ours) if before and is_same else ((), ())
            self.watched[beat.replica] = HandBackWatch(
                beat.replica,
                beat.region,
                beat.epoch,
                since=now,
                seen_at=now,
                relayed=self._joined(relayed, replica.relayed),
                ours=self._joined(awaited, ours),
            )

    def _joined(self, before: Iterable[T], now: Iterable[T]) -> tuple[T, ...]:
        return tuple(dict.fromkeys((*before, *now)))[-self._waiting_max :]

    def seen(self, beat: Heartbeat, now: float) -> LostWatch | None:
        """A heartbeat of a watched replica; returns what is lost with it."""
        name = replica_name_at(beat.region, beat.replica, self._home)
        watch = self.watched.get(name)
        if watch is None or beat.epoch < watch.epoch:
            return None
        if beat.epoch > watch.epoch or beat.state is ReplicaState.GONE:
            del self.watched[name]
            return watch.gone("the agent restarted or left", now)
        watch.seen_at = now
        if not beat.outstanding and now - watch.since > self._on_the_way_s:
            del self.watched[name]
        return None

    def expire(
        self,
        now: float,
        living: Collection[RegionId],
        awaited: Collection[AdoptedAttempt],
    ) -> list[LostWatch]:
        """Replicas lost by their silence. `living`: regions whose routers are not silent;
        `awaited`: own attempts that are still under way."""
        found = []
        for name, watch in list(self.watched.items()):
            is_awaited = any(answer.deadline > now for answer in watch.relayed)
            is_awaited = is_awaited or any(attempt in awaited for attempt in watch.ours)
            if watch.region not in living:
                watch.seen_at = now  # its silence starts anew afterwards
            is_silent = now - watch.seen_at > self._lost_s
            if is_awaited and is_silent:
                found.append(watch.gone("no heartbeat since it was handed back", now))
            if is_silent or not is_awaited or now - watch.since > WATCH_S_MAX:
                del self.watched[name]
        return found
