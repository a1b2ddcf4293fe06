"""Whether a region's demand rises: its arrivals of late against those of a longer time.

Nothing is learned about hours and days. A rise is seen within minutes of its beginning, and an
hour's rise leaves most of it to come; a router that starts needs no history, and a holiday or a
launch needs no calendar. Rejected: a table of the day's hours (a week until it can be believed, a
wall clock that the core doesn't have, and wrong on the first unusual day); peaks that an operator
writes down (the same, kept by hand). To a router that has just started all demand rises, for it
knows of none before: about three times `trend_s` long.
"""

from mesh.core.waiting.rate import Rate

SHORT = 0.25  # of the longer time
RISE = 1.05  # what chance alone makes of the ratio, with some hundred requests in the shorter time


class Trend:
    """Of one router's own clients."""

    def __init__(self, trend_s: float) -> None:
        """`trend_s`: the longer time, in seconds."""
        self._short, self._long = Rate(SHORT * trend_s), Rate(trend_s)

    def arrived(self, now: float) -> None:
        """Count one client's request."""
        self._short.count(now)
        self._long.count(now)

    def rises(self, now: float) -> bool:
        """Whether more come than did."""
        short = self._short.per_s(now)
        return short > 0.0 and short >= RISE * self._long.per_s(now)
