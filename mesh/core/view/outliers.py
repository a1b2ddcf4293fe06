"""Places whose recent answers failed: which of them get no work for a while.

A replica that answers every request at once with an error is idle and quick, so it would attract
the work. As in Envoy's outlier detection, a place is left out after IN_A_ROW failures one after the
other, or when half of its last WINDOW ended so: for OUT_S, twice as long each time, OUT_S_MAX at
most. Then it gets one request; each that it answers doubles how many it may have at a time, until
WIDTH_MAX, when it is like any other again; a failure leaves it out once more. Every router judges
by the attempts that it made, and by what the agent's heartbeat tells of all (`told`). Whether a
place may be left out at all is the caller's to decide: the last one that serves a model never is.

A place without a failure among its last WINDOW answers has no entry, and costs nothing.
"""

from dataclasses import dataclass, field

from schemas.state import FAILING_IN_A_ROW, EngineResults

IN_A_ROW = FAILING_IN_A_ROW
WINDOW = 10  # last answers, good and failed
SHARE_MIN = 5  # failures among them
OUT_S = 5.0
OUT_S_MAX = 80.0
WIDTH_MAX = 16
PLACES_MAX = 4096
STUCK_S = 10.0  # an attempt bars others for so long at most: an answer may take minutes


@dataclass(slots=True)
class FailingPlace:
    """What is known of a place that failed lately."""

    what: str = ""  # of the last failure, for people
    in_a_row: int = 0
    ends: list[bool] = field(default_factory=list)  # the last WINDOW, the latest last; True: failed
    times: int = 0  # that it was left out
    out_until: float = float("-inf")
    width: int = 0  # requests that it may have at a time; 0: any number
    trying: dict[int, float] = field(default_factory=dict)  # since when each of these is there
    told_in_a_row: int = 0  # by its agent, at last

    @property
    def failed(self) -> int:
        return sum(self.ends)


class FailingPlaces:
    """Replicas, or peers, by name. Whoever asks need not if it is empty."""

    def __init__(self) -> None:
        self._places: dict[str, FailingPlace] = {}
        self.left_out_total = 0

    def __bool__(self) -> bool:
        return bool(self._places)

    def failed(self, name: str, what: str, now: float) -> None:
        """An attempt there has failed by the place's fault."""
        place = self._places.get(name)
        if place is None:
            if len(self._places) >= PLACES_MAX:
                return
            place = self._places[name] = FailingPlace()
        place.what = what
        place.in_a_row += 1
        place.ends = [*place.ends[1 - WINDOW :], True]
        is_back = place.width > 0
        if is_back or place.in_a_row >= IN_A_ROW or place.failed >= SHARE_MIN:
            self._leave_out(place, now)

    def answered(self, name: str) -> None:
        """A request there was answered to its end."""
        place = self._places.get(name)
        if place is None:
            return
        place.in_a_row = 0
        place.ends = [*place.ends[1 - WINDOW :], False]
        if place.width > 0:
            place.width *= 2
            if place.width > WIDTH_MAX:
                place.width, place.trying = 0, {}
        elif place.failed == 0:
            del self._places[name]

    def told(self, name: str, results: EngineResults, now: float) -> None:
        """Its agent reports that requests failed, those of other routers too."""
        place = self._places.get(name)
        before = 0 if place is None else place.told_in_a_row
        if place is not None:
            place.told_in_a_row = results.in_a_row
        if results.in_a_row < IN_A_ROW or results.in_a_row == before:
            return
        if place is None:
            if len(self._places) >= PLACES_MAX:
                return
            place = self._places[name] = FailingPlace()
            place.ends = [True] * min(WINDOW, results.in_a_row)
        place.told_in_a_row = results.in_a_row
        if not self._is_out(place, now) and place.in_a_row < IN_A_ROW:
            place.what = results.what
            self._leave_out(place, now)

    def forget(self, name: str) -> None:
        """Another process runs there now, or none."""
        self._places.pop(name, None)

    def tries(self, name: str, key: int, now: float) -> None:
        """A request begins there."""
        place = self._places.get(name)
        if place is not None and place.width > 0:
            place.trying[key] = now

    def left(self, name: str, key: int) -> None:
        """That request is no longer there, however it ended."""
        place = self._places.get(name)
        if place is not None:
            place.trying.pop(key, None)

    def bars(self, name: str, now: float, *, has_failed: bool = False) -> str | None:
        """Why the place should get no request now; None if it may.

        `has_failed`: the request has failed elsewhere, so it is not the one to try the place with.
        """
        place = self._places.get(name)
        if place is None:
            return None
        if self._is_out(place, now):
            return _told(place)
        if place.width == 0:
            return None
        if has_failed:
            return f"tried again: {_told(place)}"
        if len(place.trying) >= place.width:
            stuck = [key for key, since in place.trying.items() if now - since > STUCK_S]
            for key in stuck:
                del place.trying[key]
        return f"tried again: {_told(place)}" if len(place.trying) >= place.width else None

    def is_known(self, name: str) -> bool:
        """Whether it is left out, or has not answered enough since."""
        place = self._places.get(name)
        return place is not None and place.width > 0

    def out(self, now: float) -> list[str]:
        """Names of those that are left out now."""
        return [name for name, place in self._places.items() if self._is_out(place, now)]

    def _leave_out(self, place: FailingPlace, now: float) -> None:
        if self._is_out(place, now):
            return  # an attempt that began before
        place.out_until = now + min(OUT_S * 2**place.times, OUT_S_MAX)
        place.times = min(place.times + 1, 16)
        place.width, place.trying = 1, {}
        self.left_out_total += 1

    @staticmethod
    def _is_out(place: FailingPlace, now: float) -> bool:
        return now < place.out_until


def _told(place: FailingPlace) -> str:
    what = f", {place.what}" if place.what else ""
    return f"failing: {place.failed} of its last {len(place.ends)}{what}"
