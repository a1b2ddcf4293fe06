"""Places whose recent answers failed: which of them get no work for a while.

A replica that answers every request at once with an error is idle and quick, so it would attract
the work. As in Envoy's outlier detection, a place is left out after IN_A_ROW failures one after the
other, or when the weights of its last WINDOW answers come to SHARE_MIN: for OUT_S, twice as long
each time, OUT_S_MAX at most. A failure weighs 1, SEEN where it came inside a client's answer, and
SILENT where a request waited too long in silence (`slowness.py`): one such is enough. A place that
went on with others meanwhile does not fail, it is late: that is for people. Then it gets one
request; each that it answers doubles how many it may have at a time, until WIDTH_MAX, when it is
like any other again; a failure leaves it out once more. One that was silent once and answers a
request that it still has was only held up: its time is over at once. Every router judges by the
attempts that it made, and by what a replica's heartbeat tells of all (`told`). Whether a place may
be left out at all is the caller's to decide: the last one that serves a model never is.

A place is judged for each model by itself: an engine may fail one of several. What a heartbeat
tells is of all its models, so it counts only where that is one. A place without a failure among its
last WINDOW answers has no entry, and costs nothing; one without a failure for FORGET_S has none.
"""

from dataclasses import dataclass, field

from schemas.ids import ModelId
from schemas.state import FAILING_IN_A_ROW, RESULTS_MAX, EngineResults

IN_A_ROW = FAILING_IN_A_ROW
WINDOW = 10  # last answers, good and failed
SHARE_MIN = 5  # the weights of failures among them
SEEN, SILENT = 2, IN_A_ROW
OUT_S = 5.0
OUT_S_MAX = 80.0
WIDTH_MAX = 16
PLACES_MAX = 4096
REASON_CHARS_MAX = 60  # of a failure, in receipts of other requests
STUCK_S = 10.0  # an attempt bars others for so long at most: an answer may take minutes
FORGET_S = 300.0
ALL = ModelId("")  # whatever model a place serves
LATE = "late: "

Key = tuple[str, ModelId]


@dataclass(slots=True)
class FailingPlace:
    """What is known of a place, for one model, that failed lately."""

    what: str = ""  # of the last failure, for people
    in_a_row: int = 0  # weights of failures
    ends: list[int] = field(default_factory=list)  # weights of the last WINDOW, the latest last
    failed_at: float = 0.0
    times: int = 0  # that it was left out
    out_until: float = float("-inf")
    told_until: float = float("-inf")  # to people: as long again
    is_silent: bool = False  # that is why it was left out
    is_late: bool = False  # at the last failure it went on with others
    width: int = 0  # requests that it may have at a time; 0: any number
    trying: dict[int, float] = field(default_factory=dict)  # since when each of these is there
    told: EngineResults | None = None  # what its agent reported, if that put it out
    is_told: bool = False  # whether its latest heartbeat still reports failures

    @property
    def words(self) -> str:
        if self.told is not None:
            return f"failing: {self.told.words}"
        what = f", {self.what}" if self.what else ""
        kind = LATE if self.is_late else "failing: "
        return f"{kind}{sum(map(bool, self.ends))} of its last {len(self.ends)}{what}"

    def is_out(self, now: float) -> bool:
        return now < self.out_until

    def is_avoided(self, now: float) -> bool:
        """Whether people should know: it is left out, or was of late, or is being tried, or its
        agent says so. The next requests will show whether one whose time is over answers."""
        return self.width > 0 and (now < self.told_until or bool(self.trying) or self.is_told)

    def count(self, now: float, weight: int) -> None:
        """Another attempt failed."""
        self.failed_at = now
        self.in_a_row += weight
        self.ends = [*self.ends[1 - WINDOW :], weight]
        if self.width > 0 or self.in_a_row >= IN_A_ROW or sum(self.ends) >= SHARE_MIN:
            self.leave_out(now, is_silent=weight == SILENT)

    def answered(self) -> None:
        self.in_a_row = 0
        self.is_late = self.is_late or self.is_silent  # it went on with this one
        if self.is_silent and self.times == 1:
            self.out_until = float("-inf")
        self.ends = [*self.ends[1 - WINDOW :], 0]
        if self.width > 0:
            self.width *= 2
            if self.width > WIDTH_MAX:  # like any other, but for how often it was left out
                self.width, self.trying, self.ends, self.told = 0, {}, [1], None
                self.times -= 1

    def leave_out(self, now: float, *, is_silent: bool = False) -> None:
        if self.is_out(now):
            self.is_silent = self.is_silent and is_silent
            return  # an attempt that began before
        self.failed_at, self.is_silent = now, is_silent
        out_s = min(OUT_S * 2**self.times, OUT_S_MAX)
        self.out_until, self.told_until = now + out_s, now + 2 * out_s
        self.times = min(self.times + 1, 16)
        self.width, self.trying = 1, {}


