"""What a router publishes of the prefixes that its region's replicas hold: to peers, to siblings.

`OutgoingPrefixes` is the set for peers: what is published of it, and which blocks come next. The
index of the policy that places feeds it: `used` with every prompt that a replica holds from now on,
`lost` when the last replica drops a block. A gain and a loss between two deltas cancel out. Blocks
worth most to peers go first: those that many prompts shared, and recently. A block's value is its
uses, each halved every HALF_LIFE_S; new uses weigh more and more instead of old ones less and less,
so values need no update. A parent is used whenever its child is, so it is never worth less, and
among equals the order of paths is kept. Blocks that don't get their turn are dropped, and come back
with their next use. Each block goes with the replicas that hold it; if others do later, it is
gained again. Only uses that peers may know of name a replica, so a block may be held by more.

`DeltaPublisher` numbers the deltas: one every `trie_s` while something has changed, as large as the
budget allows; otherwise a keepalive every SIGN_S that repeats the last number. A peer that asks
gets the deltas it missed, as far as they are kept and shorter than the whole set, else the set.

`SiblingPublisher` publishes each prompt that this router placed, with its replica, with the next
event and whole, because every sibling's index evicts by age like the engine: a prompt that is used
again makes all of its path young there as here. A prompt published a moment ago is not published
again. A sibling that missed something gets all of the replicas concerned, as of then.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nlargest
from itertools import filterfalse, islice, repeat

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.gossip.replica_names import NameBits, as_sent
from mesh.core.model.rates import ByteBudget
from schemas.gossip import (
    BLOCK_BYTES,
    DELTA_BLOCKS_MAX,
    HOLDER_NAMES_MAX,
    MESSAGE_BYTES,
    PART_BLOCKS_MAX,
    TrieAnswer,
    TrieAsk,
    TrieDelta,
    TriePart,
    holder_bytes,
    size_bytes,
)

WAITING_MAX = 16_384
DROPPED_AT_ONCE = 1024  # of those that wait, when they are too many: each time costs a search
HALF_LIFE_S = 60.0
RESCALE_HALF_LIVES = 64.0


class OutgoingPrefixes:
    """One router's set: what is published of it, and what is waiting to be."""

    def __init__(self, blocks_max: int) -> None:
        """`blocks_max`: most blocks that are published at a time, the longest unused out first."""
        self.is_paused = False  # for uses by requests that not all peers may know of
        self.dropped = 0  # blocks that waited for their turn in vain, since the start
        # Of some blocks, those that no sibling has published as held by a replica; None without
        # siblings.
        self.unpublished: Callable[[list[int], str], list[int]] | None = None
        self._blocks_max = blocks_max
        self._replicas = NameBits()
        self._published: dict[int, int] = {}  # and their holders; the longest unused first
        self._waiting: dict[int, float] = {}  # and their values
        self._waiting_at: dict[int, int] = {}  # the holders of these
        self._moved: dict[int, None] = {}  # published, with other holders by now
        self._scaled_at = 0.0  # when a use weighed 1
        self._lost: dict[int, None] = {}  # and still in `_published`

    def __len__(self) -> int:
        return len(self._published)

    @property
    def published(self) -> tuple[int, ...]:
        """The set as peers have it after the last delta."""
        return tuple(self._published)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._lost and not self._moved

    @property
    def block_bytes(self) -> int:
        """What a block and its holders take in a message, at most."""
        return BLOCK_BYTES + (holder_bytes(len(self._replicas)) if len(self._replicas) else 0)

    @property
    def head_bytes(self) -> int:
        """What a message takes beside its blocks, at most."""
        return MESSAGE_BYTES + self._replicas.chars_at_most(HOLDER_NAMES_MAX)

    def used(self, hashes: Sequence[int], now: float, replica: str = "") -> None:
        """That replica of this region holds this prompt from now on; "": one that is not named."""
        if self.is_paused:
            return
        bit = self._replicas.bit(replica) if replica else 0
        fresh = list(filterfalse(self._published.__contains__, hashes))
        if len(fresh) < len(hashes):
            self._touch(hashes, bit)
        if self.unpublished is not None:
            fresh = self.unpublished(fresh, replica)
        if fresh:
            self._enqueue(fresh, self._weight(now), bit)

    def _enqueue(self, blocks: Sequence[int], weight: float, bit: int) -> None:
        waiting, at = self._waiting, self._waiting_at
        if waiting.keys().isdisjoint(blocks):
            waiting.update(dict.fromkeys(blocks, weight))
            at.update(dict.fromkeys(blocks, bit))
        else:
            values = list(map(weight.__add__, map(waiting.pop, blocks, repeat(0.0))))
            waiting.update(zip(blocks, values, strict=True))  # behind all others
            holders = list(map(bit.__or__, map(at.get, blocks, repeat(0))))
            at.update(zip(blocks, holders, strict=True))
        if len(waiting) > WAITING_MAX:
            oldest = _first(waiting, len(waiting) - WAITING_MAX + DROPPED_AT_ONCE)
            for block in oldest:
                del waiting[block], at[block]
            self.dropped += len(oldest)

    def _weight(self, now: float) -> float:
        """Of a use now."""
        half_lives = (now - self._scaled_at) / HALF_LIFE_S
        if half_lives > RESCALE_HALF_LIVES:
            self._scaled_at = now
            scale = 2.0 ** -min(half_lives, 1000.0)
            self._waiting = {block: value * scale for block, value in self._waiting.items()}
            return 1.0
        return float(2.0**half_lives)

    def _touch(self, hashes: Sequence[int], bit: int) -> None:
        published, lost = self._published, self._lost
        # Leaf first, root last: then a parent is always younger than its children.
        for block in reversed(hashes):
            holders = published.pop(block, None)
            if holders is not None:
                published[block] = holders | bit
                if bit & ~holders:
                    self._moved[block] = None
        if lost:
            for block in hashes:
                lost.pop(block, None)

    def lost(self, blocks: Iterable[int]) -> None:
        """No replica of this region holds these blocks any more."""
        waiting, published, lost = self._waiting, self._published, self._lost
        for block in blocks:
            if waiting.pop(block, None) is not None:
                del self._waiting_at[block]
            if block in published:
                lost[block] = None
                if published[block]:  # should it be held again, those here before hold it no more
                    published[block] = 0
                    self._moved[block] = None

    def left(self, replica: str, blocks: Iterable[int]) -> None:
        """That replica holds these no more; others do."""
        if not (bit := self._replicas.known(replica)):
            return
        waiting_at, published = self._waiting_at, self._published
        for block in blocks:
            if waiting_at.get(block, 0) & bit:
                waiting_at[block] &= ~bit
            elif published.get(block, 0) & bit:
                published[block] &= ~bit
                self._moved[block] = None

    def gone(self, replica: str) -> None:
        """That replica holds nothing any more."""
        self._replicas.free(replica)

    def published_by_sibling(
        self, blocks: Sequence[int], held_by: Sequence[Collection[str]]
    ) -> None:
        """Another router of this region has just published them: once is enough.

        `held_by`: the holders that it named.
        """
        waiting_at = self._waiting_at
        for block, names in zip(blocks, held_by, strict=True):
            if block in waiting_at and all(
                name in names for name in self._replicas.names(waiting_at[block])
            ):
                del self._waiting[block], waiting_at[block]

    def keep_only(self, is_held: Callable[[int], bool]) -> None:
        """Another policy's index feeds this from now on: what is not in it is published no more."""
        self.lost([*filterfalse(is_held, [*self._published, *self._waiting])])

    def inherit(self, blocks: Sequence[int]) -> None:
        """Held here, and published by a router that is gone: to be published after all others."""
        waiting = self._waiting
        for block in blocks[-(WAITING_MAX - len(waiting)) :] if len(waiting) < WAITING_MAX else ():
            if block not in self._published:
                waiting.setdefault(block, 0.0)
                self._waiting_at.setdefault(block, 0)

    def holders(self, blocks: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Of published blocks, as a message has them."""
        return as_sent([self._published.get(block, 0) for block in blocks], self._replicas.names)

    def take(self, blocks_max: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """At most so many blocks, gained and lost, to be published now; losses first.

        Those that have other holders come last, as gained again.
        """
        lost = self._take_lost(blocks_max)
        count = min(blocks_max - len(lost), self._blocks_max)
        gained: tuple[int, ...] = ()
        if count > 0:
            gained = tuple(nlargest(count, self._waiting, key=self._waiting.__getitem__))
        for block in reversed(gained):
            del self._waiting[block]
            self._published[block] = self._waiting_at.pop(block)
        room = blocks_max - len(lost) - len(gained)
        for block in _first(self._published, len(self._published) - self._blocks_max):
            self._lost[block] = None
        more = self._take_lost(room)
        moved = _first(self._moved, room - len(more))
        for block in moved:
            del self._moved[block]
        return gained + moved, lost + more

    def _take_lost(self, blocks_max: int) -> tuple[int, ...]:
        lost = _first(self._lost, blocks_max)
        for block in lost:
            del self._lost[block], self._published[block]
            self._moved.pop(block, None)
        return lost


def _first(blocks: Iterable[int], count: int) -> tuple[int, ...]:
    # All in one go: a dict's iterator skips what was deleted at its front, every time anew.
    return tuple(islice(blocks, max(0, count)))


class DeltaLog:
    """The newest deltas: so many, of so many blocks together."""

    def __init__(self, deltas_max: int, blocks_max: int) -> None:
        self._deltas_max = deltas_max
        self._blocks_max = blocks_max
        self._deltas: deque[TrieDelta] = deque()
        self._blocks = 0

    def keep(self, delta: TrieDelta) -> None:
        self._deltas.append(delta)
        self._blocks += _blocks(delta)
        while len(self._deltas) > self._deltas_max or self._blocks > self._blocks_max:
            self._blocks -= _blocks(self._deltas.popleft())

    def since(self, after: int, seq: int) -> Sequence[TrieDelta] | None:
        """Those after number `after` up to the last one, `seq`; None if one is kept no more."""
        if not 0 <= after <= seq:
            return None
        missing = [delta for delta in self._deltas if delta.seq > after]
        return missing if len(missing) == seq - after else None


def _blocks(delta: TrieDelta) -> int:
    return len(delta.gained) + len(delta.lost)


SIGN_S, SIGN_REST_S = 0.5, 1.0  # and while nothing is under way in the region
BURST_S = 4.0  # of the budget, after quiet times
LOG_DELTAS_MAX = 256  # at four a second, a minute
LOG_BLOCKS_MAX = 32_768
DELTAS_AT_ONCE_MAX = 16


class DeltaPublisher:
    """One router's stream of deltas to peers."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        outgoing: OutgoingPrefixes,
        *,
        trie_s: float,
        bytes_per_s: float,
    ) -> None:
        self._origin = origin
        self._epoch = epoch
        self._outgoing = outgoing
        self._trie_s = trie_s
        self._bytes_per_s, self._burst_s = bytes_per_s, max(BURST_S, 2.0 * trie_s)
        self._budget = ByteBudget(bytes_per_s, bytes_per_s * self._burst_s)
        self._seq = 0
        self._log = DeltaLog(LOG_DELTAS_MAX, LOG_BLOCKS_MAX)
        self._delta_at = self._message_at = float("-inf")

    def share(self, routers: int) -> None:
        """Divide the link's budget among so many routers of this region."""
        self._budget.share(routers, self._bytes_per_s, self._burst_s)

    def due(self, now: float, *, rests: bool = False) -> list[TrieDelta]:
        """What to publish at this tick, in order. `rests`: nothing is under way in the region."""
        deltas = self._deltas(now) if now - self._delta_at >= self._trie_s else []
        if not deltas and now - self._message_at >= (SIGN_REST_S if rests else SIGN_S):
            sign = self._delta((), ())
            self._budget.spend(size_bytes(sign), now)
            deltas = [sign]
        if deltas:
            self._message_at = now
        return deltas

    def answer(self, ask: TrieAsk) -> list[TrieAnswer]:
        """What a peer missed."""
        if ask.epoch == self._epoch:
            missing = self._log.since(ask.after, self._seq)
            outgoing = self._outgoing
            whole_bytes = outgoing.head_bytes + outgoing.block_bytes * len(outgoing)
            if missing is not None and sum(map(size_bytes, missing)) <= whole_bytes:
                return [*missing] or [self._delta((), ())]
        return [*self._snapshot()]

    def _deltas(self, now: float) -> list[TrieDelta]:
        deltas: list[TrieDelta] = []
        while not self._outgoing.is_empty and len(deltas) < DELTAS_AT_ONCE_MAX:
            left_bytes = self._budget.left(now) - self._outgoing.head_bytes
            affordable = int(left_bytes / self._outgoing.block_bytes)
            gained, lost = self._outgoing.take(min(affordable, DELTA_BLOCKS_MAX))
            if not gained and not lost:
                break
            self._seq += 1
            delta = self._delta(gained, lost)
            self._budget.spend(size_bytes(delta), now)
            self._log.keep(delta)
            deltas.append(delta)
        if deltas:
            self._delta_at = now
        return deltas

    def _delta(self, gained: tuple[int, ...], lost: tuple[int, ...]) -> TrieDelta:
        replicas, holders = self._outgoing.holders(gained)
        return TrieDelta(
            *self._origin,
            self._epoch,
            self._seq,
            gained,
            lost,
            replicas=replicas,
            holders=holders,
        )

    def _snapshot(self) -> list[TriePart]:
        blocks = self._outgoing.published
        cuts = range(0, max(1, len(blocks)), PART_BLOCKS_MAX)
        parts = [blocks[start : start + PART_BLOCKS_MAX] for start in cuts]
        held = [self._outgoing.holders(part) for part in parts]
        return [
            TriePart(
                *self._origin,
                self._epoch,
                self._seq,
                number,
                len(cuts),
                part,
                replicas=replicas,
                holders=holders,
            )
            for number, (part, (replicas, holders)) in enumerate(zip(parts, held, strict=True))
        ]


