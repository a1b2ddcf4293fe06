"""Which clients' streams have been silent for so long that their connection is to be kept alive.

Proxies, load balancers and clients give up on a connection on which no byte comes, many after 60 s.
A long prompt that is computed, or a request in the hold queue, is as silent as a dead server; so is
an engine that stops between two tokens to serve others.

No stream has a timer, and nothing is done when a byte is written: each is looked at twice in
`every_s`, and is due when two looks in turn find no more bytes given out than the one before.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from mesh.session.record import OpenRequest
from schemas.http import STREAMED_PATHS

LOOKS = 2  # in turn without a byte: within a stream, silence lasts at most 1.5 times `every_s`


class _Look(NamedTuple):
    """The next one at a request. `taken_bytes`, `silent_looks`: as the last one found it."""

    at: float
    key: int
    taken_bytes: int = 0
    silent_looks: int = 0


class SilentStreams:
    """Those of one router. Times are seconds of the caller's clock."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: 0 for never."""
        self._step_s = every_s / LOOKS
        self._looks: deque[_Look] = deque()  # the next one first; of open requests, and of those
        # that ended within a step

    def opened(self, record: OpenRequest, now: float) -> None:
        """A client's request has arrived."""
        if self._step_s and record.request.streams and record.path in STREAMED_PATHS:
            self._looks.append(_Look(now + self._step_s, record.request.key))

    def due(self, records: Mapping[int, OpenRequest], now: float) -> list[OpenRequest]:
        """Those whose clients are to be sent something now. `records`: that are open, by key."""
        found: list[OpenRequest] = []
        looks = self._looks
        while looks and looks[0].at <= now:
            _, key, before, silent = looks.popleft()
            record = records.get(key)
            if record is None:
                continue
            taken = 0 if record.answer is None else record.answer.taken_bytes
            silent = silent + 1 if taken == before else 0
            if silent == LOOKS:
                found.append(record)
                silent = 0
            looks.append(_Look(now + self._step_s, key, taken, silent))
        return found
