"""Cells: what differs between the runs of one study, and how one of them is played.

Every cell makes its own workload from the scenario's seed, because playing a closed loop consumes
it. All cells of one study therefore play the same requests.

`RunCurves` keeps what pictures need and reports have no place for: distributions, and regions over
time. Times are counted in slices of the run, which double in length when they are too many, so a
day and a minute both keep between `SLICES_MAX / 2` and `SLICES_MAX` points.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from mesh.replay.report import RunReport
from mesh.replay.tally import RequestOutcome, Samples
from mesh.sim.config import WorldConfig
from mesh.sim.offline.config import NONE as NO_OFFLINE
from mesh.sim.offline.config import OfflineConfig
from mesh.sim.study.scenario import Fleets, Scenario, deal, speed_for_fleets
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import RequestEnd, RequestNode, SentRequest, Workload
from mesh.sim.workloads import make
from mesh.sim.workloads.arrivals import at_speed
from mesh.sim.workloads.traces import from_trace
from mesh.sim.world import SETTLE_S, run
from schemas.ids import RegionId

SLICES_MAX = 256
SLICE_S = 1 / 16  # the narrowest; binary, so that doubled slices have the same edges
CURVE_POINTS = 512

ReportProgress = Callable[[int, float], None]  # requests ended, share of the run done


class RateSlices:
    """Counts over time, for each region."""

    def __init__(self, regions: Iterable[RegionId]) -> None:
        self.slice_s = SLICE_S
        self._counts = {region: [0] * SLICES_MAX for region in regions}
        self._used = 0

    def add(self, region: RegionId, at_s: float) -> None:
        """Count one at that time, from 0."""
        while at_s >= self.slice_s * SLICES_MAX:
            self._double()
        place = int(at_s / self.slice_s)
        self._counts[region][place] += 1
        self._used = max(self._used, place + 1)

    def rates_per_s(self) -> dict[RegionId, list[float]]:
        """Counts a second, slice by slice, up to the last slice that any region has used."""
        return {
            region: [count / self.slice_s for count in counts[: self._used]]
            for region, counts in self._counts.items()
        }

    def _double(self) -> None:
        self.slice_s *= 2
        self._used = (self._used + 1) // 2
        for counts in self._counts.values():
            pairs = zip(counts[::2], counts[1::2], strict=True)
            counts[:] = [sum(pair) for pair in pairs] + [0] * (SLICES_MAX // 2)


class RunCurves:
    """What pictures show of a run; `add` is called with every reported request."""

    def __init__(self, regions: Iterable[RegionId], seed: int) -> None:
        regions = tuple(regions)
        self.ttft_s = Samples(Random(seed))
        self.sent = RateSlices(regions)  # by the clients' region, when they were sent
        self.answered = RateSlices(regions)  # by the replicas' region, when they were done

    def add(self, sent: SentRequest, end: RequestEnd, now: float) -> None:
        """One request's end, at the world's time `now`."""
        self.sent.add(sent.region, sent.sent_at - SETTLE_S)
        if end.outcome is not RequestOutcome.OK or sent.first_at is None:
            return
        self.ttft_s.add(sent.first_at - sent.sent_at)
        if end.replica is not None:  # replicas are named after their region
            site = RegionId(end.replica.rpartition("-")[0])
            self.answered.add(site, now - SETTLE_S)

    def ttft_curve_s(self) -> list[float]:
        """Times to first token at equal steps from the quickest to the slowest."""
        return self.ttft_s.curve(CURVE_POINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. `load`: a share of the fleet's capacity, None to play at the scenario's speed.

    `offline`: the scope of batch jobs, None where there are none.
    """

    policy: str
    topology: str = "mesh"
    pushing: str = "pending"
    load: float | None = None
    offline: str | None = None
    replicas: Mapping[RegionId, int]

    @property
    def total(self) -> int:
        return sum(self.replicas.values())


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    report: RunReport
    curves: RunCurves


def labels(cells: Sequence[Cell]) -> list[str]:
    """A name for each cell: its policy, and of the rest what is not the same in all of them."""
    columns = [
        [cell.policy for cell in cells],
        [cell.topology for cell in cells],
        [cell.pushing for cell in cells],
        ["" if cell.load is None else f"load {cell.load:g}" for cell in cells],
        ["" if cell.offline is None else f"offline {cell.offline}" for cell in cells],
        [",".join(f"{region}={n}" for region, n in cell.replicas.items()) for cell in cells],
    ]
    shown = columns[:1] + [column for column in columns[1:] if len(set(column)) > 1]
    return [" ".join(parts) for parts in zip(*shown, strict=True)]


