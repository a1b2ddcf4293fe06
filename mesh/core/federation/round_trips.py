"""The round trips of pings to one peer: how long, how unsteady, how many never came back.

A ping goes the way that work goes, over the bus and its links, so what it costs there is in it
and a TCP handshake is not. One late ping is not a trend: the median of the last few enters a
running average. Jitter is RFC 3550's (6.4.1), a running average of the difference between one
round trip and the next; loss is counted over the last pings.
"""

from collections import deque
from dataclasses import dataclass, field

RTT_WEIGHT = 0.3  # of a new median in the running average
RTT_SAMPLES = 5  # the median of so many
JITTER_WEIGHT = 1 / 16  # RFC 3550: a good noise reduction that still follows
PINGS_COUNTED = 60  # a minute of them: one lost is under two percent


@dataclass(slots=True)
class RoundTrips:
    """Seconds. Everything is None until it is known."""

    rtt_s: float | None = None
    jitter_s: float | None = None
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=RTT_SAMPLES))
    _answered: deque[bool] = field(default_factory=lambda: deque(maxlen=PINGS_COUNTED))

    @property
    def loss_ratio(self) -> float | None:
        """Part of the last pings that no answer came to."""
        if not self._answered:
            return None
        return 1.0 - sum(self._answered) / len(self._answered)

    def measured(self, rtt_s: float) -> None:
        """A ping came back."""
        self._answered.append(True)
        if self._samples:
            change_s = abs(rtt_s - self._samples[-1])
            before_s = 0.0 if self.jitter_s is None else self.jitter_s
            self.jitter_s = before_s + JITTER_WEIGHT * (change_s - before_s)
        self._samples.append(rtt_s)
        median = sorted(self._samples)[len(self._samples) // 2]
        self.rtt_s = (
            median if self.rtt_s is None else self.rtt_s + RTT_WEIGHT * (median - self.rtt_s)
        )

    def lost(self) -> None:
        """No answer came before the next ping."""
        self._answered.append(False)
