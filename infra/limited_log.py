"""Warnings about what others send: whoever sends one such message may send thousands a second."""

import logging
import time
from collections.abc import Callable

LOG_S = 10.0  # between two lines of one kind
KINDS_MAX = 64  # those beyond share one line


class LimitedLog:
    """One owner's warnings: of each kind one line in LOG_S, which counts those left out before."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: in seconds."""
        self._log = log
        self._clock = clock
        self._due_at: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def warning(self, channel: str, reason: str, text: str, *args: object) -> None:
        """Log `text % args`. `channel` and `reason`, its kind, are words of ours."""
        kind, now = (channel, reason), self._clock()
        if kind not in self._due_at and len(self._due_at) >= KINDS_MAX:
            kind = self._room(now, kind)
        if now < self._due_at.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._due_at[kind] = now + LOG_S
        if left_out := self._left_out.pop(kind, 0):
            text, args = text + " (and %d more such messages before)", (*args, left_out)
        self._log.warning(text, *args)

    def _room(self, now: float, kind: tuple[str, str]) -> tuple[str, str]:
        """Forget what may be logged again; the kind to use, which is shared if all are in use."""
        for other in [other for other, due_at in self._due_at.items() if due_at <= now]:
            del self._due_at[other]
            self._left_out.pop(other, None)
        return kind if len(self._due_at) < KINDS_MAX else ("", "")
