"""The batch runner's Prometheus metrics: every name is here, and only here."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.metrics_page import add_process_metrics
from mesh.adapters.metrics import LATENESSES, OTHER
from mesh.batch.held_lines import LineMetrics
from mesh.batch.job_follower import JobMetrics
from mesh.batch.output_line import Result
from mesh.batch.records import StoreError, StoreFull
from mesh.core.model import events as ev
from mesh.session.bus_receiver import NOBODY_LISTENS
from mesh.session.record import Ending, Observer, OpenRequest
from schemas import exchange
from schemas.batch import ENDED, BatchJob, JobStatus, Task
from schemas.ids import RegionId

_REASONS = frozenset((*exchange.Refusal, NOBODY_LISTENS))


class RunnerState(Protocol):
    """What is read at a scrape."""

    def open_jobs(self) -> Iterable[BatchJob]:
        """Of the region, that have not ended."""

    def lines_held(self) -> int:
        """Lines that this runner has."""

    def lines_tried(self) -> int:
        """Those of them that a replica has, or is about to get."""


class RunnerMetrics(Observer, JobMetrics, LineMetrics):
    """One batch runner's metrics in a registry of its own."""

    def __init__(self, home: RegionId, peers: tuple[RegionId, ...]) -> None:
        self._home, self._regions = home, frozenset((home, *peers))
        self.registry = CollectorRegistry()
        add_process_metrics(self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.runner = gauge("mesh_batch_runner", "1, and which batch runner this is.", ["runner"])
        self.bus_connected = gauge("mesh_bus_connected", "Whether the bus can be reached.")
        self.store_connected = gauge("mesh_batch_store_connected", "The same of the jobs' store.")
        self.store_bytes = gauge(
            "mesh_batch_store_bytes", "Bytes of each part of the region's store.", ["part"]
        )
        self.store_bytes_max = gauge(
            "mesh_batch_store_bytes_max", "Most of them; a full part refuses what is new.", ["part"]
        )
        self.loop_late = Histogram(
            "mesh_loop_late_seconds",
            "How much later than it was due the event loop came to a timer.",
            buckets=LATENESSES,
            registry=self.registry,
        )
        self._job_counters(counter)
        self._line_counters(counter)
        self.ingress_refusals = counter(
            "mesh_ingress_refusals", "Lines of peers not taken, by why.", ["reason"]
        )
        self.replies_dropped = counter(
            "mesh_replies_dropped",
            "Requests on the bus whose reply subject is not allowed, by channel.",
            ["channel"],
        )

    def _job_counters(self, counter: Callable[..., Counter]) -> None:
        self.jobs_ended = counter("mesh_batch_jobs_ended", "Jobs by how they ended.", ["status"])
        self.jobs_late = counter(
            "mesh_batch_jobs_late", "Jobs of which it was predicted that they will be late."
        )
        self.tasks = counter(
            "mesh_batch_tasks", "Checks and finishes of jobs by this runner.", ["task", "outcome"]
        )
        self.store_errors = counter(
            "mesh_batch_store_errors",
            "Times that the store took no result or gave no line: full, unavailable.",
            ["why"],
        )
        for why in ("full", "unavailable"):
            self.store_errors.labels(why)  # so that the first error is an increase

    def _line_counters(self, counter: Callable[..., Counter]) -> None:
        self.lines = counter(
            "mesh_batch_lines",
            "Lines whose result this runner stored: answered, engine_error, or the error's code.",
            ["result"],
        )
        self.lines_put_back = counter(
            "mesh_batch_lines_put_back", "Lines that this runner gave back to the queue."
        )
        self.hand_outs = counter(
            "mesh_batch_hand_outs",
            "Lines given to a replica or region, to which region and as what: offline, online.",
            ["to", "kind"],
        )
        self.refusals = counter("mesh_batch_refusals", "Lines not taken, by reason.", ["reason"])
        self.preemptions = counter(
            "mesh_batch_preemptions", "Lines given back by agents for online requests."
        )
        self.failures = counter("mesh_batch_attempt_failures", "Attempts that failed.")
        self.tokens = counter(
            "mesh_batch_tokens",
            "Tokens of lines, as engines counted: prompt, cached (part of prompt), answer.",
            ["kind"],
        )
        self.peer_lines = counter(
            "mesh_ingress", "Lines of peers, by result.", ["origin", "result"]
        )
        self.frames_lost = counter(
            "mesh_frames_missing", "Times that frames of an answer were lost and requested again."
        )

    def store_filled(self, fill: Mapping[str, tuple[int, int]]) -> None:
        """How full each part of the store is; none where that is not known."""
        for gauge, number in ((self.store_bytes, 0), (self.store_bytes_max, 1)):
            gauge.clear()
            for part, sizes in fill.items():
                gauge.labels(part).set(sizes[number])

    def read(self, state: RunnerState) -> None:
        """Read `state` at every scrape."""
        self.registry.register(_Collected(state))

    # Jobs.

    def task(self, task: Task, outcome: str) -> None:
        self.tasks.labels(task, outcome).inc()

    def ended(self, job: BatchJob) -> None:
        self.jobs_ended.labels(job.status).inc()

    def late(self, job: BatchJob) -> None:
        self.jobs_late.inc()

    # Lines.

    def stored(self, result: Result, code: str) -> None:
        engines = "engine_error" if result.is_error else "answered"
        self.lines.labels(code or engines).inc()

    def put_back(self) -> None:
        self.lines_put_back.inc()

    def store_failed(self, error: StoreError) -> None:
        self.store_errors.labels("full" if isinstance(error, StoreFull) else "unavailable").inc()

    def handed_out_to(self, region: RegionId, *, offline: bool) -> None:
        """A line goes to a replica of this region or to a peer."""
        self.hand_outs.labels(region, "offline" if offline else "online").inc()

    # Attempts.

    def refused(self, record: OpenRequest, event: ev.AttemptRefused) -> None:
        self.refusals.labels(event.reason if event.reason in _REASONS else OTHER).inc()

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        (self.preemptions if event.preempted else self.failures).inc()

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        for kind, count in (
            ("prompt", end.prompt_tokens),
            ("cached", end.cached_tokens),
            ("answer", end.completion_tokens),
        ):
            self.tokens.labels(kind).inc(max(0, count))

    def frames_missing(self) -> None:
        self.frames_lost.inc()

    def request_ended(self, record: OpenRequest, ending: Ending) -> None:
        origin = record.request.origin
        known = origin if origin in self._regions else OTHER
        self.peer_lines.labels(known, ending.outcome).inc()
        if ending.detail:
            self.ingress_refusals.labels(ending.detail).inc()


class _Collected(Collector):
    """Gauges read at scrape time."""

    def __init__(self, state: RunnerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        jobs = list(self._state.open_jobs())
        by_status = GaugeMetricFamily(
            "mesh_batch_jobs", "Jobs of the region that have not ended.", labels=["status"]
        )
        tally = Tally(job.status for job in jobs)
        for status in JobStatus:
            if status not in ENDED:
                by_status.add_metric([status], tally[status])
        yield by_status
        yield GaugeMetricFamily(
            "mesh_batch_lines_left",
            "Lines of the region's jobs that have no result.",
            value=sum(job.total - job.answered for job in jobs),
        )
        yield GaugeMetricFamily(
            "mesh_batch_jobs_late_now",
            "Jobs in progress that are predicted to be late.",
            value=sum(job.late for job in jobs),
        )
        yield GaugeMetricFamily(
            "mesh_batch_lines_held", "Lines that this runner has.", value=self._state.lines_held()
        )
        yield GaugeMetricFamily(
            "mesh_batch_lines_tried",
            "Those of them that a replica has, or is about to get.",
            value=self._state.lines_tried(),
        )
