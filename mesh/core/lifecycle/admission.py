"""Admission: how long a request would wait, whether that is too long, and when a client may retry.

A request with an objective (`slo_ttft_s`) is shed as soon as

    expected > SLO_MARGIN × what is left of its objective, or nothing is left

so that its client can try elsewhere while that helps. The expected seconds, as far as known, are

    line_s      how many go before it / the pace at which held requests are placed
    queue_s     the wait in the engine's queue, by the policy
  + the rest    of the cheapest first token, by the policy: round trip, prefill, …

Both queues drain side by side, so the longer of the two counts and not their sum. While neither is
known no request is shed. Rejected: shedding by queue length alone (it says nothing about seconds),
and shedding only at the deadline (queues fill with requests that are answered too late).

A request without an objective is limited by `queue_delay_s_max` (`QueueDelay`): at five times the
capacity a queue without a limit in seconds answered nearly all requests after 38 s, and refused the
first after 79 s. So a request is refused

    at arrival     if its expected wait exceeds the limit
    while held     once it has waited that long, and its whole wait would be twice the limit

The expected wait is how many go before it (`ReleaseOrder`) by the queue's pace. Before the pace is
known, it is what the first request in the queue has waited, or the policy's estimate of queues if
that is more; being an estimate, it refuses only beyond twice the limit. The second rule is laxer,
because an admitted request is served in time unless the queue slows down, or higher classes or
shorter prompts overtake. Only time in queues counts, other regions' included, not the time of
failed attempts. As many requests as there are replicas may wait whatever the pace, up to
`hold_s_max`: the limit is for crowds, not for long jobs. While no replica serves a kind of request,
its time does not count; it starts anew. Rejected: a limit on the time already waited alone (CoDel:
every client is refused late), last come first served (a conversation's next turn would overtake),
DAGOR's threshold of classes.

Retry-After (`RetryAfter`) is the wait until the queue may be joined, plus the clients refused
before and not due yet, at the queue's pace: each refusal books one place, or a refused crowd would
return together. Bookings lapse at the same pace. Up to a fifth is added at random. Rejected: the
wait alone (a queue at its limit would send all clients away for one second), and exponential
back-off.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from math import ceil, inf
from random import Random
from typing import NamedTuple

from mesh.core.lifecycle.release_order import Estimates, ReleaseOrder
from mesh.core.model.rates import EventRate, ReleasePace
from mesh.core.model.request import Request
from mesh.core.model.served_names import model_of, work_name
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.hold_queue import HoldQueue, RequestKind, kind_of
from mesh.core.requests.record import RequestRecord
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.ids import ModelId

HELD_FACTOR = 2.0  # of the limit: the longest whole wait of an admitted request


class LongWait(NamedTuple):
    """A wait in queues that is too long, in seconds."""

    wait_s: float
    limit_s: float

    def __str__(self) -> str:
        return f"expected wait {self.wait_s:.1f} s > limit {self.limit_s:g} s"


class QueueDelay:
    """Which requests wait too long. Its only state: when no replica served a kind of request."""

    def __init__(
        self,
        limit_s: float,
        held: HoldQueue,
        inflight: Mapping[int, RequestRecord],
        line_s: Callable[[Request, float], float | None],
        ahead: Callable[[Request], int],
        serving: Callable[[RequestKind, float, int], int],
        absent: Container[RequestKind],
    ) -> None:
        """`line_s`: a request's wait by its place in the queue. `ahead`: how many go before it.
        `serving`: replicas that serve that kind of request, counted up to the last argument.
        `absent`: held kinds that no replica served at the last tick."""
        self.limit_s = limit_s  # 0: none
        self.model_limit_s: Mapping[ModelId, float] = {}  # in its place, for single models
        self._held = held
        self._inflight = inflight
        self._line_s, self._ahead = line_s, ahead
        self._serving = serving
        self._absent = absent
        self._unserved_at: dict[RequestKind, float] = {}  # of held kinds, when last

    def look(self, now: float) -> None:
        """A tick: note which held kinds no replica serves now."""
        before, self._unserved_at = self._unserved_at, {}
        for kind in self._held.held_kinds:
            if kind in self._absent:
                self._unserved_at[kind] = now
            elif kind in before:
                self._unserved_at[kind] = before[kind]

    def limit_of(self, request: Request) -> float:
        """The limit of the model's requests, in seconds; 0: none."""
        if not self.model_limit_s:
            return self.limit_s
        return self.model_limit_s.get(model_of(request.model), self.limit_s)

    def too_long(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> LongWait | None:
        """Its whole wait if it joins the queue, or stays in it, and that is too long; else None.

        `place`: the last decision about it.
        """
        request, limit_s = record.request, self.limit_of(record.request)
        if not limit_s or request.slo_ttft_s is not None:
            return None
        if place is not None and place.placement is Placement.LOCAL:
            return None  # it begins
        joins = record.held_since is None and not record.attempt
        kind = kind_of(request)
        waited_s = self._waited_s(record, kind, now)
        if not joins and waited_s <= limit_s:
            return None
        left_s, guess_s = self._left_s(request, kind, place, now, joins=joins)
        wait_s = waited_s + max(left_s, guess_s)
        if wait_s <= HELD_FACTOR * limit_s and not (joins and left_s > limit_s):
            return None
        ahead = self._ahead(request)
        if not ahead < self._serving(kind, now, ahead + 1):
            return LongWait(wait_s, limit_s) if self._serving(kind, now, 1) else None
        return None

    def _left_s(
        self,
        request: Request,
        kind: RequestKind,
        place: PlacementResult | None,
        now: float,
        *,
        joins: bool,
    ) -> tuple[float, float]:
        """What it still has to wait: by the queue, and by the policy where the pace is unknown."""
        first = None if place is None else place.first_token
        guess_s = 0.0 if first is None else first.queue_s
        if place is not None and place.placement is Placement.PEER:
            return 0.0, guess_s  # it leaves this queue
        line_s = self._line_s(request, now)
        if line_s is not None:
            return line_s, 0.0
        head = self._held.next_of(request.model, self._absent) if joins else None
        if head is None:
            return 0.0, guess_s
        return self._waited_s(self._inflight[head.key], kind, now), guess_s

    def _waited_s(self, record: RequestRecord, kind: RequestKind, now: float) -> float:
        """In queues, here and in other regions, since some replica serves its kind."""
        return min(record.queued_s(now), now - self._unserved_at.get(kind, -inf))


RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
JITTER_RATIO = 0.2  # added at most
LATEST_S = RETRY_AFTER_S_MAX / (1.0 + JITTER_RATIO)


class RetryAfter:
    """Of one model's queue."""

    def __init__(self) -> None:
        self._booked = 0.0  # clients refused, and not due back yet
        self._counted_at = 0.0

    def after_s(self, wait_s: float | None, pace_per_s: float, now: float, dice: Random) -> float:
        """Book one more client; whole seconds until it should retry.

        `wait_s`: until the queue may be joined; None if unknown.
        """
        self._booked = max(0.0, self._booked - pace_per_s * (now - self._counted_at))
        self._counted_at = now
        after_s = LATEST_S if wait_s is None else wait_s
        if pace_per_s > 0.0:
            after_s += self._booked / pace_per_s
            self._booked = min(self._booked + 1.0, RETRY_AFTER_S_MAX * pace_per_s)
        whole_s = ceil(min(LATEST_S, max(RETRY_AFTER_S_MIN, after_s)))
        return float(whole_s + dice.randint(0, ceil(JITTER_RATIO * whole_s)))


# An expected time is a mean of times that scatter about as widely: half as much again is not luck.
SLO_MARGIN = 1.5
MODELS_MAX = 256  # whose queue's pace is remembered; a mesh serves far fewer
BEGUN_WINDOW_S = 10.0


class LateFirstToken(NamedTuple):
    """A first token that would come too late: in seconds from the request's arrival."""

    expected_s: float
    slo_s: float

    def __str__(self) -> str:
        return f"a first token after {self.expected_s:.3f} s is too late for {self.slo_s:g} s"


class Admission:
    """Measures the queues' pace; estimates waits."""

    def __init__(
        self,
        held: HoldQueue,
        inflight: Mapping[int, RequestRecord],
        settings: RouterSettings,
        dice: Random,
        serving: Callable[[RequestKind, float, int], int],
        replicas: ReplicaTable,
        estimates: Estimates,
    ) -> None:
        """`serving`: replicas that serve that kind of request, counted up to the last argument.
        `estimates`: of what held requests have to compute."""
        self._held = held
        self._dice = dice
        self._serving = serving
        self.hold_s_max = settings.hold_s_max
        self._absent: set[RequestKind] = set()  # held, and no replica serves them now
        self._paces: dict[ModelId, ReleasePace] = {}
        self._retry_after: dict[ModelId, RetryAfter] = {}
        self.delay = QueueDelay(
            settings.queue_delay_s_max,
            held,
            inflight,
            self._line_s,
            self._ahead,
            serving,
            self._absent,
        )
        self.order = ReleaseOrder(held, replicas, estimates, self._longest_wait_s)
        self.begun = EventRate(BEGUN_WINDOW_S)  # attempts, held before or not

    def _longest_wait_s(self, request: Request) -> float:
        """Half of the longest hold or of its objective, or the limit of queue delay if less."""
        most_s = self.hold_s_max if request.slo_ttft_s is None else request.slo_ttft_s
        most_s = min(most_s, self.hold_s_max) / 2
        return min(most_s, self.delay.limit_of(request) or most_s)

    def waits(self, request: Request, now: float) -> None:
        work = work_name(request.model)
        if work not in self._paces and len(self._paces) >= MODELS_MAX:
            oldest = next(iter(self._paces))
            del self._paces[oldest]
            self._retry_after.pop(oldest, None)
        self._paces.setdefault(work, ReleasePace()).waits(now)
        self.order.joined(request)

    def look(self, now: float) -> None:
        """A tick: time in which no replica serves a queue does not count for its pace."""
        held = self._held.held_kinds
        self._absent.clear()
        self._absent.update(kind for kind in held if not self._serving(kind, now, 1))
        served = {work_name(kind[0]) for kind in held if kind not in self._absent}
        for work in self._held.works():
            if (pace := self._paces.get(work)) is not None:
                (pace.waits if work in served else pace.nobody_waits)(now)
        self.delay.look(now)

    def released(self, request: Request, now: float) -> None:
        if (pace := self._pace(request)) is not None:
            pace.released(now)
        self.left(request, now)

    def left(self, request: Request, now: float) -> None:
        pace = self._pace(request)
        if pace is not None and not self._held.waiting(request.model):
            pace.nobody_waits(now)

    def expected_s(
        self, request: Request, place: PlacementResult | None, now: float
    ) -> float | None:
        """Seconds from now until its first token; None while unknown.

        `place`: the last decision about it, if there is one.
        """
        waits = place is None or place.target is None
        line_s = self._line_s(request, now) if waits else None
        first = None if place is None else place.first_token
        if first is None:
            return line_s
        return first.seconds - first.queue_s + max(first.queue_s, line_s or 0.0)

    def late(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> LateFirstToken | None:
        """Its late first token, if it is clear that it can't be in time."""
        request = record.request
        if request.slo_ttft_s is None:
            return None
        so_far_s = now - request.arrived_at
        left_s = request.slo_ttft_s - so_far_s
        expected_s = self.expected_s(request, place, now)
        if left_s > 0.0 and (expected_s is None or expected_s <= SLO_MARGIN * left_s):
            return None
        return LateFirstToken(so_far_s + (expected_s or 0.0), request.slo_ttft_s)

    def with_expectation(
        self, record: RequestRecord, place: PlacementResult, now: float
    ) -> PlacementResult:
        """The placement with the expected first token in its reason."""
        expected_s = self.expected_s(record.request, place, now)
        if expected_s is None:
            return place
        return place._replace(reason=f"{place.reason}; first token expected in {expected_s:.3f} s")

    def retry_after_s(self, request: Request, late: LateFirstToken | None, now: float) -> float:
        """Whole seconds until its client should retry.

        When it could join the queue or, with an objective, when those before it are gone and it
        would be in time; and after clients that were refused before.
        """
        back = replace(request, arrived_at=now)
        ahead = self.order.ahead(back, self._absent, gone=request)
        pace_per_s = self._pace_per_s(request, now)
        wait_s: float | None = 0.0
        if ahead:
            wait_s = ahead / pace_per_s if pace_per_s > 0.0 else None
        if wait_s is not None and late is not None:
            wait_s = max(wait_s, late.expected_s - late.slo_s)
        elif wait_s is not None and request.slo_ttft_s is None:
            place_s = 1.0 / pace_per_s if ahead and self._held.is_full_for(request) else 0.0
            wait_s = max(place_s, wait_s - self.delay.limit_of(request))
        if self._pace(request) is not None:
            retry_after = self._retry_after.setdefault(work_name(request.model), RetryAfter())
        else:
            retry_after = RetryAfter()
        return retry_after.after_s(wait_s, pace_per_s, now, self._dice)

    def _line_s(self, request: Request, now: float) -> float | None:
        pace = self._pace(request)
        per_s = None if pace is None else pace.per_s(now)
        return None if not per_s else (self._ahead(request) + 1) / per_s

    def _ahead(self, request: Request) -> int:
        return self.order.ahead(request, self._absent)

    def _pace(self, request: Request) -> ReleasePace | None:
        return self._paces.get(work_name(request.model))

    def _pace_per_s(self, request: Request, now: float) -> float:
        """Of the queue for its work; before that is known, of all attempts."""
        pace = self._pace(request)
        known = None if pace is None else pace.per_s(now)
        return self.begun.per_s(now) if known is None else known
