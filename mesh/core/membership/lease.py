"""One region's lease as one router knows it: the newest write, and this router's own claim.

The lease is the last message of a stream on that region's own server. A claim writes it anew and
names the number of the write that the router believes to be the last; the stream takes it only if
that is so. Of two claims at once exactly one succeeds, and an outdated one fails.

Two numbers order the writes. *Terms* rise with every change of the owner; a renewal keeps its term.
The stream numbers its *writes*; one that was lost and began anew counts from one again, while terms
go on, because agents remember the highest (`Heartbeat.term`). A term that an agent reports is a
hint: the lease follows it by steps, one per write, so that no single agent can exhaust the terms.
If they were exhausted all the same, the stream's numbers would decide alone.

No wall clock is involved. An owner counts its lease from before its claim, a claimant waits from
when it saw the last write, which is later. So the owner's lease ends first, whatever the two clocks
show, as long as they run at about the same rate.
"""

from dataclasses import dataclass
from math import inf

from schemas.ids import RegionId
from schemas.state import TERM_MAX, TERM_STEP, Lease

GUARD = 0.9  # of a lease is used by its owner: two hosts' clocks differ a little in rate
HINT_STEP = TERM_STEP  # most that a reported term counts above the last write


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A claim without an answer yet."""

    number: int
    expected: int
    term: int
    sent_at: float


@dataclass(slots=True)
class LeaseState:
    """One region's lease."""

    region: RegionId
    seq: int = 0  # of the newest write; 0: none is known
    owner: RegionId | None = None  # that wrote it; None: unknown
    term: int = 0
    floor: int = 0  # the highest term that was reported
    seen_at: float = -inf  # when the newest write was
    ours_until: float = -inf  # by a write of this router alone
    asked: LeaseClaim | None = None
    ask_at: float = -inf  # not before

    def seen(self, lease: Lease, seq: int, now: float) -> bool:
        """The stream took a write. Whether it is a new one."""
        self.floor = max(self.floor, lease.term)
        known, seen = (self.term, self.seq), (lease.term, seq)
        if seen < known or (seen == known and self.owner is not None):
            return False
        self.seq, self.owner, self.term, self.seen_at = seq, lease.owner, lease.term, now
        return True

    def saw_term(self, term: int) -> None:
        """An agent has reported this term: it refuses work of owners with a lower one."""
        if term <= TERM_MAX:
            self.floor = max(self.floor, min(term, max(self.term, self.seq) + HINT_STEP))

    def next_term(self, me: RegionId) -> int:
        """The term of a write by `me`: the same while it owns, unless that is outdated."""
        if self.owner == me and self.term >= self.floor:
            return self.term
        return min(max(self.seq, self.floor) + 1, TERM_MAX)

    def ask(self, number: int, me: RegionId, now: float) -> LeaseClaim:
        """A claim is being sent."""
        self.asked = LeaseClaim(number, self.seq, self.next_term(me), now)
        return self.asked

    def granted(self, me: RegionId, seq: int, lease_s: float, now: float) -> None:
        """The stream took this router's write."""
        asked = self.asked
        assert asked is not None, "only what was asked is granted"
        self.asked = None
        self.ours_until = asked.sent_at + lease_s * GUARD
        if (asked.term, seq) >= (self.term, self.seq):  # else there is a newer write
            self.seq, self.owner, self.term, self.seen_at = seq, me, asked.term, now
            self.floor = max(self.floor, asked.term)

    def outdated(self, seq: int, now: float) -> None:
        """The stream did not take it: the last write is number `seq`."""
        asked = self.asked
        assert asked is not None, "only what was asked is refused"
        self.asked = None
        # A write seen since the claim is newer than this. A lower number than the known one is a
        # stream that began anew.
        if asked.expected == self.seq and seq != self.seq:
            self.seq, self.owner, self.seen_at = seq, None, now

    def unanswered(self, again_at: float) -> None:
        """The stream does not exist, or can't be reached."""
        self.asked, self.ask_at = None, again_at