class FailingPlaces:
    """Replicas, or peers, by name and model. Whoever asks need not where `places` is empty."""

    def __init__(self) -> None:
        self.places: dict[Key, FailingPlace] = {}

    def failed(
        self,
        name: str,
        model: ModelId,
        what: str,
        now: float,
        *,
        weight: int = 1,
        is_late: bool = False,
    ) -> None:
        """An attempt there has failed by the place's fault."""
        place = self._made(name, model)
        if place is not None:
            place.what, place.is_late, place.told = what[:REASON_CHARS_MAX], is_late, None
            place.count(now, weight)
        if (both := self.places.get((name, ALL))) is not None:
            both.count(now, weight)

    def answered(self, name: str, model: ModelId) -> None:
        """A request there was answered to its end."""
        for key, place in self._known(name, model):
            place.answered()
            if place.width == 0 and not any(place.ends):
                del self.places[key]

    def told(self, name: str, results: EngineResults | None, now: float) -> None:
        """Its agent reports how requests for its one model ended, those of other routers too."""
        place = self.places.get((name, ALL))
        if place is not None:
            place.is_told = results is not None
        if results is None or results.in_a_row < IN_A_ROW:
            if place is not None and results is not None and not results.in_a_row:
                del self.places[name, ALL]  # it has answered since
            elif place is not None and place.told is not None:
                place.told = results or place.told
            return
        before = 0 if place is None or place.told is None else place.told.in_a_row
        if place is None:
            place = self._made(name, ALL)
        if place is None:
            return
        place.told, place.is_told = results, True
        if results.in_a_row > before or results.in_a_row == RESULTS_MAX:
            place.leave_out(now)

    def forget(self, name: str) -> None:
        """Another process runs there now, or none."""
        for key in [key for key in self.places if key[0] == name]:
            del self.places[key]

    def expire(self, now: float) -> None:
        """Forget what failed long ago, and attempts whose end was not seen."""
        for key, place in list(self.places.items()):
            for one in [one for one, since in place.trying.items() if now - since > STUCK_S]:
                del place.trying[one]
            if now - place.failed_at > FORGET_S and not place.is_out(now):
                del self.places[key]

    def tries(self, name: str, model: ModelId, request: int, now: float) -> None:
        """A request begins there."""
        for _, place in self._known(name, model):
            if place.width > 0:
                place.trying[request] = now

    def left(self, name: str, model: ModelId, request: int) -> None:
        """That request is no longer there, however it ended."""
        for _, place in self._known(name, model):
            place.trying.pop(request, None)

    def bars(
        self, name: str, model: ModelId, now: float, *, has_failed: bool = False
    ) -> str | None:
        """Why the place should get no request for the model now; None if it may.

        `has_failed`: the request has failed elsewhere, so it is not the one to try the place with.
        """
        for _, place in self._known(name, model):
            if place.is_out(now):
                return place.words
            if place.width > 0 and (has_failed or len(place.trying) >= place.width):
                return f"tried again: {place.words}"
        return None

    def words(self, name: str, model: ModelId) -> str | None:
        """Why the place gets less work than others; None if it doesn't."""
        return next((one.words for _, one in self._known(name, model) if one.width > 0), None)

    def out(self) -> dict[str, str]:
        """Those that are left out for a model, or have not answered enough since, each with why."""
        return {name: one.words for (name, _), one in self.places.items() if one.width > 0}

    def avoided(self, now: float) -> dict[str, str]:
        """Those of `out` that nothing speaks for yet, each with why."""
        places = self.places.items()
        return {name: place.words for (name, _), place in places if place.is_avoided(now)}

    def _known(self, name: str, model: ModelId) -> list[tuple[Key, FailingPlace]]:
        keys = (name, model), (name, ALL)
        return [(key, place) for key in keys if (place := self.places.get(key)) is not None]

    def _made(self, name: str, model: ModelId) -> FailingPlace | None:
        key = name, model
        if key not in self.places and len(self.places) < PLACES_MAX:
            self.places[key] = FailingPlace()
        return self.places.get(key)
