"""Which pages of an engine can be read, and whether the engine is up without them.

An engine that answers requests is up; its pages only show how it is. The page of metrics may be at
another address, behind a login or of a new format, and either page may fail alone:

    list of models    page of metrics    then
    no connection     any                the engine is not there
    lists no model    any                it serves none
    good              bad                it is up, and its agent counts by itself
    bad               good               it is up with the models last known, if one server has both
    bad               bad or none        it is up as long as it answers requests well

A page counts as broken after FAILURES_MAX failures in a row. Where the page was never good since
the engine started, or timed out while answers brought bytes, that takes longer: engines serve
their list before their metrics, and both from the loop that streams tokens. A broken page is asked
again every RETRY_S, and counts as good with its first good answer.
"""

from enum import Enum, auto
from typing import NamedTuple

from agents.core.events import PAGES_GOOD, PagesSeen
from schemas.state import PAGE_PROBLEM_CHARS_MAX

FAILURES_MAX = 3
START_S = 10.0  # from the first good list of models to work without a page of metrics
BUSY_S = 10.0  # of a page that times out while answers bring bytes
UNREADABLE_S = 30.0  # SGLang's page is empty until its scheduler has logged a step
PROOF_S = 10.0  # a good answer shows for so long that the engine is up
RETRY_S = 2.0


class FaultKind(Enum):
    """Why a page could not be read."""

    NO_CONNECTION = auto()  # nothing answers there, or it closed the connection
    TIMED_OUT = auto()
    LOGIN = auto()  # 401 or 403
    BAD_ANSWER = auto()  # another status, or not what the page should hold
    UNREADABLE = auto()  # of metrics: none of the series of its kind
    OTHER_KIND = auto()  # of metrics: none, and the engine is of another kind
    NO_MODEL = auto()  # of models: a good list without any


class PageFault(NamedTuple):
    """`what`: in a few words, without an address."""

    kind: FaultKind
    what: str


class Look(NamedTuple):
    """What one scrape found. A page has a fault, or was read well or not asked."""

    began_at: float
    last_content_at: float  # when a good answer to a request last brought a byte
    asked_models: bool
    models: PageFault | None
    asked_metrics: bool
    metrics: PageFault | None


class ScrapeResult(Enum):
    """What a scrape amounts to."""

    UP = auto()
    WAIT = auto()  # it is up, and what is not known of its load may come yet
    FAILED = auto()  # it may be gone


