"""How many requests an engine without a metrics page computes at once, as its streams show.

Such an engine tells of no queue, and one that computes one request after the other takes all that
it is given. It shows in *hand-overs*: a stream that waited while another one was answered gets its
first token when that one has ended, after GAP_SHARE of that wait at most, and no sooner than half
of the least that a first token ever took. HAND_OVERS of them, each beside as many other streams,
and between them none that began beside so many without such an end, show that it has no more places
than were taken then. A request that is not streamed shows nothing, and counts as taking one.

From then on it is given so many. Now and then, TRY_S after the last time and twice as long each
time, it is given one more. If that one has to wait, all stays as it is. If it begins beside the
others, the engine is wider: it is given as many as at first, and all is learned anew. Engines that
answer in moments, or whose prompts take as long as their answers, show nothing either.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

from agents.core.requests import AgentRequest
from schemas.ids import ModelId

WAITED_S = 0.5  # while another one is answered, at least
GAP_SHARE = 1 / 8
HAND_OVERS = 5
SIDE_S = 0.1  # two that run side by side do so for longer
NO_SIDE = -inf, 0  # when one began beside how many others
TRY_S, TRY_S_MAX = 60.0, 960.0


class EngineWidth:
    """Of one engine."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The engine is gone: another one may be wider. Or it has shown that it is."""
        self.known: int | None = None  # how many it computes at once
        self._taken: deque[int] = deque(maxlen=HAND_OVERS)  # places, after each hand-over
        self._beside = 0  # other streams that were answered then
        self._model, self._began_at, self._ended_at = ModelId(""), -inf, -inf  # of the last to end
        self._first_s = inf  # the least that a first token took
        self._try_at, self._try_s = inf, TRY_S
        self._side = NO_SIDE

    def most(self, now: float) -> int | None:
        """How many it is to be given; None while nothing is known."""
        return self.known if self.known is None or now < self._try_at else self.known + 1

    def began(self, record: AgentRequest, others: Sequence[AgentRequest], now: float) -> None:
        """The first token of a stream is here. `others`: that are at the engine."""
        assert record.sent_at is not None, "it is at the engine"
        self._settle(now)
        self._first_s = min(self._first_s, now - record.sent_at)
        beside, gap_s = _answered(others), now - self._ended_at
        waited_s = self._ended_at - max(record.sent_at, self._began_at)
        follows = waited_s >= WAITED_S and self._first_s / 2 <= gap_s <= waited_s * GAP_SHARE
        if follows and record.work.model == self._model:
            self._ended_at = -inf  # it makes room for one
            self._handed_over(beside, 1 + beside + sum(not one.is_stream for one in others), now)
        elif beside >= max(1, self._beside):
            self._side = now, beside

    def ended(self, record: AgentRequest, others: Sequence[AgentRequest], now: float) -> None:
        """A stream is over, however it ended. `others`: that are at the engine."""
        assert record.sent_at is not None, "it was at the engine"
        self._settle(now)
        if record.began_at is not None:
            if record.began_at < self._side[0]:
                self._side = NO_SIDE  # its end may have been seen late
            self._model, self._began_at, self._ended_at = record.work.model, record.began_at, now
        elif now - record.sent_at >= WAITED_S and _answered(others) >= (self.known or inf):
            self._tried(now)  # it left before its turn

    def _settle(self, now: float) -> None:
        """Of the last that began beside others without a hand-over: whether it ran beside them."""
        since, beside = self._side
        if now - since < SIDE_S or not beside:
            return
        self._side = NO_SIDE
        self._taken.clear()
        if self.known is not None and beside >= self.known:
            self.clear()

    def _handed_over(self, beside: int, places: int, now: float) -> None:
        if beside != self._beside:
            self._taken.clear()
        self._beside = beside
        self._taken.append(places)
        self._tried(now)
        if len(self._taken) == HAND_OVERS and (self.known is None or max(self._taken) < self.known):
            self.known, self._try_at = max(self._taken), now + self._try_s

    def _tried(self, now: float) -> None:
        """One had to wait."""
        if now >= self._try_at:
            self._try_s = min(TRY_S_MAX, 2 * self._try_s)
            self._try_at = now + self._try_s


def _answered(others: Sequence[AgentRequest]) -> int:
    return sum(other.is_stream and other.began_at is not None for other in others)
