"""Admission: what a request may expect, whether that is in time for it, and when to come back.

A request that says when a first token is of no use any more (`slo_ttft_s`) is shed as soon as it
is clear that it can't be in time: its client can try elsewhere while that still helps, and the
engines compute only answers that somebody reads. Clear means

    expected > SLO_MARGIN × what is left of its objective, or nothing is left

with expected, in seconds from now, as far as it is known:

    line_s      its place in line / the pace at which the line moves
    queue_s     the wait in the engine's queue, by the policy
  + the rest    of the cheapest first token, by the policy: round trip, prefill, …

Line and engine queue drain side by side, so the longer of the two counts and not their sum. At a
cold start neither is known and nobody is shed. Who says no objective may wait as long as the
region's limit allows (`QueueDelay`). Rejected: shedding by length of the queue alone
(it knows no seconds), and never shedding early (a client learns at its deadline what was known
at arrival; that is how queues fill with requests that are answered too late for anyone).

When a refused client should come back: Retry-After, from the backlog and the pace of the line.

    wait_s     until the line is short enough to be joined, at the present pace
  + told / pace: those who were told to come back, and are before it

Whoever is refused is expected to return, or a crowd that was refused within a second would be back
within a second too, each second anew. So each refusal books one place at the pace of the line, and
the next one is told a later time. Bookings lapse at the same pace, whether anybody returns or not.
Up to a fifth is added by chance, to part those who were refused at one moment by several routers.

Rejected: the wait alone (a line that newcomers keep at its limit is always about to be joined, so
everyone is told one second), and an exponential back-off (it knows neither backlog nor pace).

How long a request may be held that has no objective of its own: `queue_delay_s_max`.

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
from dataclasses import replace
from math import ceil, inf
from random import Random
from typing import NamedTuple

from mesh.core.lifecycle.hold_queue import HoldQueue, RequestKind, kind_of
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.model.rates import EventRate, ReleasePace
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult
from schemas.decision import Placement
from schemas.ids import ModelId

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
        inflight: Mapping[int, RequestRecord],
        line_s: Callable[[Request, float], float | None],
        serving: Callable[[RequestKind, float, int], int],
        absent: Container[RequestKind],
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
        self._unserved_at: dict[
            RequestKind, float
        ] = {}  # of those held: when nobody served them last

    def look(self, now: float) -> None:
        """A tick: see which kinds of those that are held nobody serves at present."""
        before, self._unserved_at = self._unserved_at, {}
        for kind in self._held.held_kinds:
            if kind in self._absent:
                self._unserved_at[kind] = now
            elif kind in before:
                self._unserved_at[kind] = before[kind]

    def too_long(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> LongWait | None:
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
        self,
        request: Request,
        kind: RequestKind,
        place: PlacementResult | None,
        now: float,
        *,
        joins: bool,
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

    def _waited_s(self, record: RequestRecord, kind: RequestKind, now: float) -> float:
        """In lines, here and in other regions, since somebody serves its kind."""
        held_s = record.request.held_before_s + record.waited_s(now)
        return min(held_s, now - self._unserved_at.get(kind, -inf))


RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
JITTER_RATIO = 0.2  # added at most
LATEST_S = RETRY_AFTER_S_MAX / (1.0 + JITTER_RATIO)


class RetryAfter:
    """Of one line; time and chance are arguments."""

    def __init__(self) -> None:
        self._told = 0.0  # refused, and not due back yet
        self._counted_at = 0.0

    def after_s(self, wait_s: float | None, pace_per_s: float, now: float, dice: Random) -> float:
        """Whole seconds until one more should come back, who is counted from now on.

        `wait_s`: until the line may be joined; None if that is not known.
        """
        self._told = max(0.0, self._told - pace_per_s * (now - self._counted_at))
        self._counted_at = now
        after_s = LATEST_S if wait_s is None else wait_s
        if pace_per_s > 0.0:
            after_s += self._told / pace_per_s
            self._told = min(self._told + 1.0, RETRY_AFTER_S_MAX * pace_per_s)
        after_s = ceil(min(LATEST_S, max(RETRY_AFTER_S_MIN, after_s)))
        return float(after_s + dice.randint(0, ceil(JITTER_RATIO * after_s)))


# An expected time is a mean of times that scatter about as widely: half as much again is not luck.
SLO_MARGIN = 1.5
MODELS_MAX = 256  # lines whose pace is remembered; a mesh serves far fewer models
BEGUN_WINDOW_S = 10.0


class LateFirstToken(NamedTuple):
    """A first token that would come too late: in seconds from the request's arrival."""

    expected_s: float
    slo_s: float

    def __str__(self) -> str:
        return f"a first token after {self.expected_s:.3f} s is too late for {self.slo_s:g} s"


