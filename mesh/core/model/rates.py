"""How often something happens, as a running average; time is an argument."""


class EventRate:
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


# How fast the hold queue is emptied: releases per second of the time in which it was not empty. A
# rate over all time would measure demand: after a quiet hour it is near zero. Counting begins with
# the first release.
WINDOW_S = 10.0  # of waiting: what is further back fades
RELEASES_MIN = 3  # before these, and
BUSY_S_MIN = 1.0  # this much waiting, the pace is unknown
KEPT_S = 60.0  # with an empty queue: then the pace is forgotten, as the fleet may have changed


class ReleasePace:
    """One queue's."""

    def __init__(self) -> None:
        self._empty_at: float | None = None  # the queue is empty since then
        self._since: float | None = None  # counted up to here, while requests wait
        self._busy_s = 0.0
        self._releases = 0.0
        self._seen = 0  # releases, none of them faded
        self._at_release = 0.0, 0.0  # seconds and releases, at the last one

    def waits(self, now: float) -> None:
        """Requests wait, from now on or still."""
        self._forget_if_old(now)
        self._empty_at = None
        if self._since is None:
            self._since = now

    def released(self, now: float) -> None:
        """A request that waited was placed."""
        if not self._seen:
            self._since = now
        else:
            self._count_to(now)
            self._releases += 1.0
        self._seen += 1
        self._at_release = self._busy_s, self._releases

    def nobody_waits(self, now: float) -> None:
        """The queue is empty."""
        self._count_to(now)
        self._since = None
        if self._empty_at is None:
            self._empty_at = now

    def nobody_serves(self, now: float) -> None:
        """No replica does, and maybe none has since the last release: it is known late."""
        self.nobody_waits(now)
        self._busy_s, self._releases = self._at_release

    def per_s(self, now: float) -> float | None:
        """Releases a second; None while unknown. Falls while no request is released."""
        self._forget_if_old(now)
        self._count_to(now)
        if self._seen < RELEASES_MIN or self._busy_s < BUSY_S_MIN:
            return None
        return self._releases / self._busy_s

    def _forget_if_old(self, now: float) -> None:
        if self._empty_at is not None and now - self._empty_at > KEPT_S:
            self._busy_s, self._releases, self._seen = 0.0, 0.0, 0
            self._at_release = 0.0, 0.0

    def _count_to(self, now: float) -> None:
        if self._since is None or not self._seen:
            return
        self._busy_s += now - self._since
        self._since = now
        if self._busy_s > WINDOW_S:
            self._releases *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S


class ByteBudget:
    """A token bucket: bytes per second, and a burst after quiet times.

    If the bucket is full, any message may go, even one larger than the burst.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = burst_bytes
        self._at: float | None = None

    def share(self, parts: int, of_bytes_per_s: float, burst_s: float) -> None:
        """Take one of so many equal parts of that rate from now on."""
        self._bytes_per_s = of_bytes_per_s / parts
        self._burst_bytes = self._bytes_per_s * burst_s

    def left(self, now: float) -> float:
        """Bytes that may be spent now."""
        if self._at is not None:
            earned = (now - self._at) * self._bytes_per_s
            self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._at = now
        return self._left_bytes

    def spend(self, size_bytes: int, now: float) -> bool:
        """Whether a message of that size may go; if so it is counted."""
        left = self.left(now)
        if left < size_bytes and left < self._burst_bytes:
            return False
        self._left_bytes -= size_bytes
        return True
