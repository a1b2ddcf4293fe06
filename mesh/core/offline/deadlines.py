"""When a job will end, and when its lines are raised to online priority so that it ends in time.

Work is counted in tokens of prompts and answers, for each model. Jobs are worked off by deadline,
so a job ends when its own work and that of all jobs with earlier deadlines is done, at the speed
that is expected (`capacity.py`).

A job that would end after its deadline, less a margin, is raised: as many of its tokens a second as
are missing go out as online requests of low priority, besides what fits as offline work. In the
margin itself all that is left goes with normal priority. Without a forecast no job is raised before
half its window is gone, as its speed by day says little about the night. From then on peers' claims
of slack are ignored: a peer that claims too much delays the raise, not the job. A job is late if it
will end after its deadline even so.
"""

from collections.abc import Container, Iterable
from math import inf

from mesh.core.offline.capacity import Capacity, Speeds, Throughput, expected
from mesh.core.offline.forecast import MODELS_MAX, Forecast
from mesh.core.offline.jobs import JobRecord
from mesh.core.offline.line_regions import Regions
from mesh.core.offline.queues import Wanted
from schemas.exchange import Priority
from schemas.ids import ModelId

LOOK_S = 2.0  # between two looks at all jobs
MARGIN_SHARE, MARGIN_S_MAX = 0.1, 900.0  # of the window, before its end
RAISE_MORE = 1.25  # than the tokens that are missing, as forecasts err
PATIENT_SHARE = 0.5  # of the window, without a forecast
BURST_S = 30.0  # of a raised job's tokens that may go at once
LATE_AFTER_S = 60.0  # after a job was raised: by then the effect is measured


