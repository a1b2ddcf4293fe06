"""Whose work this agent takes: the region's that owns its replica, as far as it has heard.

A lease changes hands while the last owner may not know it yet (a stopped process, a slow link).
So leases have *terms* that rise with every change, routers say theirs with each sign of life, and
an agent takes work of that region alone which it has heard of under the highest term. What was
taken before is finished: it has its client, and nobody else has it.

Work claims nothing. It says by itself in whose name it is handed over, and the bus can't check a
header; a sign of life comes on a subject that names its region, and links hold that region to it.
An adopter's work says its term too, so that what one of its routers hands over by an old lease is
refused even when another has taken a new one.

Nobody's term is above doubt for ever: an adopter that has not said for a while that it owns the
replica has let go, or is gone, and the replica's own routers are believed again, even without a
lease (their stream may have stopped); so no term is asked of their work.

Nor does a term that was said once bind anybody for ever. While its region repeats it, it counts as
it was said; what is remembered of it rises by a step (`schemas.rising`). So who claims the highest
of all terms has the replica for as long as it goes on claiming, as any peer could that writes
leases, and the next honest write is above what it leaves behind.
"""

from dataclasses import dataclass
from math import inf

from schemas.ids import RegionId
from schemas.rising import AGENT_TERM
from schemas.state import TERM_MAX

assert AGENT_TERM.step is not None and AGENT_TERM.step_s is not None
assert AGENT_TERM.for_s is not None
STEP, STEP_S = AGENT_TERM.step, AGENT_TERM.step_s
ADOPTED_S = AGENT_TERM.for_s


@dataclass(slots=True)
class Fence:
    """One replica's. Told of every claim; asked before work is taken."""

    home: RegionId
    term: int = 0  # the highest one heard, as far as it is believed
    _claimed: int = 0  # by the owner, as it said it
    _ceiling: int = STEP  # of `term`, since `_stepped_at`
    _stepped_at: float = -inf
    _owner: RegionId | None = None  # whose it is; None while nobody has said so
    _heard_at: float = -inf

    def owner(self, now: float) -> RegionId | None:
        """The region that has adopted the replica; None while it is its own."""
        if self._owner in (None, self.home) or now - self._heard_at > ADOPTED_S:
            return None
        return self._owner

    def claim(self, owner: RegionId, term: int, now: float) -> None:
        """That region says that it owns the replica under this term; too high a one is none."""
        if term > TERM_MAX:
            return
        is_fresh = now - self._heard_at <= ADOPTED_S
        known = self._claimed if is_fresh else self.term
        if term > known or (owner == self._owner and term >= self.term):
            self._claimed, self._owner, self._heard_at = term, owner, now
            if now - self._stepped_at >= STEP_S:
                self._stepped_at, self._ceiling = now, self.term + STEP
            self.term = max(self.term, min(term, self._ceiling))

    def admits(self, owner: RegionId, term: int | None, now: float) -> bool:
        """Whether to take work from a router of `owner` that hands it over under this term."""
        adopter = self.owner(now)
        if adopter is None:
            return owner == self.home
        return owner == adopter and term is not None and term >= self._claimed
