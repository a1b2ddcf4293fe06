"""A run of equal iterations, and when each of them ends.

While a batch only decodes, nothing changes from one iteration to the next but the contexts,
which grow by one token per sequence. So iteration i lasts `first_s + i · growth_s`, and the
end of the k-th is a quadratic in k. A driver that wants every token steps from end to end; one
that wants only arrivals and departures (a discrete-event simulator) jumps over thousands of
iterations in O(1). Both read the same formula from the same start, so both see the same times
to the last bit.

Rejected: adding up iteration by iteration and calling the jump an approximation of it.
"""

import math


class Stretch:
    """`rounds` iterations from `start_s`; `done` of them are settled."""

    __slots__ = ("done", "end_s", "first_s", "growth_s", "rounds", "start_s")

    def __init__(self, start_s: float, first_s: float, growth_s: float, rounds: int) -> None:
        self.start_s = start_s
        self.first_s = first_s
        self.growth_s = growth_s
        self.rounds = rounds
        self.done = 0
        self.end_s = self.end_of(rounds)  # when the whole stretch is over

    def end_of(self, rounds: int) -> float:
        """When the first `rounds` iterations are over."""
        return self.start_s + rounds * (self.first_s + self.growth_s * (rounds - 1) / 2)

    def rounds_by(self, now: float) -> int:
        """How many iterations are over at `now`, of those in the stretch."""
        if now >= self.end_s:
            return self.rounds
        rounds = max(min(self._estimate(now - self.start_s), self.rounds), 0)
        while rounds > 0 and self.end_of(rounds) > now:
            rounds -= 1
        while rounds < self.rounds and self.end_of(rounds + 1) <= now:
            rounds += 1
        return rounds

    def cut(self, at: float) -> None:
        """End the stretch with the iteration that is running at `at`."""
        self.rounds = min(self.rounds, max(self.rounds_by(at), self.done) + 1)
        self.end_s = self.end_of(self.rounds)

    def _estimate(self, elapsed_s: float) -> int:
        if elapsed_s <= 0:
            return 0
        if self.growth_s == 0:
            return int(elapsed_s / self.first_s)
        linear = self.first_s - self.growth_s / 2
        root = math.sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
        return int((root - linear) / self.growth_s)
