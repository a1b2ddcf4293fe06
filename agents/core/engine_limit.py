"""How many requests an engine is given at most: as configured, and less after it said 429.

429 says that the engine runs what it can, or that a quota is used up: no failure, and no reason to
offer it all that comes. It is left with what it runs then, of clients and of batch jobs, or one.
For its `Retry-After`, within RETRY_S_MIN and RETRY_S_MAX, nothing is added; then one for each good
answer, so the number doubles with each round of answers, until the usual one is reached or
FORGOTTEN_S have passed. An engine that says so though it runs nothing gets no request for PAUSE_S:
one that refuses at once is idle at each placement, and would be tried again and again.
"""

from math import isfinite

RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0  # the least also where the engine names no time
PAUSE_S = 1.0
FORGOTTEN_S = 60.0  # after the end of its `Retry-After`


def retry_after_s(headers: tuple[str, ...]) -> float:
    """Seconds by the `Retry-After` of these (name, value, …): RETRY_S_MIN where there is none, and
    for a date."""
    pairs = dict(zip(headers[::2], headers[1::2], strict=False))
    value = pairs.get("retry-after", "").strip()
    seconds = float(value) if value.isascii() and value.isdigit() else RETRY_S_MIN
    return bounded(seconds)


def bounded(seconds: float) -> float:
    return min(RETRY_S_MAX, max(RETRY_S_MIN, seconds)) if isfinite(seconds) else RETRY_S_MAX


class EngineLimit:
    """Of one engine."""

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self.most = usual  # now
        self.is_lowered = False
        self._lowered_to = usual
        self._until = self._paused_until = float("-inf")

    def set_usual(self, usual: int, now: float) -> None:
        """What it is given while it does not complain."""
        self._usual = usual
        self._settle(now)

    def too_many(self, wait_s: float, running: int, now: float) -> None:
        """It answered 429. `running`: that it has besides; `wait_s`: `Retry-After`."""
        before = self._lowered_to if self.is_lowered else self._usual
        self._lowered_to = max(1, min(before, running))
        self._until = max(self._until, now + bounded(wait_s))
        if not running:
            self._paused_until = now + PAUSE_S
        self.is_lowered = True
        self._settle(now)

    def answered(self, now: float) -> None:
        """It answered a request well."""
        if self.is_lowered and now >= self._until:
            self._lowered_to += 1
            self._settle(now)

    def update(self, now: float) -> None:
        """Time has passed."""
        if now >= self._until + FORGOTTEN_S:
            self.is_lowered = False
        self._settle(now)

    def clear(self, now: float) -> None:
        """The engine is gone, and with it what it said."""
        self.is_lowered = False
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self.is_lowered:
            self.is_lowered = self._lowered_to < self._usual or now < self._paused_until
        if not self.is_lowered:
            self.most, self._until = self._usual, float("-inf")
        else:
            self.most = 0 if now < self._paused_until else self._lowered_to
