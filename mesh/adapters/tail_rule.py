"""Requests that are traced though they are not sampled: those that failed and slow ones."""

import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from infra.process import LimitedLog
from mesh.session.record import Ending

log = logging.getLogger(__name__)

KEPT_PER_S_MAX = 10  # of each reason
ERROR, SLOW = "error", "slow"
CLIENT_GONE = "client_gone"


class SlowLimits(NamedTuple):
    """A request that takes as long is slow. `ttft_s`: of a stream, to its first byte; `whole_s`: of
    any answer, to its end."""

    ttft_s: float = 5.0
    whole_s: float = 60.0


class TailRule:
    """Which requests are traced though they are not sampled: those that failed and those that were
    slow, KEPT_PER_S_MAX a second of each, so that an outage does not flood who receives spans."""

    def __init__(self, slow: SlowLimits, clock: Callable[[], float] = monotonic) -> None:
        self._slow, self._clock = slow, clock
        self.soonest_s = min(slow)  # what ended before can't have been slow
        self._second = -1
        self._kept: dict[str, int] = {}
        self._log = LimitedLog(log)

    def keeps(self, ending: Ending, ttft_s: float | None, duration_s: float) -> str | None:
        """Why it is kept; None where it is not. A client that hung up is no error of ours."""
        if ending.error_type and ending.error_type != CLIENT_GONE:
            return self._within(ERROR)
        slow = self._slow
        if duration_s >= slow.whole_s or (ttft_s is not None and ttft_s >= slow.ttft_s):
            return self._within(SLOW)
        return None

    def _within(self, reason: str) -> str | None:
        second = int(self._clock())
        if second != self._second:
            self._second, self._kept = second, {}
        kept = self._kept.get(reason, 0)
        if kept >= KEPT_PER_S_MAX:
            text = "no trace of a request (%s): more than %d a second"
            self._log.warning("traces", reason, text, reason, KEPT_PER_S_MAX)
            return None
        self._kept[reason] = kept + 1
        return reason
