"""Whether somebody far away is alive, told from the gaps between what it says.

Green while digests come as they should, yellow when some are missing, red when so many are that
it gets no work. Nobody is told by others that a third one is down: each router judges by what it
hears itself, so there is no rumour to refute. What SWIM needs incarnation numbers for is left to
the digests' own (epoch, seq): the next one that is newer than the last heard makes it green at
once, a late one of an earlier life makes it nothing, and after a silence any new life counts,
whatever its host's clock says, because what was said before the silence is forgotten by then.

Rejected: a failure detector that learns each peer's cadence (phi accrual). Digests leave by a
clock of our own making, so the gap that matters is known beforehand.
Source: SWIM (Das et al. 2002) 4.2; SkyWalker 3.3 for what a peer must say to be given work.
"""

from schemas.state import Health


def health(gap_s: float, late_s: float, lost_s: float) -> Health:
    """The colour of a gap since the last word, in seconds; infinite if there was none."""
    if gap_s > lost_s:
        return Health.RED
    return Health.YELLOW if gap_s > late_s else Health.GREEN
