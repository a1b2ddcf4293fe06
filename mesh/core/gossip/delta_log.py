"""The last deltas that a router told, to be said again to those who missed some."""

from collections import deque
from collections.abc import Sequence

from schemas.gossip import TrieDelta


class DeltaLog:
    """The newest so many, of so many blocks together."""

    def __init__(self, deltas_max: int, blocks_max: int) -> None:
        self._deltas_max = deltas_max
        self._blocks_max = blocks_max
        self._deltas: deque[TrieDelta] = deque()
        self._blocks = 0

    def keep(self, delta: TrieDelta) -> None:
        """The next one, in order."""
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