class _Page:
    """One page: how long it has failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.problem: str | None = None
        self.failures = 0
        self.is_known = False  # it was good since the engine started
        self._since = 0.0

    def was_good(self, *, shows: bool = True) -> None:
        self.failures, self.problem = 0, None
        self.is_known |= shows

    def restart(self) -> None:
        """The engine starts anew: a page that was not broken has its time."""
        self.is_known = False
        if self.problem is None:
            self.failures = 0

    def failed(self, fault: PageFault, now: float, patience_s: float = 0.0) -> None:
        if not self.failures:
            self._since = now
        self.failures += 1
        is_broken = self.failures >= FAILURES_MAX and now - self._since >= patience_s
        if is_broken or self.problem is not None:
            self.problem = f"{self._name}: {fault.what}"[:PAGE_PROBLEM_CHARS_MAX]


class EnginePages:
    """Of one engine. Fed with what each scrape found."""

    def __init__(self, *, has_metrics: bool, one_server: bool) -> None:
        """`one_server`: the page of metrics has the address of the API."""
        self._has_metrics = has_metrics
        self._one_server = one_server
        self._metrics, self._models = _Page("metrics"), _Page("models")
        self._knows_models = self._was_up = False
        self._proved_at = float("-inf")
        self._again_at = float("-inf")  # when a broken page of metrics is asked again
        self._wants_proof = False
        self._failures = 0  # scrapes, one after the other
        self.asks_both = False  # neither page may wait for the other, and both are asked

    @property
    def shows_numbers(self) -> bool:
        """Whether its page of metrics shows what it does."""
        return self._has_metrics and self._metrics.problem is None

    @property
    def seen(self) -> PagesSeen:
        """For the event of a scrape."""
        problem = self._metrics.problem or self._models.problem
        if problem is None and not self._wants_proof:
            return PAGES_GOOD
        return PagesSeen(problem, self._metrics.problem is not None, self._wants_proof)

    @property
    def was_away(self) -> bool:
        """Whether scrapes have failed for so long that another process may have its place."""
        return self._failures >= FAILURES_MAX

    @property
    def models_again_s(self) -> float:
        """Seconds until a list of models is due again that could not be read."""
        return 0.0 if self._models.problem is None else RETRY_S

    def asks_metrics(self, now: float) -> bool:
        """Whether this scrape is to read the page of metrics."""
        return self._metrics.problem is None or now >= self._again_at

    def proved(self, now: float) -> None:
        """It answered a request of the agent's own well."""
        self._proved_at = now

    def looked(self, look: Look, now: float) -> ScrapeResult:
        """Take in a scrape."""
        result = self._judged(look, now)
        if look.asked_metrics and look.metrics is not None:
            self._again_at = now + RETRY_S
        if result is ScrapeResult.UP:
            self._was_up = True
        elif result is ScrapeResult.FAILED and look.asked_models and look.models is not None:
            self._was_up = False
            self._metrics.restart()
        is_answering = look.last_content_at > look.began_at
        self._failures = (
            self._failures + 1 if result is ScrapeResult.FAILED and not is_answering else 0
        )
        failures = self._metrics.failures + self._models.failures
        self.asks_both = result is not ScrapeResult.UP or failures > 0
        return result

    def _judged(self, look: Look, now: float) -> ScrapeResult:
        models, metrics = look.models, look.metrics
        if look.asked_models:
            self._wants_proof = False
            if models is None:
                self._knows_models = True
                self._models.was_good()
        is_unreadable = metrics is not None and metrics.kind is FaultKind.UNREADABLE
        if is_unreadable and look.last_content_at == float("-inf"):
            metrics = None  # there was nothing to show
        if look.asked_metrics and metrics is None:
            self._metrics.was_good(shows=look.metrics is None)
        if models is not None:
            return self._without_models(look, models, metrics, now)
        return ScrapeResult.UP if metrics is None else self._without_metrics(look, metrics, now)

    def _without_metrics(self, look: Look, fault: PageFault, now: float) -> ScrapeResult:
        """Its list of models is good, or was not asked."""
        if fault.kind in (FaultKind.UNREADABLE, FaultKind.OTHER_KIND):
            may_come = fault.kind is FaultKind.UNREADABLE and not self._metrics.is_known
            self._metrics.failed(fault, now, UNREADABLE_S if may_come else 0.0)
            return ScrapeResult.UP  # it has answered
        if not look.asked_models:
            return ScrapeResult.FAILED if self._metrics.problem is None else ScrapeResult.UP
        is_busy = fault.kind is FaultKind.TIMED_OUT and look.last_content_at > look.began_at
        patience_s = START_S if not self._was_up else BUSY_S if is_busy else 0.0
        self._metrics.failed(fault, now, patience_s)
        return ScrapeResult.WAIT if self._metrics.problem is None else ScrapeResult.UP

    def _without_models(
        self, look: Look, fault: PageFault, metrics: PageFault | None, now: float
    ) -> ScrapeResult:
        """Its list of models can't be read."""
        if fault.kind in (FaultKind.NO_CONNECTION, FaultKind.NO_MODEL) or not self._knows_models:
            return ScrapeResult.FAILED
        shown = self._one_server and look.asked_metrics and metrics is None
        # Requests get 401 too where the list does, if the key is wrong; a page may be open to all.
        if not shown or fault.kind is FaultKind.LOGIN:
            if fault.kind is FaultKind.TIMED_OUT:
                return ScrapeResult.FAILED
            answered_s = now - max(look.last_content_at, self._proved_at)
            self._wants_proof = answered_s >= PROOF_S / 2
            if answered_s >= PROOF_S:
                return ScrapeResult.FAILED
        self._models.failed(fault, now)
        if metrics is not None:
            self._metrics.failed(metrics, now)
            if self._metrics.problem is None and metrics.kind is not FaultKind.UNREADABLE:
                return ScrapeResult.WAIT  # its load as last read may still hold
        return ScrapeResult.UP
