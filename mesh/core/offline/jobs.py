"""The jobs in progress: how far each is, what its lines cost, and which lines to fetch next.

The window's room is divided: each job may have an equal part of the share for fairness, and the
rest goes to the jobs with the earliest deadlines.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from sortedcontainers import SortedKeyList

from mesh.core.model.request import Served
from mesh.core.offline.effects import FetchLines
from mesh.core.offline.events import Line, OfflineJob
from mesh.core.offline.lines import Window
from mesh.core.offline.queues import Wanted
from schemas.batch import LINE_BYTES_MAX
from schemas.exchange import Priority
from schemas.ids import ModelId

JOBS_MAX = 4096  # in progress at one runner; further ones wait for a place
FETCH_LINES_MAX = 512
FETCH_LINES_MIN = 32  # fewer only where nothing of the job waits here
FETCH_BYTES_MAX = 2 * LINE_BYTES_MAX  # a smaller fetch than one line's limit might never succeed
FETCH_S_MAX = 30.0  # for an answer
EMPTY_S, EMPTY_S_MAX = 1.0, 30.0  # between fetches that found nothing; each pause is longer
MODELS_MAX = 64  # that one job's lines are counted for
TOKENS_WEIGHT_MIN = 0.02  # of a new line in the mean of its job
REPORTED_TOKENS_MAX = 2**22  # of one prompt or answer; what is reported beyond is not believed
UNSERVED_MODELS_MAX = 4096  # that are remembered


@dataclass(slots=True)
class JobRecord:
    """One job."""

    job: OfflineJob
    wanted: Wanted
    # Lines fetched, by model: those that are still in the store are taken to be alike.
    models: dict[ModelId, int] = field(default_factory=dict)
    line_tokens: float = 0.0  # of one line, mean
    counted: int = 0  # lines in that mean
    fetch: int | None = None  # the number of the one under way
    fetch_at: float = -inf  # not before
    empty: int = 0  # fetches in a row that found nothing
    is_over: bool = False  # its deadline has passed
    # As `deadlines.py` judges:
    raised_to: Priority | None = None  # lines go as online requests too, of that priority
    raise_tokens_per_s: float = 0.0
    raise_tokens: float = 0.0  # that may go so now
    end_at: float | None = None
    is_late: bool = False
    reported_at: float = -inf
    reported: tuple[float | None, bool] = (None, False)

    @property
    def left(self) -> int:
        """Lines without a result."""
        return max(0, self.job.total - self.job.answered)

    def left_tokens(self, model: ModelId) -> float:
        """Prompt and answer tokens of lines of that model that have no result."""
        fetched = sum(self.models.values())
        return self.left * self.line_tokens * self.models.get(model, 0) / fetched if fetched else 0

    def fetched(self, line: Line) -> None:
        if line.model in self.models or len(self.models) < MODELS_MAX:
            self.models[line.model] = self.models.get(line.model, 0) + 1
        if not self.counted:  # until a line has been answered, the most that it may cost
            self.line_tokens = max(self.line_tokens, float(line.tokens))

    def served(self, tokens: int) -> None:
        """A line was answered, with so many tokens in all."""
        self.counted += 1
        weight = max(1 / self.counted, TOKENS_WEIGHT_MIN)
        self.line_tokens += weight * (tokens - self.line_tokens)


def served_tokens(line: Line, served: Served | None) -> int:
    """Of a line that was answered, as far as its engine reported and can be believed."""
    if served is None:
        return line.prompt.tokens
    prompt = line.prompt.tokens if served.prompt_tokens is None else served.prompt_tokens
    return min(prompt, REPORTED_TOKENS_MAX) + min(served.output_tokens or 0, REPORTED_TOKENS_MAX)


class Jobs:
    """All jobs in progress that this runner knows."""

    def __init__(self, window: Window, fair_share: float) -> None:
        self._window = window
        self._fair_share = fair_share
        self._by_id: dict[str, JobRecord] = {}
        self._last_fetch = 0
        # Fetches under way, of jobs that have ended too, and when each counts as lost.
        self._fetch_until: dict[int, tuple[str, float]] = {}
        self._by_deadline: SortedKeyList[JobRecord, tuple[float, str]] = SortedKeyList(
            key=lambda record: (record.job.deadline, record.job.id)
        )

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[JobRecord]:
        """By deadline. Don't add or remove meanwhile."""
        return iter(self._by_deadline)

    def get(self, job: str) -> JobRecord | None:
        return self._by_id.get(job)

    def see(self, job: OfflineJob, wanted: Wanted) -> JobRecord | None:
        """A job's record. Its window and labels stay as they were first. None: too many jobs.

        `wanted`: the labels of which a place must carry one.
        """
        known = self._by_id.get(job.id)
        if known is not None:
            known.job = replace(known.job, total=job.total, answered=job.answered)
            return known
        if len(self._by_id) >= JOBS_MAX:
            return None
        record = self._by_id[job.id] = JobRecord(job, wanted)
        self._by_deadline.add(record)
        return record

    def end(self, job: str) -> None:
        record = self._by_id.pop(job, None)
        if record is not None:
            self._by_deadline.remove(record)

    def overdue(self, now: float) -> list[JobRecord]:
        """Jobs whose deadline has passed since the last call."""
        found = []
        for record in self._by_deadline:
            if record.job.deadline > now:
                break
            if not record.is_over:
                record.is_over = True
                found.append(record)
        return found

    # Fetching.

    def fetched(self, job: str, number: int | None, lines: int, now: float) -> None:
        """A fetch was answered with so many lines; one that had been given up is ignored."""
        record = self._by_id.get(job)
        if number is None and record is not None:
            number = record.fetch
        if number is None or number not in self._fetch_until:
            return
        del self._fetch_until[number]
        self._window.unreserve(number)
        if record is None or record.fetch != number:
            return
        record.fetch = None
        record.empty = 0 if lines else record.empty + 1
        pause_s = min(EMPTY_S_MAX, EMPTY_S * 2.0 ** min(10, record.empty - 1))
        record.fetch_at = -inf if lines else now + pause_s

    def _give_up_fetches(self, now: float) -> None:
        while self._fetch_until:
            number, (job, until) = next(iter(self._fetch_until.items()))
            if until > now:
                break
            self.fetched(job, number, 0, now)

    def fetches(self, now: float) -> list[FetchLines]:
        """What to fetch now, of what the window has room for."""
        self._give_up_fetches(now)
        wanting = [one for one in self._by_deadline if one.fetch is None and self._more(one)]
        if not wanting:
            return []
        window = self._window
        part = max(1, int(window.lines_max * self._fair_share / len(wanting)))
        unmet = {one.job.id: max(0, part - window.held(one.job.id)) for one in wanting}
        kept = sum(unmet.values())
        found = []
        for record in wanting:
            job = record.job.id
            kept -= unmet[job]
            room = max(window.free_lines - kept, min(unmet[job], window.free_lines))
            most = min(self._more(record), room, FETCH_LINES_MAX)
            is_worth = most >= FETCH_LINES_MIN or most >= self._more(record)
            if most <= 0 or now < record.fetch_at or not (is_worth or not window.waiting(job)):
                continue
            fetch = self._fetch(record, most, now)
            if fetch is None:
                break
            found.append(fetch)
        return found

    def _more(self, record: JobRecord) -> int:
        """Lines that are neither answered nor here."""
        if record.is_over:
            return 0
        return max(0, record.left - self._window.held(record.job.id))

    def _fetch(self, record: JobRecord, lines: int, now: float) -> FetchLines | None:
        body_bytes = min(self._window.free_bytes, FETCH_BYTES_MAX)
        if body_bytes < LINE_BYTES_MAX:
            return None
        self._last_fetch += 1
        record.fetch, job = self._last_fetch, record.job.id
        self._window.reserve(record.fetch, job, lines, body_bytes)
        self._fetch_until[record.fetch] = job, now + FETCH_S_MAX
        return FetchLines(job, lines, body_bytes, record.fetch)


class UnservedModels:
    """Models of waiting lines that no replica serves, and since when.

    After a while such lines get an error instead of waiting on.
    """

    LINES_MAX = 256  # of one model that are ended each second

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[ModelId, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, model: object) -> bool:
        """Whether lines wait for it that no replica serves."""
        return model in self._since

    def restart(self, now: float) -> None:
        """No heartbeat could arrive until now."""
        self._since = dict.fromkeys(self._since, now)

    def overdue(
        self, waiting: Iterable[ModelId], served: Collection[ModelId], now: float
    ) -> list[ModelId]:
        """Those of the models with waiting lines that no replica has served for too long."""
        for model in [one for one in self._since if one in served]:
            del self._since[model]
        found = []
        for model in waiting:
            if model not in self._since:
                if model in served:
                    continue
                if len(self._since) >= UNSERVED_MODELS_MAX:
                    del self._since[next(iter(self._since))]
                self._since[model] = now
            if now - self._since[model] >= self._patience_s:
                found.append(model)
        return found
