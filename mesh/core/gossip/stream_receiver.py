"""One origin's stream as received here, whether it is complete, and answers to routers that ask.

Complete means: everything up to the latest known number was taken in, and the origin is not silent.
Deltas that arrive early wait, so that reordering mends itself within GRACE_S; then the origin is
asked, again every RETRY_S until it answers. A silent origin is not asked: its next keepalive shows
what was missed. A new epoch is a new, empty set, because a router that starts anew has published
nothing. Where the set is kept, and what becomes of an incomplete one, is up to the `PrefixSet`.

`Repairs` sends answers at the pace that the link's budget allows, one per asker: a request that
arrives while its answer is being sent is ignored, so impatience costs no bytes. Budgets and limits
are per region, so a region whose routers all start at once takes nothing from the others.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mesh.core.gossip.remote_prefixes import Origin, PrefixSet, SetOutcome
from mesh.core.model.rates import ByteBudget
from schemas.gossip import (
    DELTA_BLOCKS_MAX,
    EVERYTHING,
    PART_BLOCKS_MAX,
    PARTS_MAX,
    PEERS,
    SIBLING_PARTS_MAX,
    SIBLINGS,
    TrieAnswer,
    TrieAsk,
    TrieDelta,
    TriePart,
    size_bytes,
)
from schemas.ids import REGION_ROUTERS_MAX, RegionId

ASKERS_MAX = 256
REGIONS_MAX = 256
BURST_S = 4.0
NO_LESS: Mapping[RegionId, float] = {}


@dataclass(slots=True)
class Repair:
    """What is still to be sent to one asker."""

    region: RegionId
    left: deque[TrieAnswer]


class Repairs:
    """By the inbox that the answer goes to."""

    def __init__(self, bytes_per_s: float, less: Mapping[RegionId, float] = NO_LESS) -> None:
        """`bytes_per_s`: to each region at most; `less`: to some."""
        self._less = less
        self._bytes_per_s = bytes_per_s
        self._routers = 1
        self._of: dict[str, Repair] = {}
        self._budgets: dict[RegionId, ByteBudget] = {}

    def share(self, routers: int) -> None:
        """Divide the links' budgets among so many routers of this region."""
        self._routers = routers
        for region, budget in self._budgets.items():
            budget.share(routers, self._to(region), BURST_S)

    def has_room(self, inbox: str, region: RegionId) -> bool:
        """Whether an answer to that inbox would be taken: not while one is being sent there."""
        if inbox in self._of or len(self._of) >= ASKERS_MAX:
            return False
        return sum(repair.region == region for repair in self._of.values()) < REGION_ROUTERS_MAX

    def put(self, inbox: str, region: RegionId, answers: Sequence[TrieAnswer]) -> None:
        """Send this to that inbox as the budget allows. The caller has checked `has_room`."""
        self._of[inbox] = Repair(region, deque(answers))

    def due(self, now: float) -> Iterator[tuple[RegionId, str, TrieAnswer]]:
        """What may be sent now: region, inbox and message."""
        for inbox, repair in list(self._of.items()):
            budget = self._budget(repair.region)
            while repair.left and budget.spend(size_bytes(repair.left[0]), now):
                yield repair.region, inbox, repair.left.popleft()
            if not repair.left:
                del self._of[inbox]

    def _to(self, region: RegionId) -> float:
        return min(self._bytes_per_s, self._less.get(region, self._bytes_per_s))

    def _budget(self, region: RegionId) -> ByteBudget:
        budget = self._budgets.get(region)
        if budget is None:
            if len(self._budgets) >= REGIONS_MAX:
                del self._budgets[next(iter(self._budgets))]
            bytes_per_s = self._to(region) / self._routers
            budget = self._budgets[region] = ByteBudget(bytes_per_s, bytes_per_s * BURST_S)
        return budget


AHEAD_MAX = 64  # early deltas that are kept; those missing before them come with the answer
GRACE_S = 0.1
RETRY_S = 0.5
SILENT_S = 3.0  # six keepalives; then any epoch counts, so that a false one is forgotten
GONE_S = 60.0
PART_LIMITS = {  # parts of a set, and blocks of each
    PEERS: (PARTS_MAX, PART_BLOCKS_MAX),
    SIBLINGS: (SIBLING_PARTS_MAX, DELTA_BLOCKS_MAX),
}


@dataclass(slots=True)
class Snapshot:
    """A whole set of which parts have arrived."""

    seq: int
    parts: int
    is_all: int
    there: dict[int, TriePart]

    def is_other(self, part: TriePart) -> bool:
        return (self.seq, self.parts, self.is_all) != (part.seq, part.parts, part.is_all)


