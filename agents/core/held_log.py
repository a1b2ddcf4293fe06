"""Numbers the changes of what the engine holds, and bounds how much of them is published.

Changes wait, one for each text block, until they are due; what changes back and forth meanwhile
costs once. A delta has at most HASHES_MAX blocks, all together BLOCKS_PER_S a second with a burst
of BURST_S: a replica that computes 20,000 new tokens a second changes about 700. The whole set is
published at most every WHOLE_S, and at that rate beside deltas, whoever asks.
"""

from collections.abc import Iterable

from agents.core.held_blocks import NOT_HELD, HeldBlocks
from agents.core.kv_events import Tier
from schemas.held import HASHES_MAX, PARTS_MAX, HeldDelta, HeldPart

BLOCKS_PER_S = 4096.0  # 36 KiB
BURST_S = 4.0
WHOLE_S = 2.0


class HeldLog:
    """What one agent publishes of one engine."""

    def __init__(self, held: HeldBlocks, epoch: int) -> None:
        self._held, self._epoch = held, epoch
        self.seq = 0  # of the last delta
        self.published = 0  # blocks, in all
        self._left, self._left_at = BLOCKS_PER_S * BURST_S, float("-inf")
        self._is_asked = False
        self._whole_from = float("-inf")

    def asked(self, epoch: int) -> None:
        """A router lacks deltas."""
        self._is_asked = self._is_asked or epoch == self._epoch

    def due(self, now: float) -> list[HeldDelta | HeldPart]:
        """What is to be published now; call it some fifty times a second."""
        messages: list[HeldDelta | HeldPart] = []
        self._refill(now)
        held = self._held
        while (held.changes or held.cleared) and self._left > 0.0:
            taken = [(text, held.changes.pop(text)) for text in list(held.changes)[:HASHES_MAX]]
            self.seq += 1
            self._spend(len(taken))
            cleared, held.cleared = int(held.cleared), False
            gpu, cpu, disk = _by_tier(taken)
            lost = tuple(text for text, tier in taken if tier == NOT_HELD)
            messages.append(HeldDelta(self._epoch, self.seq, gpu, cpu, disk, lost, cleared))
        if self._is_asked and now >= self._whole_from:
            self._is_asked = False
            messages += self._whole(now)
        return messages

    def _whole(self, now: float) -> list[HeldPart]:
        """In parts. Changes that wait are in it, and are repeated later.

        Deltas don't wait for it: whoever asks could keep evictions from being published.
        """
        held = list(self._held.held())[-HASHES_MAX * PARTS_MAX :]
        self.published += len(held)
        self._whole_from = now + max(WHOLE_S, len(held) / BLOCKS_PER_S)
        pieces = [held[at : at + HASHES_MAX] for at in range(0, len(held), HASHES_MAX)] or [[]]
        return [
            HeldPart(self._epoch, self.seq, part, len(pieces), *_by_tier(piece))
            for part, piece in enumerate(pieces)
        ]

    def _refill(self, now: float) -> None:
        most = BLOCKS_PER_S * BURST_S
        self._left = min(most, self._left + BLOCKS_PER_S * min(BURST_S, now - self._left_at))
        self._left_at = now

    def _spend(self, blocks: int) -> None:
        self._left -= blocks
        self.published += blocks


def _by_tier(
    taken: Iterable[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    gpu, cpu, disk = (tuple(text for text, at in taken if at == tier) for tier in Tier)
    return gpu, cpu, disk
