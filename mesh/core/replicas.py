"""The replicas of this region as this router knows them: heartbeats plus what it just sent.

Selective pushing (SkyWalker 3.3): a replica takes work while nothing is pending in it, that is,
while all it accepted fits its running batch. A heartbeat is up to 100 ms old, so what this
router handed off since then must be counted too: every hand-off has a running number per
replica, heartbeats say which number was the last one taken (`Heartbeat.taken`), and all later
ones are *on their way*. They may fill the room the heartbeat left (batch slots and KV tokens),
no more; without this, everyone would hit the emptiest replica until its next heartbeat.

What a heartbeat does not say is None and is never taken for zero: an engine that does not tell
its batch size gets a small fixed number of hand-offs per heartbeat instead of "room for all".
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mesh.core.settings import RouterSettings
from schemas.ids import ModelId, ReplicaId, RouterId
from schemas.state import Heartbeat, ReplicaState


@dataclass(frozen=True, slots=True)
class Handoff:
    """Work sent and not yet seen in a heartbeat."""

    number: int
    sent_at: float
    tokens: int


@dataclass(slots=True)
class Replica:
    """One replica: its last heartbeat and what was handed to it since."""

    heartbeat: Heartbeat
    seen_at: float
    on_the_way: deque[Handoff] = field(default_factory=deque)
    refused_at: float | None = None  # an agent's word is newer than its last heartbeat
    relayed: deque[str] = field(default_factory=deque)  # inboxes of peers it answers

    @property
    def pending(self) -> int | None:
        """Requests waiting in the engine or on their way there; None if the engine won't say."""
        known = self.heartbeat.pending
        return None if known is None else known + len(self.on_the_way)

    @property
    def load(self) -> int:
        """Requests in or on their way into this replica: what "least load" compares.

        The agent's own count never misses; the engine's may include work of others.
        """
        beat = self.heartbeat
        inside = max(beat.outstanding, (beat.running or 0) + (beat.pending or 0))
        return inside + len(self.on_the_way)


class News(NamedTuple):
    """What a heartbeat changed. `orphans`: peers' inboxes whose answers died with the agent."""

    changed: bool  # of what peers are told: full, state or models
    restarted: bool  # the agent is another one, or gone: what it had taken is lost
    orphans: tuple[str, ...]


NOTHING_NEW = News(changed=False, restarted=False, orphans=())


class ReplicaTable:
    """All replicas of the region that were heard of and are not gone."""

    def __init__(self, me: RouterId, settings: RouterSettings) -> None:
        self._me = me
        self._settings = settings
        self._replicas: dict[ReplicaId, Replica] = {}
        self._handoffs: dict[ReplicaId, int] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def get(self, name: ReplicaId) -> Replica | None:
        """The replica of that name, if it is known."""
        return self._replicas.get(name)

    def see(self, beat: Heartbeat, now: float) -> News:
        """Take in a heartbeat; one that arrives out of order is ignored."""
        known = self._replicas.get(beat.replica)
        if known is not None and _is_older(beat, known.heartbeat):
            return NOTHING_NEW
        if known is not None and beat.epoch != known.heartbeat.epoch:
            del self._replicas[beat.replica]
            self._add(beat, now)
            return News(changed=True, restarted=True, orphans=tuple(known.relayed))
        if known is None:
            return News(changed=self._add(beat, now), restarted=False, orphans=())
        if beat.state is ReplicaState.GONE:
            del self._replicas[beat.replica]
            return News(changed=True, restarted=True, orphans=tuple(known.relayed))
        before = known.heartbeat
        known.heartbeat, known.seen_at, known.refused_at = beat, now, None
        taken = beat.taken.get(self._me, 0)
        while known.on_the_way and known.on_the_way[0].number <= taken:
            known.on_the_way.popleft()
        changed = (before.full, before.state, before.models) != (beat.full, beat.state, beat.models)
        return News(changed=changed, restarted=False, orphans=())

    def _add(self, beat: Heartbeat, now: float) -> bool:
        if beat.state is ReplicaState.GONE:
            return False
        self._replicas[beat.replica] = Replica(beat, now)
        return True

    def hand_off(self, name: ReplicaId, tokens: int, now: float) -> int:
        """Count work that is being sent to a replica; returns the hand-off's number."""
        number = self._handoffs.get(name, 0) + 1
        self._handoffs[name] = number
        self._replicas[name].on_the_way.append(Handoff(number, now, tokens))
        return number

    def settled(self, name: ReplicaId, number: int) -> None:
        """A hand-off has begun to answer, or is over: it is no longer on its way."""
        replica = self._replicas.get(name)
        if replica is not None:
            for handoff in replica.on_the_way:
                if handoff.number == number:
                    replica.on_the_way.remove(handoff)
                    break

    def refused(self, name: ReplicaId, now: float) -> None:
        """Its agent did not take work: it is not available until it says so itself."""
        replica = self._replicas.get(name)
        if replica is not None:
            replica.refused_at = now

    def relay(self, name: ReplicaId, inbox: str) -> None:
        """Remember that a peer awaits this replica's answer."""
        replica = self._replicas[name]
        replica.relayed.append(inbox)
        while len(replica.relayed) > self._settings.relayed_max:
            replica.relayed.popleft()

    def expire(self, now: float) -> list[tuple[ReplicaId, list[str]]]:
        """Drop what time has ended. Returns replicas lost just now with the inboxes they owe."""
        lost = []
        for name, replica in list(self._replicas.items()):
            oldest = now - self._settings.handoff_s_max
            while replica.on_the_way and replica.on_the_way[0].sent_at < oldest:
                replica.on_the_way.popleft()
            if self.is_lost(replica, now):
                lost.append((name, list(replica.relayed)))
                del self._replicas[name]
        return lost

    def is_lost(self, replica: Replica, now: float) -> bool:
        """Whether its heartbeats have been missing for too long."""
        return now - replica.seen_at > self._settings.heartbeat_lost_s

    def serves(self, replica: Replica, model: ModelId) -> bool:
        """Whether it is ready and has this model."""
        beat = replica.heartbeat
        return beat.state is ReplicaState.READY and model in beat.models

    def unavailable_because(self, replica: Replica, model: ModelId, now: float) -> str | None:
        """Why this replica should not be pushed work now, or None if it may be."""
        beat = replica.heartbeat
        if beat.state is not ReplicaState.READY:
            return beat.state.value
        if model not in beat.models:
            return "other model"
        if now - replica.seen_at > self._settings.heartbeat_late_s:
            return "heartbeat late"
        if replica.refused_at is not None or beat.full:
            return "full"
        if beat.pending:
            return "pending"
        return self._no_room_because(replica)

    def _no_room_because(self, replica: Replica) -> str | None:
        waiting = len(replica.on_the_way)
        if not waiting:
            return None
        beat = replica.heartbeat
        if beat.batch_max is None or beat.running is None:
            slots = self._settings.handoffs_blind_max
        else:
            slots = max(1, beat.batch_max - beat.running)
        if waiting >= slots:
            return "handed off"
        if beat.kv_capacity_tokens is not None and beat.kv_used_ratio is not None:
            free_tokens = beat.kv_capacity_tokens * (1.0 - beat.kv_used_ratio)
            if sum(handoff.tokens for handoff in replica.on_the_way) >= free_tokens:
                return "handed off"
        return None


def _is_older(beat: Heartbeat, than: Heartbeat) -> bool:
    return (beat.epoch, beat.seq) <= (than.epoch, than.seq)