def workload_of(scenario: Scenario) -> Workload:
    """The requests, at the scenario's speed. Raises ValueError that says what to change."""
    if scenario.trace is not None:
        workload = from_trace(
            scenario.trace,
            scenario.format,
            regions=scenario.weights,
            seed=scenario.seed,
            limit=scenario.limit,
            scale=scenario.scale_lengths,
            assign=scenario.assign,
        )
    else:
        workload = _synthetic(scenario)
    if not workload.arrivals and not workload.clients:
        raise ValueError(
            f"{workload.name}: no request is sent in so short a time: "
            "raise --duration-s or --rate-per-s"
        )
    regions = scenario.region_names
    used = {arrival.region for arrival in workload.arrivals}
    used |= {client.region for client in workload.clients}
    for region in sorted(used.difference(regions)):
        raise ValueError(
            f"{workload.name} has clients in {region}, which is not in --regions: "
            f"place them, as --clients {','.join(f'{name}=10' for name in regions)}"
        )
    return workload if scenario.speed is None else at_speed(workload, scenario.speed)


def _synthetic(scenario: Scenario) -> Workload:
    assert scenario.workload is not None
    clients = scenario.clients
    workload = make(
        scenario.workload,
        clients=None if clients is None else {RegionId(name): n for name, n in clients.items()},
        seed=scenario.seed,
        duration_s=scenario.duration_s,
        rate_per_s=scenario.rate_per_s,
    )
    if scenario.limit is None:
        return workload
    if workload.clients:
        raise ValueError("--limit counts arrivals; a closed loop ends by --duration-s")
    return replace(workload, arrivals=workload.arrivals[: scenario.limit])


def world_of(scenario: Scenario, cell: Cell, workload: Workload) -> tuple[Workload, WorldConfig]:
    """The workload at the cell's load, and the world that it is played in. Raises ValueError."""
    fleets = deal(scenario.patterns, cell.replicas)
    if cell.load is not None:
        workload = at_speed(workload, speed_for_fleets(workload, fleets, cell.load))
    return workload, config_of(scenario, cell, fleets)


def config_of(scenario: Scenario, cell: Cell, fleets: Fleets) -> WorldConfig:
    """The world of one cell. Raises ValueError."""
    return WorldConfig(
        regions=fleets,
        rtt=scenario.rtt_table,
        topology=cell.topology,
        settings=scenario.router_settings(cell.policy, cell.pushing),
        seed=scenario.seed,
        heartbeat_s=scenario.heartbeat_ms / 1000,
        gossip_s=None if scenario.gossip_ms is None else scenario.gossip_ms / 1000,
        loss=scenario.loss,
        jitter_s=scenario.jitter_ms / 1000,
        timeout_s=scenario.timeout_s,
        warmup_s=scenario.warmup_s,
        offline=offline_of(scenario, cell),
    )


def offline_of(scenario: Scenario, cell: Cell) -> OfflineConfig | None:
    """The batch jobs of one cell's regions. Raises ValueError or OSError."""
    scope = cell.offline
    if scope is None or scope == NO_OFFLINE:
        return None
    budget_ms = scenario.offline_budget_ms
    return OfflineConfig(
        jobs=tuple(job for job in scenario.offline_jobs() if job.region in cell.replicas),
        scope=scope,
        budget_s=None if budget_ms is None else budget_ms / 1000,
    )


def play(
    scenario: Scenario,
    cell: Cell,
    *,
    perf: Callable[[], float] | None = None,
    progress: ReportProgress | None = None,
) -> CellResult:
    """Run one cell to its end. Raises ValueError for what can't be played."""
    workload, config = world_of(scenario, cell, workload_of(scenario))
    curves = RunCurves(scenario.region_names, scenario.seed)
    report = run(
        workload,
        config,
        progress=None if progress is None else _as_share(workload, progress),
        perf=perf,
        makers=TwinPolicies(),
        watch=curves.add,
    )
    facts = {
        "load": cell.load,
        "speed": workload.facts.get("at_speed", 1.0),
        "profiles": {
            region: dict(Counter(engine.name for engine in fleet))
            for region, fleet in deal(scenario.patterns, cell.replicas).items()
        },
    }
    return CellResult(cell, report | facts, curves)


def _as_share(workload: Workload, progress: ReportProgress) -> ReportProgress:
    """The world's own progress, in requests and virtual seconds, as a share of the run."""
    total = len(nodes(arrival.node for arrival in workload.arrivals))
    until_s = workload.until_s

    def update(ended: int, at_s: float) -> None:
        share = at_s / until_s if workload.clients and until_s else ended / max(1, total)
        progress(ended, min(1.0, share))

    return update


def nodes(roots: Iterable[RequestNode]) -> list[RequestNode]:
    """The requests of these trees, from the roots down."""
    found = list(roots)
    for node in found:
        found.extend(node.children)
    return found


def tokens(roots: Iterable[RequestNode]) -> int:
    """Tokens of all prompts and answers of these trees."""
    return sum(node.prompt_tokens + node.answer.tokens for node in nodes(roots))
