"""The engine's clock beside the world's: one rate while all is well, a slower one in a fault."""

from collections.abc import Callable


class EngineClock:
    """Maps the world's seconds to the engine's; 0 stands still. Never goes back."""

    __slots__ = ("_anchor", "_latest", "_rate", "_world", "_world_anchor")

    def __init__(self, world: Callable[[], float]) -> None:
        self._world = world
        self._rate = 1.0
        self._anchor = self._world_anchor = self._latest = 0.0

    @property
    def stands_still(self) -> bool:
        """Whether nothing can happen in the engine."""
        return self._rate == 0.0

    def now(self, at_least: float = 0.0) -> float:
        """The engine's time; `at_least` what it woke up for, which rounding must not miss."""
        now = self._anchor + (self._world() - self._world_anchor) * self._rate
        if at_least > now:
            now = at_least
        if now > self._latest:
            self._latest = now
        return self._latest

    def set_rate(self, rate: float) -> None:
        """From now on so many engine seconds pass in one of the world's."""
        self._anchor, self._world_anchor = self.now(), self._world()
        self._rate = rate

    def world_at(self, at: float) -> float:
        """When the engine's clock will show `at`. Only while it moves."""
        return self._world_anchor + (at - self._anchor) / self._rate
