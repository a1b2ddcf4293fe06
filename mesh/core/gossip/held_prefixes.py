"""What replicas' engines hold, as their agents report it, in the prefix indexes.

Agents number their deltas; heartbeats repeat the last number. A router that lacks deltas for
GRACE_S asks for the whole set, at most every ASK_S, and takes no delta until that has arrived: a
later one could not be applied to a set with a gap. Meanwhile, and for replicas that report nothing,
the index is the estimate that it was. Deltas of another epoch than the heartbeats' are ignored; so
are those of an agent whose heartbeats have no number, but for one thing: that its engine has lost
all, after which no older estimate counts. A heartbeat and a delta may come in any order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.replica_table import ReplicaTable
from schemas.held import PARTS_MAX, HeldDelta, HeldPart
from schemas.ids import ReplicaId

TICK_S = 0.5
GRACE_S = 1.0
ASK_S = 3.0
LOST_S = 10.0  # some questions later
# What was placed later than this before the whole set may not have been computed for it.
UNDER_WAY_S = 30.0

Indexes = Sequence[PrefixIndex[str]]  # of all policies that follow prefixes


@dataclass(slots=True)
class ReportingReplica:
    """How far one replica's deltas have been applied; `seq` None: not at all."""

    epoch: int
    seq: int | None = None
    behind_since: float | None = None
    asked_at: float = float("-inf")
    parts: dict[int, HeldPart] = field(default_factory=dict)


class HeldPrefixes:
    """Of one router."""

    def __init__(self, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._known: dict[ReplicaId, ReportingReplica] = {}
        self._due_at = float("-inf")

    def tick(self, indexes: Indexes, now: float) -> Iterator[fx.AskHeld]:
        """Find out which replicas report, and which deltas are missing; what to request."""
        if now < self._due_at:
            return
        self._due_at = now + TICK_S
        reporting = dict(self._reporting())
        for name in self._known.keys() - reporting.keys():
            del self._known[name]
            for index in indexes:
                index.reports(name, reporting=False)
        for name, (epoch, last) in reporting.items():
            state = self._state(name, epoch)
            if state.seq is None and not last:
                state.seq = 0
            if self._is_behind(indexes, name, state, last, now):
                state.asked_at = now
                state.parts.clear()
                yield fx.AskHeld(name, state.epoch)

    def _reporting(self) -> Iterator[tuple[ReplicaId, tuple[int, int]]]:
        for name, replica in self._replicas.by_name.items():
            if (last := replica.heartbeat.held_seq) is not None:
                yield name, (replica.heartbeat.epoch, last)

    def _state(self, name: ReplicaId, epoch: int) -> ReportingReplica:
        state = self._known.get(name)
        if state is None or state.epoch != epoch:
            state = self._known[name] = ReportingReplica(epoch)
        return state

    def _is_behind(
        self, indexes: Indexes, name: ReplicaId, state: ReportingReplica, last: int, now: float
    ) -> bool:
        """Whether its whole set must be requested now."""
        is_late = state.behind_since is not None and now - state.behind_since > LOST_S
        for index in indexes:  # one whose deltas don't come here is estimated
            is_followed = state.seq is not None and not is_late
            if (name in index.reporting) != is_followed:
                index.reports(name, reporting=is_followed)
        if state.seq is not None and state.seq >= last:
            state.behind_since = None
            return False
        if state.behind_since is None:
            state.behind_since = now
        return now - state.behind_since >= GRACE_S and now - state.asked_at >= ASK_S

    def _reported_by(self, name: ReplicaId, epoch: int) -> ReportingReplica | None:
        """The state of a replica of this region, if its heartbeats have that epoch."""
        replica = self._replicas.by_name.get(name)
        if replica is None or replica.heartbeat.held_seq is None:
            return None
        return self._state(name, epoch) if replica.heartbeat.epoch == epoch else None

    def take_delta(self, event: ev.HeldDeltaSeen, indexes: Indexes, now: float) -> None:
        delta, name = event.delta, event.replica
        state = self._reported_by(name, delta.epoch)
        before = 0 if state is None or state.seq is None else state.seq
        if state is None or delta.seq != before + 1:
            if delta.cleared and self._estimates(name, delta.epoch):
                _leave(name, indexes, now)
            return
        state.seq, state.behind_since = delta.seq, None
        if delta.cleared:
            _leave(name, indexes, now)
        if delta.lost:
            for index in indexes:
                index.evicted(name, delta.lost)
        self._take(name, delta, indexes, now)

    def _estimates(self, name: ReplicaId, epoch: int) -> bool:
        """Whether that agent doesn't know all that its engine holds."""
        replica = self._replicas.by_name.get(name)
        if replica is None or replica.heartbeat.epoch != epoch:
            return False
        return replica.heartbeat.held_seq is None

    def take_part(self, event: ev.HeldPartSeen, indexes: Indexes, now: float) -> None:
        part, name = event.part, event.replica
        state = self._reported_by(name, part.epoch)
        asked = state is not None and now - state.asked_at < ASK_S
        if state is None or not asked or not 0 <= part.part < part.parts <= PARTS_MAX:
            return
        parts = state.parts
        if any((other.seq, other.parts) != (part.seq, part.parts) for other in parts.values()):
            parts.clear()
        parts[part.part] = part
        if len(parts) < part.parts:
            return
        held = {block for one in parts.values() for block in (*one.gpu, *one.cpu, *one.disk)}
        for index in indexes:
            index.report_whole(name, held, now - UNDER_WAY_S)
        for number in range(part.parts):
            self._take(name, parts[number], indexes, now)
        state.seq, state.behind_since = part.seq, None
        parts.clear()

    def _take(
        self, name: ReplicaId, message: HeldDelta | HeldPart, indexes: Indexes, now: float
    ) -> None:
        for tier, blocks in enumerate((message.gpu, message.cpu, message.disk)):
            if blocks:
                for index in indexes:
                    index.report(name, blocks, tier, now)


def _leave(name: ReplicaId, indexes: Indexes, now: float) -> None:
    """Its engine has lost all that it held."""
    for index in indexes:
        index.leave_until(name, now)