class StreamReceiver:
    """One origin's stream, written to a `PrefixSet`."""

    def __init__(self, origin: Origin, prefixes: PrefixSet, stream: int = PEERS) -> None:
        self._origin = origin
        self._prefixes = prefixes
        self._stream = stream
        self._parts_max, self._part_blocks_max = PART_LIMITS[stream]
        self._epoch = -1
        self._seq = 0  # taken in up to here
        self._latest = 0  # known
        self._latest_at = float("-inf")  # since when
        self._ahead: dict[int, TrieDelta] = {}
        self._snapshot: Snapshot | None = None
        self._requests_all = False  # whatever the numbers are
        self._is_too_large = False
        self._gap_since: float | None = None
        self._tried_at = float("-inf")  # asked, or answered in part
        self._asked_at: float | None = None  # first, for what was not answered in full
        self._received_at = float("-inf")

    @property
    def is_whole(self) -> bool:
        return not (self.has_gap or self._is_too_large or self._requests_all)

    @property
    def has_gap(self) -> bool:
        return self._seq != self._latest

    def join(self, delta: TrieDelta, now: float) -> None:
        """Begin in the middle of its stream, with this delta."""
        if self._is_current(delta.epoch, now):
            self._seq = self._latest = delta.seq if delta.is_sign else delta.seq - 1
            self._latest_at = now
            self.receive(delta, now)

    def receive(self, delta: TrieDelta, now: float) -> None:
        """A delta, or a keepalive, of this origin."""
        if not self._is_current(delta.epoch, now):
            return
        self._note(delta.seq, now)
        fits = len(delta.gained) + len(delta.lost) <= DELTA_BLOCKS_MAX
        if fits and not delta.is_sign and delta.seq > self._seq:
            if len(self._ahead) < AHEAD_MAX or delta.seq == self._seq + 1:
                self._ahead[delta.seq] = delta
            self._catch_up(now)
        self._update_trust(now)

    def miss(self, delta: TrieDelta, now: float) -> None:
        """A delta above the origin's limit: only its number counts."""
        if self._is_current(delta.epoch, now):
            self._note(delta.seq, now)
            self._update_trust(now)

    def receive_part(self, part: TriePart, now: float) -> bool:
        """A part of its whole set; True if the set is complete now."""
        fits = 0 <= part.part < part.parts <= self._parts_max
        fits = fits and len(part.blocks) <= self._part_blocks_max
        if not fits or not self._is_current(part.epoch, now):
            return False
        if part.seq < self._seq and not (self._requests_all and part.is_all):
            return False
        self._note(part.seq, now)
        is_complete = not self.is_whole and self._collect(part, now)
        self._update_trust(now)
        return is_complete

    def request_all(self, now: float) -> None:
        """Request its whole set, from the next request on."""
        self._requests_all = True
        self._update_trust(now)

    def repair_request(self, now: float) -> TrieAsk | None:
        """The request to send now, if something is missing and it is due."""
        if now - self._received_at > SILENT_S:
            self._prefixes.trust(False)
            return None
        is_due = self._gap_since is not None and now - self._gap_since >= GRACE_S
        if not is_due or now - self._tried_at < RETRY_S or self._is_too_large:
            return None
        return self.request(now)

    def request(self, now: float) -> TrieAsk:
        """The request to send, due or not."""
        self._tried_at = now
        if self._asked_at is None:
            self._asked_at = now
        # The gap first: no router sends everything while its own streams have gaps.
        after = self._seq if self.has_gap or not self._requests_all else EVERYTHING
        return TrieAsk(self._origin.router, self._epoch, after, self._stream)

    def is_silent(self, now: float) -> bool:
        """Whether some keepalives of it are missing."""
        return now - self._received_at > SILENT_S

    def is_gone(self, now: float) -> bool:
        """Whether it has been silent for so long that its set can be dropped."""
        return now - self._received_at > GONE_S

    def forget(self) -> None:
        self._prefixes.forget()

    def _is_current(self, epoch: int, now: float) -> bool:
        if epoch < self._epoch and not self.is_silent(now):
            return False
        self._received_at = now
        if epoch != self._epoch:
            self._begin(epoch)
        return True

    def _begin(self, epoch: int) -> None:
        """A new epoch: its set is empty."""
        self._prefixes.forget()
        self._epoch, self._seq, self._latest = epoch, 0, 0
        self._ahead.clear()
        self._snapshot, self._gap_since, self._is_too_large = None, None, False
        self._asked_at = None

    def _note(self, seq: int, now: float) -> None:
        """It named this number. A higher one that was not repeated for long was not its own."""
        if seq < self._latest and now - self._latest_at > SILENT_S:
            if seq < self._seq:
                self._begin(self._epoch)
            self._ahead = {number: d for number, d in self._ahead.items() if number <= seq}
            self._latest = max(seq, self._seq)
        if seq >= self._latest:
            self._latest, self._latest_at = seq, now

    def _update_trust(self, now: float) -> None:
        self._prefixes.trust(self.is_whole)
        if self.is_whole:
            self._gap_since = self._asked_at = None
        elif self._gap_since is None:
            self._gap_since = now

    def _catch_up(self, now: float) -> None:
        """Take in what follows without a gap."""
        while (delta := self._ahead.pop(self._seq + 1, None)) is not None:
            self._seq = delta.seq
            if self._gap_since is not None:  # the answer is coming
                self._tried_at = now
            if not self._prefixes.take(delta, now):
                # More than an origin may have: nothing of this epoch counts any more.
                self._is_too_large = True

    def _collect(self, part: TriePart, now: float) -> bool:
        snapshot = self._snapshot
        if snapshot is None or snapshot.is_other(part):
            snapshot = self._snapshot = Snapshot(part.seq, part.parts, part.is_all, {})
        snapshot.there[part.part] = part
        self._tried_at = now
        if len(snapshot.there) < snapshot.parts:
            return False
        parts = [snapshot.there[number] for number in range(snapshot.parts)]
        put = self._prefixes.put(parts, now if self._asked_at is None else self._asked_at, now)
        if put is SetOutcome.TOO_LARGE:
            self._is_too_large = True
        self._seq, self._snapshot, self._asked_at = max(self._seq, snapshot.seq), None, None
        self._requests_all = put is SetOutcome.IN_PART or (self._requests_all and not part.is_all)
        self._ahead = {seq: delta for seq, delta in self._ahead.items() if seq > self._seq}
        self._catch_up(now)
        return bool(part.is_all)
