"""One origin's set as this router has it, and whether it is whole.

Whole means: everything up to the latest number heard of was taken in, and the origin is not
silent. Deltas that come early wait, so that what was only out of order mends itself within
GRACE_S; then the origin is asked, again every RETRY_S until it answers. An origin that is silent
is not asked: its next sign says what was missed. A new epoch is a new, empty set, because a router
that starts anew knows nothing of what it once told.
"""

from dataclasses import dataclass

from mesh.core.gossip.told import Origin, ToldPrefixes
from schemas.gossip import (
    BLOCKS_MAX,
    DELTA_BLOCKS_MAX,
    PART_BLOCKS_MAX,
    PARTS_MAX,
    TrieAsk,
    TrieDelta,
    TriePart,
)

AHEAD_MAX = 64  # early deltas that are kept; what was missed before them comes with the answer
GRACE_S = 0.1
RETRY_S = 0.5
SILENT_S = 3.0  # six signs of life
GONE_S = 60.0


@dataclass(slots=True)
class Snapshot:
    """Parts of a set on their way."""

    seq: int
    parts: int
    there: dict[int, tuple[int, ...]]


class Mirror:
    """One origin's. It writes to `told`; `wants` is asked at every tick."""

    def __init__(self, origin: Origin, told: ToldPrefixes) -> None:
        self._origin = origin
        self._told = told
        self._epoch = -1
        self._seq = 0  # taken in up to here
        self._latest = 0  # heard of
        self._ahead: dict[int, TrieDelta] = {}
        self._snapshot: Snapshot | None = None
        self._is_too_large = False
        self._hole_since: float | None = None
        self._tried_at = float("-inf")  # asked, or answered in part
        self._heard_at = float("-inf")

    def hear(self, delta: TrieDelta, now: float) -> None:
        """A delta, or a sign, of this origin."""
        if not self._is_current(delta.epoch, now):
            return
        self._latest = max(self._latest, delta.seq)
        size = len(delta.gained) + len(delta.lost)
        if 0 < size <= DELTA_BLOCKS_MAX and delta.seq > self._seq:
            if len(self._ahead) < AHEAD_MAX or delta.seq == self._seq + 1:
                self._ahead[delta.seq] = delta
            self._catch_up(now)
        self._judge(now)

    def hear_part(self, part: TriePart, now: float) -> None:
        """A part of its whole set."""
        fits = 0 <= part.part < part.parts <= PARTS_MAX and len(part.blocks) <= PART_BLOCKS_MAX
        if not fits or not self._is_current(part.epoch, now) or part.seq < self._seq:
            return
        self._latest = max(self._latest, part.seq)
        if self._seq < self._latest:
            self._collect(part, now)
        self._judge(now)

    def wants(self, now: float) -> TrieAsk | None:
        """The question to ask now, if there is a hole."""
        if now - self._heard_at > SILENT_S:
            self._told.trust(self._origin, False)
            return None
        is_due = self._hole_since is not None and now - self._hole_since >= GRACE_S
        if not is_due or now - self._tried_at < RETRY_S or self._is_too_large:
            return None
        self._tried_at = now
        return TrieAsk(self._origin.router, self._epoch, self._seq)

    def is_gone(self, now: float) -> bool:
        """Whether nothing was heard of it for so long that its set can be forgotten."""
        return now - self._heard_at > GONE_S

    def _is_current(self, epoch: int, now: float) -> bool:
        if epoch < self._epoch:
            return False
        self._heard_at = now
        if epoch > self._epoch:
            self._told.forget(self._origin)
            self._epoch, self._seq, self._latest = epoch, 0, 0
            self._ahead.clear()
            self._snapshot, self._hole_since, self._is_too_large = None, None, False
        return True

    def _judge(self, now: float) -> None:
        is_whole = self._seq == self._latest and not self._is_too_large
        self._told.trust(self._origin, is_whole)
        if is_whole:
            self._hole_since = None
        elif self._hole_since is None:
            self._hole_since = now

    def _catch_up(self, now: float) -> None:
        """Take in what follows without a hole."""
        while (delta := self._ahead.pop(self._seq + 1, None)) is not None:
            self._seq = delta.seq
            if self._hole_since is not None:  # the answer is coming
                self._tried_at = now
            self._told.remove(self._origin, delta.lost)
            self._add(delta.gained)

    def _collect(self, part: TriePart, now: float) -> None:
        snapshot = self._snapshot
        if snapshot is None or (snapshot.seq, snapshot.parts) != (part.seq, part.parts):
            snapshot = self._snapshot = Snapshot(part.seq, part.parts, {})
        snapshot.there[part.part] = part.blocks
        self._tried_at = now
        if len(snapshot.there) < snapshot.parts:
            return
        wanted = {block: None for blocks in snapshot.there.values() for block in blocks}
        known = self._told.blocks(self._origin)
        self._told.remove(self._origin, [block for block in known if block not in wanted])
        self._add(tuple(wanted))
        self._seq, self._snapshot = snapshot.seq, None
        self._ahead = {seq: delta for seq, delta in self._ahead.items() if seq > self._seq}
        self._catch_up(now)

    def _add(self, blocks: tuple[int, ...]) -> None:
        known = self._told.blocks(self._origin)
        new = sum(block not in known for block in blocks)
        if len(known) + new > BLOCKS_MAX + DELTA_BLOCKS_MAX:
            # More than an origin may have: nothing of this epoch is believed any more.
            self._is_too_large = True
        else:
            self._told.add(self._origin, blocks)
