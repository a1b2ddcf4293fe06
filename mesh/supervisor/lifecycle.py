"""The states of one supervised process, and when it is restarted. Pure: the time is an argument.

    WAITING    --started-->  STARTING  --became_ready-->  READY
    STARTING, READY  --ended-->  WAITING (to be restarted at `due`), or ENDED (not restarted)
    STARTING, READY  --stop-->   STOPPING (to be killed at `due`)  --ended-->  ENDED
    WAITING          --stop-->   ENDED

The wait before a restart doubles from a quarter of a second, so a program that dies at once costs
little; a run of half a minute clears the count. A program that never became ready is not
restarted: what it was started with is wrong.
"""

from dataclasses import dataclass
from enum import Enum, auto

FIRST_WAIT_S = 0.25
WAIT_MAX_S = 8.0
RESTARTS_MAX = 6  # in a row: about 16 s of trying
STEADY_S = 30.0


class ProcessPhase(Enum):
    """The states above."""

    WAITING = auto()
    STARTING = auto()
    READY = auto()
    STOPPING = auto()
    ENDED = auto()


@dataclass(slots=True)
class ProcessLifecycle:
    """One process and those that replace it."""

    restarts_max: int | None = RESTARTS_MAX  # in a row; None: no limit
    phase: ProcessPhase = ProcessPhase.WAITING
    was_ready: bool = False  # in any of its runs
    due: float | None = None  # when to restart or to kill it
    _started_at: float = 0.0
    _in_a_row: int = 0

    def started(self, now: float) -> None:
        assert self.phase is ProcessPhase.WAITING
        self.phase, self.due, self._started_at = ProcessPhase.STARTING, None, now

    def became_ready(self) -> bool:
        """It is ready; whether it was ready before."""
        again, self.was_ready = self.was_ready, True
        if self.phase is ProcessPhase.STARTING:
            self.phase = ProcessPhase.READY
        return again

    def ended(self, now: float) -> float | None:
        """It has ended, or could not be started. Seconds until its restart, or None."""
        wait_s = None
        if self.phase is not ProcessPhase.STOPPING and self.was_ready:
            wait_s = self._restart_wait_s(now - self._started_at)
        self.phase = ProcessPhase.ENDED if wait_s is None else ProcessPhase.WAITING
        self.due = None if wait_s is None else now + wait_s
        return wait_s

    def stop(self, now: float, grace_s: float | None) -> None:
        """Let it end, for good. `grace_s`: until it is killed; None: never."""
        if self.phase is ProcessPhase.WAITING:
            self.phase, self.due = ProcessPhase.ENDED, None
        elif self.phase is not ProcessPhase.ENDED:
            self.phase = ProcessPhase.STOPPING
            self.due = None if grace_s is None else now + grace_s

    def extend(self, by_s: float) -> None:
        """It is to be killed later, if at all."""
        if self.phase is ProcessPhase.STOPPING and self.due is not None:
            self.due += by_s

    def _restart_wait_s(self, ran_s: float) -> float | None:
        if ran_s >= STEADY_S:
            self._in_a_row = 0
        if self.restarts_max is not None and self._in_a_row >= self.restarts_max:
            return None
        self._in_a_row = min(self._in_a_row + 1, RESTARTS_MAX)  # more would change no wait
        return min(WAIT_MAX_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1))
