"""Places that refuse or fail work rest, longer each time in a row."""

from math import inf

PLACES_MAX = 16_384


class Backoff:
    """Of replicas, or of regions, by name."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._rests: dict[str, tuple[int, float]] = {}  # times in a row, and until when

    def __len__(self) -> int:
        return len(self._rests)

    def penalize(self, place: str, now: float) -> None:
        """It refused or failed work. Refusals of work sent before the rest began count once."""
        times, until = self._rests.get(place, (0, -inf))
        if now < until:
            return
        self._rests.pop(place, None)
        if len(self._rests) >= PLACES_MAX:
            del self._rests[next(iter(self._rests))]
        rest_s = min(self._most_s, self._first_s * 2.0 ** min(times, 30))
        self._rests[place] = times + 1, now + rest_s

    def answered(self, place: str) -> None:
        self._rests.pop(place, None)

    def rests(self, place: str, now: float) -> bool:
        known = self._rests.get(place)
        return known is not None and now < known[1]
