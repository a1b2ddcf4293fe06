"""What a router says to its siblings: each prompt that it placed, and on which replica.

Said at once and whole, from a prompt's first block to its last, because every listener keeps an
index that evicts by age like the engine does: a prompt that is used again makes all of its path
young, at the listener as here. A prompt that was said a moment ago is not said again, so what a
burst of one prompt costs does not grow with the burst.

Who missed something is told all of the replicas that it was about, as it is by then. Rejected:
saying the deltas again. They would make old prompts young, and bring back what a replica has lost
since.

Rejected: saying only what is new to a replica, as peers are told. Listeners would believe that a
system prompt which everybody uses is the oldest thing there.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from mesh.core.gossip.told import Origin
from schemas.gossip import DELTA_BLOCKS_MAX, TrieDelta

AGAIN_S = 5.0
RECENT_MAX = 4096  # prompts of one replica
REMEMBERED_MAX = 4096  # deltas, by what they were about


class Placed:
    """One router's stream to its siblings; hears the index that its own policy keeps."""

    def __init__(self, origin: Origin, epoch: int, say: Callable[[TrieDelta], None]) -> None:
        self.seq = 0
        self._about: deque[str] = deque(maxlen=REMEMBERED_MAX)  # the replicas of the last deltas
        self._origin = origin
        self._epoch = epoch
        self._say = say
        self._said_at: dict[str, dict[int, float]] = {}  # by replica, by a prompt's last block
        self._now = 0.0

    def used(self, owner: str, hashes: Sequence[int], now: float) -> None:
        """A prompt was placed there."""
        self._now = now
        if not hashes:
            return
        said_at = self._said_at.setdefault(owner, {})
        if now - said_at.pop(hashes[-1], float("-inf")) < AGAIN_S:
            said_at[hashes[-1]] = now
            return
        said_at[hashes[-1]] = now
        if len(said_at) > RECENT_MAX:
            del said_at[next(iter(said_at))]
        # The end first: what is entered last is the youngest, and a path's beginning must be.
        for start in reversed(range(0, len(hashes), DELTA_BLOCKS_MAX)):
            self._tell(owner, gained=tuple(hashes[start : start + DELTA_BLOCKS_MAX]))

    def lost(self, owner: str, blocks: Sequence[int]) -> None:
        """These were never computed there."""
        self._said_at.pop(owner, None)
        for start in range(0, len(blocks), DELTA_BLOCKS_MAX):
            self._tell(owner, lost=tuple(blocks[start : start + DELTA_BLOCKS_MAX]))

    def missed(self, owner: str, at: float) -> None:
        """What was used last at that time or before has been evicted there."""
        self._said_at.pop(owner, None)
        self._tell(owner, missed_ms=max(0, round((self._now - at) * 1000)))

    def gone(self, owner: str) -> None:
        """Siblings see it themselves."""
        self._said_at.pop(owner, None)

    def tick(self, now: float) -> None:
        """Time has passed: ages are counted from here."""
        self._now = now

    def since(self, after: int) -> Collection[str] | None:
        """Replicas that deltas after that number were about; None if it is not known any more."""
        missing = self.seq - after
        if not 0 <= missing <= len(self._about):
            return None
        return {self._about[-number] for number in range(1, missing + 1)}

    def sign(self, is_warm: bool) -> TrieDelta:
        """Repeats the last number."""
        region, router = self._origin
        return TrieDelta(region, router, self._epoch, self.seq, (), (), is_cold=int(not is_warm))

    def _tell(
        self,
        replica: str,
        gained: tuple[int, ...] = (),
        lost: tuple[int, ...] = (),
        missed_ms: int = -1,
    ) -> None:
        self.seq += 1
        region, router = self._origin
        delta = TrieDelta(region, router, self._epoch, self.seq, gained, lost, replica, missed_ms)
        self._about.append(replica)
        self._say(delta)
