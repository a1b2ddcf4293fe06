"""A client's request from arrival to its one end.

States: held (no attempt under way), tried (an attempt is under way, its client has seen nothing,
so it may still be placed elsewhere) and started (the client has a first byte: this attempt or an
error). `attempt` names the attempt under way; news of an earlier one is not about this request
any more and is ignored by everyone.
"""

from dataclasses import dataclass, field

from mesh.core.placing.placement import Place
from mesh.core.policies.base import Spot
from mesh.core.region.names import apart
from mesh.core.requests.request import Request
from schemas.ids import RegionId, ReplicaId

REFUSED_S = 0.1  # about one heartbeat, or one digest


@dataclass(slots=True)
class Inflight:
    """One request and what has become of it so far."""

    request: Request
    attempt: int = 0
    started: bool = False
    peer: RegionId | None = None  # region asked in this attempt, None when local
    replica: ReplicaId | None = None  # None while a peer has not said which
    spot: Spot | None = None  # where this attempt is, until it is left
    handoff: int | None = None  # number of this attempt's hand-off, when local
    attempted_at: float = 0.0
    heard_at: float = 0.0  # last frame of this attempt
    lines: int = 1  # of other regions in which this attempt may have waited, by what they say
    held_since: float | None = None
    held_s: float = 0.0
    place: Place | None = None  # what was last said of where it could go, while held
    failures: int = 0
    refusals: int = 0
    avoid: frozenset[str] = frozenset()  # places that failed it; membership only
    refused_by: dict[str, float] = field(default_factory=dict)  # peers, and until when to wait
    engine_status: int | None = None  # of the last attempt's engine: the edge keeps its error
    server_errors: int = 0  # attempts that engines answered with one

    @property
    def is_tried(self) -> bool:
        """Whether an attempt is under way that may still be replaced by another."""
        return self.held_since is None and not self.started

    @property
    def adopted_from(self) -> RegionId | None:
        """The region of the adopted replica that it is tried on, if it is."""
        return None if self.peer or self.replica is None else apart(self.replica).region

    def is_at(self, replica: ReplicaId) -> bool:
        """Whether it is tried on that replica, known by this name here."""
        return self.peer is None and self.replica == replica

    @property
    def waited_abroad(self) -> bool:
        """Whether all that was heard of this attempt is that it waits in a peer's line."""
        placed = self.replica is not None or self.started
        return self.peer is not None and not placed and self.heard_at > self.attempted_at

    def waited_s(self, now: float) -> float:
        """Seconds in the hold queue so far."""
        return self.held_s + (0.0 if self.held_since is None else now - self.held_since)

    def shun(self, place: str, now: float) -> None:
        """That place did not take it: ask others first for a while, longer each time."""
        self.refused_by[place] = now + REFUSED_S * self.refusals

    def avoided(self, now: float) -> frozenset[str]:
        """Where it should not be tried at present."""
        if not self.refused_by:
            return self.avoid
        return self.avoid | {place for place, until in self.refused_by.items() if until > now}

    def hold(self, now: float) -> None:
        """No attempt is under way; it waits from `now`, or goes on waiting."""
        if self.held_since is None:
            self.held_since = now
        self.peer = self.replica = None

    def release(self, now: float) -> None:
        """The next attempt begins."""
        self.held_s, self.held_since, self.place = self.waited_s(now), None, None
        self.attempt += 1
        self.attempted_at = self.heard_at = now
        self.lines, self.engine_status = 1, None
