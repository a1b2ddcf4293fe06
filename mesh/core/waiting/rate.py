"""How often something happens, as a running average; time is an argument."""


class Rate:
    """Events a second, averaged over about `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._per_s = 0.0
        self._count = 0
        self._since: float | None = None

    def count(self, now: float) -> None:
        """One event happened."""
        if self._since is None:
            self._since = now
        self._count += 1

    def per_s(self, now: float) -> float:
        """The rate as of `now`; 0.0 before the first event."""
        if self._since is None:
            return 0.0
        elapsed_s = now - self._since
        if elapsed_s >= self._window_s / 10:
            weight = min(1.0, elapsed_s / self._window_s)
            self._per_s += weight * (self._count / elapsed_s - self._per_s)
            self._since, self._count = now, 0
        return self._per_s
