"""How long a request may be held that has no objective of its own: `queue_delay_s_max`.

Without a limit in seconds a line is as long as its room: at five times the capacity nearly
everyone was answered, after 38 s, and the first was refused after 79. So a request is refused

    when it would join a line   in which it would wait for longer than the limit
    while it is held            once it has waited so long, and its whole wait would be twice that

The expected wait is its place in line by the line's pace. Before the pace is known, what the first
in line has waited stands for it, or the policy's estimate of queues where that is more; as it is an
estimate, from times that may be old, it refuses beyond twice the limit only. The
second rule is laxer, because whoever was let in is served in time unless the line slows down or
higher classes overtake: then it says so late and for certain. Only time in lines counts, also in
other regions': an attempt that failed after half a minute was no wait.

The limit is for a crowd, not for a long job: as many as there are replicas to serve them may wait
whatever the pace, each for the next place of one, as long as anybody may be held (`hold_s_max`).
And it is for lines that move: while nobody serves a kind of request (its replicas restart, its bus
or its carriers are away) no time is counted, and when somebody does again it starts anew.

Rejected: a limit on the time already waited alone (CoDel's sojourn time): everyone is refused late,
after having waited in vain. Last come, first served while overloaded: it serves some sooner, but a
conversation's next turn would overtake those who were let in, and class and arrival are what the
line promises. DAGOR's threshold of classes: few use classes here; whoever does is served by class.
"""

from collections.abc import Callable, Container, Mapping
from math import inf
from typing import NamedTuple

from mesh.core.placing.placement import Place
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.request import Request
from mesh.core.waiting.hold_queue import HoldQueue, Kind, kind_of
from schemas.decision import Placement

HELD_FACTOR = 2.0  # of the limit: whoever was let in may wait so long in all


class LongWait(NamedTuple):
    """A wait in line that is too long; in seconds, all of it."""

    wait_s: float
    limit_s: float

    def __str__(self) -> str:
        return f"expected wait {self.wait_s:.1f} s > limit {self.limit_s:g} s"


class QueueDelay:
    """Decides who waits for too long; changes nothing but what it knows of outages."""

    def __init__(
        self,
        limit_s: float,
        held: HoldQueue,
        inflight: Mapping[int, Inflight],
        line_s: Callable[[Request, float], float | None],
        serving: Callable[[Kind, float, int], int],
        absent: Container[Kind],
    ) -> None:
        """`line_s`: a request's wait by its place in line. `serving`: how many replicas serve
        requests of that kind, as far as the last argument. `absent`: kinds that are held and that
        nobody serves, as of the last tick."""
        self.limit_s = limit_s  # 0: none
        self._held = held
        self._inflight = inflight
        self._line_s = line_s
        self._serving = serving
        self._absent = absent
        self._unserved_at: dict[Kind, float] = {}  # of those held: when nobody served them last

    def look(self, now: float) -> None:
        """A tick: see which kinds of those that are held nobody serves at present."""
        before, self._unserved_at = self._unserved_at, {}
        for kind in self._held.held_kinds:
            if kind in self._absent:
                self._unserved_at[kind] = now
            elif kind in before:
                self._unserved_at[kind] = before[kind]

    def too_long(self, record: Inflight, place: Place | None, now: float) -> LongWait | None:
        """The wait that it would have if that is too long, else None.

        That of a newcomer if it joins, or of one that is held if it goes on waiting.

        `place`: what was last said of where it could go.
        """
        request, limit_s = record.request, self.limit_s
        if not limit_s or request.slo_ttft_s is not None:
            return None
        if place is not None and place.placement is Placement.LOCAL:
            return None  # it begins
        joins = record.held_since is None and not record.attempt
        kind = kind_of(request)
        left_s, guess_s = self._left_s(request, kind, place, now, joins=joins)
        waited_s = self._waited_s(record, kind, now)
        wait_s = waited_s + max(left_s, guess_s)
        is_too_long = (joins or waited_s > limit_s) and wait_s > HELD_FACTOR * limit_s
        if not is_too_long and not (joins and left_s > limit_s):
            return None
        ahead = self._held.ahead(request, self._absent)
        if not ahead < self._serving(kind, now, ahead + 1):
            return LongWait(wait_s, limit_s) if self._serving(kind, now, 1) else None
        return None

    def _left_s(
        self, request: Request, kind: Kind, place: Place | None, now: float, *, joins: bool
    ) -> tuple[float, float]:
        """What it still has to wait: by the line, and by the policy where the line says little."""
        first = None if place is None else place.first_token
        guess_s = 0.0 if first is None else first.queue_s
        if place is not None and place.placement is Placement.PEER:
            return 0.0, guess_s  # it leaves this line
        line_s = self._line_s(request, now)
        if line_s is not None:
            return line_s, 0.0
        head = self._held.next_of(request.model, self._absent) if joins else None
        if head is None:
            return 0.0, guess_s
        return self._waited_s(self._inflight[head.key], kind, now), guess_s

    def _waited_s(self, record: Inflight, kind: Kind, now: float) -> float:
        """In lines, here and in other regions, since somebody serves its kind."""
        held_s = record.request.held_before_s + record.waited_s(now)
        return min(held_s, now - self._unserved_at.get(kind, -inf))
