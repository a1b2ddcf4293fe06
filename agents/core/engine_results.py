"""How the requests that an engine was given ended: whether it answers shows in its answers, and
not in its pages.

Counted are the last RESULTS_MAX that it answered or failed in the last WINDOW_S, of clients and of
batch jobs; what it has failed since its last answer counts until it answers, as routers send it
little meanwhile. What says nothing about the engine is not counted: a client that left, a deadline,
4xx and 501, which the request may deserve, and 429 (`agents.core.engine_limit`). 4xx that may be
the engine's own are doubted (`ClientErrors`): the router that reads that tries another engine.
"""

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from schemas.http_statuses import (
    CLIENT_ERRORS,
    LOGINS,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    SERVER_ERROR,
    TOO_MANY,
)
from schemas.state import FAILING_IN_A_ROW, FAILURE_CHARS_MAX, RESULTS_MAX, EngineResults

WINDOW_S = 30.0
LOG_EVERY_S = 60.0
BELIEVED_IN_A_ROW = 1  # client errors
OF_ENGINE = (*LOGINS, NOT_FOUND)  # of its key, model or route: never believed

# How an engine fails a request, for people.
NO_CONNECTION = "no connection"
NO_ANSWER = "closed its connection without an answer"
NOT_IN_TIME = "no answer in time"
ERROR_FIRST = "an error as its first event"
ERROR_INSIDE = "an error inside its stream"
EMPTY = "an empty answer"
CUT = "a cut answer"
BROKEN = "a broken answer"


class Verdict(NamedTuple):
    """What the end of one request says about its engine; nothing, if all are None and it was not
    answered."""

    answered: bool = False  # well
    failure: str | None = None  # how the engine failed it
    too_many_s: float | None = None  # it answered 429: seconds that it wants to be left alone


ANSWERED, NOTHING_SAID = Verdict(answered=True), Verdict()


def by_status(status: int, failure: str, retry_after_s: float) -> Verdict:
    """Of an answer with a status that is not 2xx. `failure`: said of a server error."""
    if status == TOO_MANY:
        return Verdict(too_many_s=retry_after_s)
    if status < SERVER_ERROR or status == NOT_IMPLEMENTED:
        return NOTHING_SAID
    return Verdict(failure=failure)


class ClientErrors:
    """Of one engine, to requests with a body."""

    def __init__(self) -> None:
        self.in_a_row = 0  # since its last good answer

    def are_doubted(self, status: int) -> bool:
        """Whether that status is a client error that may be the engine's own: it gave one to the
        request before, too, or it is hardly of a body."""
        if status not in CLIENT_ERRORS or status == TOO_MANY:
            return False
        self.in_a_row += 1
        return status in OF_ENGINE or self.in_a_row > BELIEVED_IN_A_ROW


class _Failure(NamedTuple):
    at: float
    what: str


class RecentResults:
    """Of one engine."""

    def __init__(self) -> None:
        self.clears = 0
        self._has_failed = False  # of the ends, one or more
        # When each request was answered, or how it failed. Nothing but this is done for a good one.
        self._ends: deque[float | _Failure] = deque(maxlen=RESULTS_MAX)
        self.answered: Callable[[float], None] = self._ends.append
        """It answered a request well, now."""

    def failed(self, what: str, now: float) -> bool:
        """It failed a request in this way; whether it begins to fail them with this one."""
        self._ends.append(_Failure(now, what[:FAILURE_CHARS_MAX]))
        self._has_failed = True
        report = self.report(now)
        return report is not None and report.in_a_row == FAILING_IN_A_ROW

    def clear(self) -> None:
        """The engine is gone: what comes in its place is another one."""
        self.clears += 1
        self._ends.clear()
        self._has_failed = False

    def report(self, now: float) -> EngineResults | None:
        """None where it failed none in the window."""
        if not self._has_failed:
            return None
        start, latest = now - WINDOW_S, reversed(self._ends)
        in_a_row = sum(1 for _ in takewhile(lambda end: isinstance(end, _Failure), latest))
        while len(self._ends) > in_a_row and _at(self._ends[0]) <= start:
            self._ends.popleft()
        failures = [end for end in self._ends if isinstance(end, _Failure)]
        if not failures:
            self._has_failed = False
            return None
        failed, of = len(failures), len(self._ends)
        return EngineResults(failed=failed, of=of, in_a_row=in_a_row, what=failures[-1].what)


def _at(end: float | _Failure) -> float:
    return end.at if isinstance(end, _Failure) else end


class ResultsLog:
    """When an agent's log says that its engine fails, and that it answers again: one such pair of
    lines in LOG_EVERY_S."""

    def __init__(self) -> None:
        self.is_told = False  # that it fails
        self._clears = 0  # when that was told
        self._due_at = float("-inf")

    def line(self, results: EngineResults | None, clears: int, now: float) -> str | None:
        """What to log now of an engine that takes work, if anything; `is_told` says which.
        `clears`: how often its results were cleared."""
        if not self.is_told:
            if results is None or not results.is_failing or now < self._due_at:
                return None
            self.is_told, self._clears, self._due_at = True, clears, now + LOG_EVERY_S
            return f"engine fails: {results.words}"
        if clears != self._clears:
            self.is_told = False
            return "engine begins anew: what failed before no longer counts"
        if results is None:
            self.is_told = False
            return f"engine has failed no request for {WINDOW_S:.0f} s"
        if results.in_a_row or results.is_failing:
            return None
        self.is_told = False
        return f"engine answers again: {results.failed} of its last {results.of} requests failed"
