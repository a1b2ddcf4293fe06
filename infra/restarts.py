"""When a program that ended by itself is started again, and when no more.

Waits double from a quarter of a second, so that a program which dies at once costs little; a
program that ran for half a minute has earned a fresh count. One that never became ready is not
tried again: what is wrong with it is wrong with how it was started.
"""

from dataclasses import dataclass

FIRST_WAIT_S = 0.25
WAIT_MAX_S = 8.0
RESTARTS_MAX = 6  # in a row: about 16 s of trying
STEADY_S = 30.0


@dataclass(slots=True)
class Restarts:
    """The restart count of one program."""

    most: int | None = RESTARTS_MAX  # None: as long as it takes, where nobody looks on
    in_a_row: int = 0

    def after_death(self, ran_s: float, *, was_ready: bool) -> float | None:
        """Seconds to wait before the next start, or None: let it be."""
        if not was_ready:
            return None
        if ran_s >= STEADY_S:
            self.in_a_row = 0
        if self.most is not None and self.in_a_row >= self.most:
            return None
        self.in_a_row = min(self.in_a_row + 1, RESTARTS_MAX)  # more would change no wait
        return min(WAIT_MAX_S, FIRST_WAIT_S * 2.0 ** (self.in_a_row - 1))
