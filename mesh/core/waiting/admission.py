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
region's limit allows (`queue_delay.py`). Rejected: shedding by length of the queue alone
(it knows no seconds), and never shedding early (a client learns at its deadline what was known
at arrival; that is how queues fill with requests that are answered too late for anyone).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

from mesh.core.placing.placement import Place
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.request import Request
from mesh.core.settings import RouterSettings
from mesh.core.waiting.hold_queue import HoldQueue, Kind
from mesh.core.waiting.pace import Pace
from mesh.core.waiting.queue_delay import LongWait, QueueDelay
from mesh.core.waiting.rate import Rate
from mesh.core.waiting.retry_after import RetryAfter
from schemas.ids import ModelId

# An expected time is a mean of times that scatter about as widely: half as much again is not luck.
SLO_MARGIN = 1.5
MODELS_MAX = 256  # lines whose pace is remembered; a mesh serves far fewer models
BEGUN_WINDOW_S = 10.0


class Late(NamedTuple):
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
        inflight: Mapping[int, Inflight],
        settings: RouterSettings,
        dice: Random,
        serving: Callable[[Kind, float, int], int],
    ) -> None:
        """`serving`: how many replicas serve that kind of requests, as far as the last argument."""
        self._held = held
        self._dice = dice
        self._serving = serving
        self._absent: set[Kind] = (
            set()
        )  # held, and served by nobody at present: no crowd for others
        self._paces: dict[ModelId, Pace] = {}
        self._retry_after: dict[ModelId, RetryAfter] = {}
        self._delay = QueueDelay(
            settings.queue_delay_s_max, held, inflight, self._line_s, serving, self._absent
        )
        self._begun = Rate(BEGUN_WINDOW_S)

    def waits(self, request: Request, now: float) -> None:
        """It has joined the line."""
        if request.model not in self._paces and len(self._paces) >= MODELS_MAX:
            oldest = next(iter(self._paces))
            del self._paces[oldest]
            self._retry_after.pop(oldest, None)
        self._paces.setdefault(request.model, Pace()).waits(now)

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

    def expected_s(self, request: Request, place: Place | None, now: float) -> float | None:
        """Seconds from now until its first token; None while nothing is known of it.

        `place`: what was last said of where it could go; None if it was not asked for.
        """
        waits = place is None or place.target is None
        line_s = self._line_s(request, now) if waits else None
        first = None if place is None else place.first_token
        if first is None:
            return line_s
        return first.seconds - first.queue_s + max(first.queue_s, line_s or 0.0)

    def late(self, record: Inflight, place: Place | None, now: float) -> Late | None:
        """That it can't be in time, if that is clear."""
        request = record.request
        if request.slo_ttft_s is None:
            return None
        so_far_s = now - request.arrived_at
        left_s = request.slo_ttft_s - so_far_s
        expected_s = self.expected_s(request, place, now)
        if left_s > 0.0 and (expected_s is None or expected_s <= SLO_MARGIN * left_s):
            return None
        return Late(so_far_s + (expected_s or 0.0), request.slo_ttft_s)

    def too_long(self, record: Inflight, place: Place | None, now: float) -> LongWait | None:
        """The wait that it would have, without an objective, if that is longer than it may be."""
        return self._delay.too_long(record, place, now)

    def foretold(self, record: Inflight, place: Place, now: float) -> Place:
        """The placement with what is expected of it in its reason."""
        expected_s = self.expected_s(record.request, place, now)
        if expected_s is None:
            return place
        return place._replace(reason=f"{place.reason}; first token expected in {expected_s:.3f} s")

    def retry_after_s(self, request: Request, late: Late | None, now: float) -> float:
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