AGAIN_S = 5.0
RECENT_MAX = 4096  # prompts of one replica
REMEMBERED_MAX = 4096  # deltas, by their replicas


class SiblingPublisher:
    """One router's stream to its siblings; listens to the index of its main policy."""

    def __init__(self, origin: Origin, epoch: int, publish: Callable[[TrieDelta], None]) -> None:
        self.seq = 0
        self.now = 0.0  # of the last tick or use; ages are counted from here
        self._about: deque[str] = deque(maxlen=REMEMBERED_MAX)  # the replicas of the last deltas
        self._origin = origin
        self._epoch = epoch
        self._publish = publish
        self._used_at: dict[str, dict[int, float]] = {}  # by replica, by a prompt's last block

    def used(self, owner: str, hashes: Sequence[int], now: float) -> None:
        """A prompt was placed there."""
        self.now = now
        if not hashes:
            return
        used_at = self._used_at.setdefault(owner, {})
        before = used_at.pop(hashes[-1], float("-inf"))
        used_at[hashes[-1]] = now
        if now - before < AGAIN_S:
            return
        if len(used_at) > RECENT_MAX:
            del used_at[next(iter(used_at))]
        # The end first: what is entered last is the youngest, and a path's beginning must be.
        for start in reversed(range(0, len(hashes), DELTA_BLOCKS_MAX)):
            self._delta(owner, gained=tuple(hashes[start : start + DELTA_BLOCKS_MAX]))

    def lost(self, owner: str, blocks: Sequence[int]) -> None:
        """These were never computed there."""
        self._used_at.pop(owner, None)
        for start in range(0, len(blocks), DELTA_BLOCKS_MAX):
            self._delta(owner, lost=tuple(blocks[start : start + DELTA_BLOCKS_MAX]))

    def missed(self, owner: str, at: float) -> None:
        """Blocks used last at that time or before have been evicted there."""
        self._used_at.pop(owner, None)
        self._delta(owner, missed_ms=max(0, round((self.now - at) * 1000)))

    def gone(self, owner: str) -> None:
        """Siblings see it themselves."""
        self._used_at.pop(owner, None)

    def since(self, after: int) -> Collection[str] | None:
        """Replicas that deltas after that number were about; None if unknown by now."""
        missing = self.seq - after
        if not 0 <= missing <= len(self._about):
            return None
        return {self._about[-number] for number in range(1, missing + 1)}

    def sign(self, is_warm: bool) -> TrieDelta:
        """A keepalive that repeats the last number."""
        return TrieDelta(*self._origin, self._epoch, self.seq, (), (), is_cold=int(not is_warm))

    def _delta(
        self,
        replica: str,
        gained: tuple[int, ...] = (),
        lost: tuple[int, ...] = (),
        missed_ms: int = -1,
    ) -> None:
        self.seq += 1
        delta = TrieDelta(*self._origin, self._epoch, self.seq, gained, lost, replica, missed_ms)
        self._about.append(replica)
        self._publish(delta)
