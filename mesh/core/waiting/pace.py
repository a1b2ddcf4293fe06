"""How fast a line moves: releases per second of the time in which somebody stood in it.

A rate over all time would say what was asked for, not what can be had: after a quiet hour it is
near zero, and the first request that has to wait would be told to come back in a minute. Counting
begins with the first release: the wait for that one is for those who went before there was a line.
"""

WINDOW_S = 10.0  # of waiting: what lies further back fades
RELEASES_MIN = 3  # before these, and
BUSY_S_MIN = 1.0  # this much waiting, nothing can be said
KEPT_S = 60.0  # without anybody waiting: then the fleet may be another, and nothing is known


class Pace:
    """One line's. Tell it when somebody begins to wait, is released, and when nobody waits."""

    def __init__(self) -> None:
        self._empty_at: float | None = None  # nobody waits since then
        self._since: float | None = None  # counted up to here, while somebody waits
        self._busy_s = 0.0
        self._releases = 0.0
        self._seen = 0  # releases, none of them faded

    def waits(self, now: float) -> None:
        """Somebody waits, from now on or still."""
        self._forget_if_old(now)
        self._empty_at = None
        if self._since is None:
            self._since = now

    def released(self, now: float) -> None:
        """Somebody who waited has got a place."""
        if not self._seen:
            self._since = now
        else:
            self._count_to(now)
            self._releases += 1.0
        self._seen += 1

    def nobody_waits(self, now: float) -> None:
        """The line is empty."""
        self._count_to(now)
        self._since = None
        if self._empty_at is None:
            self._empty_at = now

    def per_s(self, now: float) -> float | None:
        """Releases a second; None while too little was seen. Falls while nobody is released."""
        self._forget_if_old(now)
        self._count_to(now)
        if self._seen < RELEASES_MIN or self._busy_s < BUSY_S_MIN:
            return None
        return self._releases / self._busy_s

    def _forget_if_old(self, now: float) -> None:
        if self._empty_at is not None and now - self._empty_at > KEPT_S:
            self._busy_s, self._releases, self._seen = 0.0, 0.0, 0

    def _count_to(self, now: float) -> None:
        if self._since is None or not self._seen:
            return
        self._busy_s += now - self._since
        self._since = now
        if self._busy_s > WINDOW_S:
            self._releases *= WINDOW_S / self._busy_s
            self._busy_s = WINDOW_S
