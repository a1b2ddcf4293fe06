"""Pauses of places that refused or failed work."""

from math import inf

PLACES_MAX = 16_384  # that wait after a refusal or failure


class Backoff:
    """Places (replicas or regions, by name) that refused or failed work get none for a while.

    Each time in a row the wait is longer.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._waits: dict[str, tuple[int, float]] = {}  # times in a row, and until when

    def __len__(self) -> int:
        return len(self._waits)

    def penalize(self, place: str, now: float) -> None:
        """It refused or failed work. Refusals of work sent before the wait began count once."""
        times, until = self._waits.get(place, (0, -inf))
        if now < until:
            return
        self._waits.pop(place, None)
        if len(self._waits) >= PLACES_MAX:
            del self._waits[next(iter(self._waits))]
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(times, 30))
        self._waits[place] = times + 1, now + wait_s

    def answered(self, place: str) -> None:
        self._waits.pop(place, None)

    def is_waiting(self, place: str, now: float) -> bool:
        """Whether it gets no work yet."""
        known = self._waits.get(place)
        return known is not None and now < known[1]