class Pace:
    """Judges all jobs every LOOK_S."""

    def __init__(self, forecast: Forecast, regions: Regions) -> None:
        self._forecast = forecast
        self._regions = regions
        self._speeds: dict[ModelId, Speeds] = {}
        self._looked_at = -inf
        self._raised_at: dict[str, float] = {}
        self.raised: list[JobRecord] = []
        self.left_tokens: dict[ModelId, float] = {}  # of all jobs, as of the last look
        self.saturated: frozenset[ModelId] = frozenset()  # lines wait, and no replica here has room
        self._ahead: dict[tuple[str, ModelId], float] = {}
        self._capacities: dict[tuple[ModelId, Wanted, bool], Capacity | None] = {}

    def speeds(self, model: ModelId) -> Speeds:
        """Of that model; add what was computed to them."""
        speeds = self._speeds.get(model)
        if speeds is None:
            if len(self._speeds) >= MODELS_MAX:
                del self._speeds[next(iter(self._speeds))]
            speeds = Speeds(Throughput(), Throughput(), Throughput())
            self._speeds[model] = speeds
        return speeds

    def work_until(self, job: str, model: ModelId) -> float:
        """Tokens of that model to be computed before the job is done, as of the last look."""
        return self._ahead.get((job, model), 0.0)

    def _capacity(self, model: ModelId, record: JobRecord, now: float) -> Capacity | None:
        """Expected for lines of this model of that job; kept for one look."""
        job = record.job
        is_trusting = job.deadline - now > PATIENT_SHARE * (job.deadline - job.began_at)
        name = model, record.wanted, is_trusting
        if name not in self._capacities:
            self._capacities[name] = expected(
                self._forecast.slack_tokens(model, now),
                self._regions.promised(model, record.wanted, now) if is_trusting else (),
                self.speeds(model),
                is_trusting=is_trusting,
            )
        return self._capacities[name]

    def look(
        self,
        jobs: Iterable[JobRecord],
        busy: Iterable[ModelId],
        unserved: Container[ModelId],
        now: float,
    ) -> None:
        """Judge the jobs, in order of deadlines, if it is time. `busy`: models of waiting lines;
        `unserved`: models that no replica serves."""
        if now - self._looked_at < LOOK_S:
            return
        passed_s = min(10 * LOOK_S, now - self._looked_at)
        self._looked_at = now
        working = set(busy)
        for model, speeds in self._speeds.items():
            speeds.home.pass_time(passed_s, is_busy=model in self.saturated)
            for speed in (speeds.peers, speeds.raised):
                speed.pass_time(passed_s, is_busy=model in working)
        self._ahead.clear()
        self.raised.clear()
        self._capacities.clear()
        ahead: dict[ModelId, float] = {}  # work of jobs with earlier deadlines
        self.left_tokens = ahead
        raised: dict[ModelId, float] = {}  # of that, what goes as online work
        known = set()
        for record in jobs:
            known.add(record.job.id)
            for model in record.models:
                ahead[model] = ahead.get(model, 0.0) + record.left_tokens(model)
                self._ahead[record.job.id, model] = ahead[model]
            self._judge(record, raised, now)
            if record.left and any(model in unserved for model in record.models):
                record.end_at = None  # no forecast covers when a replica for it starts
            if record.raised_to is not None:
                earned = record.raise_tokens + record.raise_tokens_per_s * passed_s
                most = max(record.raise_tokens_per_s * BURST_S, record.line_tokens)
                record.raise_tokens = min(earned, most)
                self.raised.append(record)
        for gone in [job for job in self._raised_at if job not in known]:
            del self._raised_at[gone]

    def _judge(self, record: JobRecord, raised: dict[ModelId, float], now: float) -> None:
        job = record.job
        if record.is_over or not record.left:
            record.raised_to, record.is_late = None, False
            record.end_at = now if record.end_at is None else min(now, record.end_at)
            return
        left_s = job.deadline - now
        margin_s = margin(job.began_at, job.deadline)
        missing, end_s, with_online_s = 0.0, 0.0, 0.0
        is_known = is_forecast = bool(record.models)
        for model in record.models:
            work, capacity = self._ahead[job.id, model], self._capacity(model, record, now)
            if capacity is None:
                is_known = is_forecast = False
                missing += record.left_tokens(model)
                continue
            is_forecast = is_forecast and capacity.is_forecast
            end_s = max(end_s, capacity.time_for(work))
            online = self.speeds(model).raised.per_s() or 0.0
            with_online_s = max(with_online_s, capacity.plus(online).time_for(work))
            short = work - capacity.until(left_s - margin_s) - raised.get(model, 0.0)
            short = min(record.left_tokens(model), max(0.0, short))
            raised[model] = raised.get(model, 0.0) + short
            missing += short
        is_patient = not is_forecast and left_s > PATIENT_SHARE * (job.deadline - job.began_at)
        expected_s = end_s if is_known else inf
        record.raised_to = None if is_patient else _class(record, expected_s, left_s, margin_s)
        record.raise_tokens_per_s = RAISE_MORE * missing / max(left_s - margin_s, 1.0)
        if record.raised_to is Priority.NORMAL:
            record.raise_tokens_per_s = inf
        since = self._raised_at.setdefault(job.id, now) if record.raised_to else now
        if record.raised_to is None:
            self._raised_at.pop(job.id, None)
        end_s = with_online_s if record.raised_to else end_s
        is_estimate = is_known and end_s < inf
        record.end_at = now + end_s if is_estimate else None
        was_tried = now - since >= LATE_AFTER_S or left_s < LATE_AFTER_S
        record.is_late = (
            record.raised_to is not None and was_tried and not (is_estimate and end_s <= left_s)
        )


def _class(record: JobRecord, end_s: float, left_s: float, margin_s: float) -> Priority | None:
    """The priority that a job's lines are raised to; `end_s`: until its end without that."""
    if left_s <= margin_s:
        return Priority.NORMAL
    # Once raised, it is to be clearly in time before it goes back.
    needed_s = left_s - margin_s * (2 if record.raised_to else 1)
    return Priority.LOW if end_s > needed_s else None


def margin(began_at: float, deadline: float) -> float:
    """Seconds before a job's deadline in which all that is left is raised."""
    return min(MARGIN_S_MAX, MARGIN_SHARE * (deadline - began_at))