class Admission:
    """Watches the lines move; decides nothing by itself."""

    def __init__(
        self,
        held: HoldQueue,
        inflight: Mapping[int, RequestRecord],
        settings: RouterSettings,
        dice: Random,
        serving: Callable[[RequestKind, float, int], int],
    ) -> None:
        """`serving`: how many replicas serve that kind of requests, as far as the last argument."""
        self._held = held
        self._dice = dice
        self._serving = serving
        self._absent: set[RequestKind] = (
            set()
        )  # held, and served by nobody at present: no crowd for others
        self._paces: dict[ModelId, ReleasePace] = {}
        self._retry_after: dict[ModelId, RetryAfter] = {}
        self._delay = QueueDelay(
            settings.queue_delay_s_max, held, inflight, self._line_s, serving, self._absent
        )
        self._begun = EventRate(BEGUN_WINDOW_S)

    def waits(self, request: Request, now: float) -> None:
        """It has joined the line."""
        if request.model not in self._paces and len(self._paces) >= MODELS_MAX:
            oldest = next(iter(self._paces))
            del self._paces[oldest]
            self._retry_after.pop(oldest, None)
        self._paces.setdefault(request.model, ReleasePace()).waits(now)

    def look(self, now: float) -> None:
        """A tick: a line that nobody serves does not move, which says nothing of its pace."""
        held = self._held.held_kinds
        self._absent.clear()
        self._absent.update(kind for kind in held if not self._serving(kind, now, 1))
        served = {kind[0] for kind in held if kind not in self._absent}
        for model in self._held.models():
            if (pace := self._paces.get(model)) is not None:
                (pace.waits if model in served else pace.nobody_waits)(now)
        self._delay.look(now)

    def released(self, request: Request, now: float) -> None:
        """It has left the line for an attempt."""
        if (pace := self._paces.get(request.model)) is not None:
            pace.released(now)
        self.left(request, now)

    def left(self, request: Request, now: float) -> None:
        """It is out of the line, for whatever reason."""
        pace = self._paces.get(request.model)
        if pace is not None and not self._held.waiting(request.model):
            pace.nobody_waits(now)

    def begun(self, now: float) -> None:
        """A request is being tried, held before or not."""
        self._begun.count(now)

    def expected_s(
        self, request: Request, place: PlacementResult | None, now: float
    ) -> float | None:
        """Seconds from now until its first token; None while nothing is known of it.

        `place`: what was last said of where it could go; None if it was not asked for.
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
        """That it can't be in time, if that is clear."""
        request = record.request
        if request.slo_ttft_s is None:
            return None
        so_far_s = now - request.arrived_at
        left_s = request.slo_ttft_s - so_far_s
        expected_s = self.expected_s(request, place, now)
        if left_s > 0.0 and (expected_s is None or expected_s <= SLO_MARGIN * left_s):
            return None
        return LateFirstToken(so_far_s + (expected_s or 0.0), request.slo_ttft_s)

    def too_long(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> LongWait | None:
        """The wait that it would have, without an objective, if that is longer than it may be."""
        return self._delay.too_long(record, place, now)

    def with_expectation(
        self, record: RequestRecord, place: PlacementResult, now: float
    ) -> PlacementResult:
        """The placement with what is expected of it in its reason."""
        expected_s = self.expected_s(record.request, place, now)
        if expected_s is None:
            return place
        return place._replace(reason=f"{place.reason}; first token expected in {expected_s:.3f} s")

    def retry_after_s(self, request: Request, late: LateFirstToken | None, now: float) -> float:
        """Whole seconds until it should come back; it is expected back then.

        When it could join the line, or, with an objective, when those before it are gone and it
        would be in time; and behind those who were told to come back before.
        """
        back = replace(request, arrived_at=now)
        ahead = self._held.ahead(back, self._absent) - (request in self._held)
        pace_per_s = self._pace_per_s(request.model, now)
        wait_s: float | None = 0.0
        if ahead:
            wait_s = ahead / pace_per_s if pace_per_s > 0.0 else None
        if wait_s is not None and late is not None:
            wait_s = max(wait_s, late.expected_s - late.slo_s)
        elif wait_s is not None and request.slo_ttft_s is None:
            place_s = 1.0 / pace_per_s if ahead and self._held.is_full else 0.0
            wait_s = max(place_s, wait_s - self._delay.limit_s)
        if request.model in self._paces:
            retry_after = self._retry_after.setdefault(request.model, RetryAfter())
        else:
            retry_after = RetryAfter()
        return retry_after.after_s(wait_s, pace_per_s, now, self._dice)

    def _line_s(self, request: Request, now: float) -> float | None:
        pace = self._paces.get(request.model)
        per_s = None if pace is None else pace.per_s(now)
        return None if not per_s else (self._held.ahead(request, self._absent) + 1) / per_s

    def _pace_per_s(self, model: ModelId, now: float) -> float:
        """Of the model's line; before that is known, how many were begun at all."""
        pace = self._paces.get(model)
        known = None if pace is None else pace.per_s(now)
        return self._begun.per_s(now) if known is None else known
