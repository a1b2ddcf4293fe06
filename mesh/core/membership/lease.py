"""What one router knows of one region's lease: the newest write, and what it asked itself.

The lease is the last message of a stream on that region's own server. Whoever would own the
region's replicas writes it anew and names the number of the write that it believes to be the last;
the stream takes it only if that is so. So of two who claim at once exactly one gets it, wherever
they are, and whoever lags behind gets nothing.

Two numbers order all that is heard. *Terms* rise with every change of the owner, and a renewal
keeps its term. The stream numbers its *writes*. A stream that was lost and began anew counts from
one again; terms go on, because agents remember the highest (`Heartbeat.term`).

A term that an agent speaks of is a hint: the lease comes after it by steps, one with each write
that the stream takes, so that no single voice can use the terms up. Were they used up all the same,
the stream's numbers would go on alone.

No wall clock is in this. An owner counts its lease from before it asked for it; whoever waits for
the lease to end counts from when a write was heard of, which is later. So the owner's ends first,
by however much the two clocks differ in what they show, as long as they run equally fast.
"""

from dataclasses import dataclass
from math import inf

from schemas.ids import RegionId
from schemas.state import TERM_MAX, TERM_STEP, Lease

GUARD = 0.9  # of a lease is used by its owner: clocks of two hosts don't run quite equally fast
HINT_STEP = TERM_STEP  # how far above the last write an agent is believed


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A claim on its way."""

    number: int
    expected: int
    term: int
    sent_at: float


@dataclass(slots=True)
class LeaseState:
    """One region's lease. Fed with what the stream says; asked before claiming."""

    region: RegionId
    seq: int = 0  # of the newest write; 0: none was heard of
    owner: RegionId | None = None  # who wrote it; None: nobody, or it is not known yet
    term: int = 0
    floor: int = 0  # the highest term that anybody has spoken of
    heard_at: float = -inf  # when the newest write was heard of
    ours_until: float = -inf  # by a write of this router alone
    asked: LeaseClaim | None = None
    ask_at: float = -inf  # not before

    def hear(self, lease: Lease, seq: int, now: float) -> bool:
        """The stream took a write. Whether it is news."""
        self.floor = max(self.floor, lease.term)
        known, said = (self.term, self.seq), (lease.term, seq)
        if said < known or (said == known and self.owner is not None):
            return False
        self.seq, self.owner, self.term, self.heard_at = seq, lease.owner, lease.term, now
        return True

    def saw_term(self, term: int) -> None:
        """An agent knows of this term: an owner of a lower one is refused work."""
        if term <= TERM_MAX:
            self.floor = max(self.floor, min(term, max(self.term, self.seq) + HINT_STEP))

    def next_term(self, me: RegionId) -> int:
        """Under which term `me` would write: the same while it owns, unless that is outdated."""
        if self.owner == me and self.term >= self.floor:
            return self.term
        return min(max(self.seq, self.floor) + 1, TERM_MAX)

    def ask(self, number: int, me: RegionId, now: float) -> LeaseClaim:
        """A claim is being sent."""
        self.asked = LeaseClaim(number, self.seq, self.next_term(me), now)
        return self.asked

    def granted(self, me: RegionId, seq: int, lease_s: float, now: float) -> None:
        """The stream took our own write."""
        asked = self.asked
        assert asked is not None, "only what was asked is granted"
        self.asked = None
        self.ours_until = asked.sent_at + lease_s * GUARD
        if (asked.term, seq) >= (self.term, self.seq):  # else somebody has written since
            self.seq, self.owner, self.term, self.heard_at = seq, me, asked.term, now
            self.floor = max(self.floor, asked.term)

    def outdated(self, seq: int, now: float) -> None:
        """The stream did not take it: the last write is number `seq`."""
        asked = self.asked
        assert asked is not None, "only what was asked is refused"
        self.asked = None
        # A write that was heard of since we asked says more than this. A lower number than the one
        # we knew is a stream that began anew.
        if asked.expected == self.seq and seq != self.seq:
            self.seq, self.owner, self.heard_at = seq, None, now

    def unanswered(self, again_at: float) -> None:
        """Nobody keeps that stream, or nobody can be reached there."""
        self.asked, self.ask_at = None, again_at
