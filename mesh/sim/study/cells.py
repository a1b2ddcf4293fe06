"""Cells: what differs between the runs of one study, and how one of them becomes a world.

Every cell makes its own workload from the scenario's seed, because a closed loop is used up by
being played. All cells of one study are therefore asked the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh.replay.report import Report
from mesh.sim.config import WorldConfig
from mesh.sim.run import run
from mesh.sim.study.curves import Curves
from mesh.sim.study.fleet import Fleets, deal, speed_for_fleets
from mesh.sim.study.scenario import Scenario
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import Node, Workload
from mesh.sim.workloads import make
from mesh.sim.workloads.from_trace import from_trace
from mesh.sim.workloads.pace import at_speed
from schemas.ids import RegionId

Progress = Callable[[int, float], None]  # requests ended, share of the run done


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. `load`: a share of the fleet's capacity, None to play at the scenario's speed."""

    policy: str
    topology: str = "mesh"
    pushing: str = "pending"
    load: float | None = None
    replicas: Mapping[RegionId, int]

    @property
    def total(self) -> int:
        """Replicas of all regions."""
        return sum(self.replicas.values())


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one cell."""

    cell: Cell
    report: Report
    curves: Curves


def labels(cells: Sequence[Cell]) -> list[str]:
    """A name for each cell: its policy, and of the rest what is not the same in all of them."""
    columns = [
        [cell.policy for cell in cells],
        [cell.topology for cell in cells],
        [cell.pushing for cell in cells],
        ["" if cell.load is None else f"load {cell.load:g}" for cell in cells],
        [",".join(f"{region}={n}" for region, n in cell.replicas.items()) for cell in cells],
    ]
    told = columns[:1] + [column for column in columns[1:] if len(set(column)) > 1]
    return [" ".join(parts) for parts in zip(*told, strict=True)]


def workload_of(scenario: Scenario) -> Workload:
    """What is asked, at the scenario's speed. Raises ValueError that says what to change."""
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
        workload = _made(scenario)
    if not workload.arrivals and not workload.clients:
        raise ValueError(
            f"{workload.name}: nobody asks anything in so short a time: "
            "raise --duration-s or --rate-per-s"
        )
    _check_strangers(workload, scenario.region_names)
    return workload if scenario.speed is None else at_speed(workload, scenario.speed)


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
    )


def play(
    scenario: Scenario,
    cell: Cell,
    *,
    perf: Callable[[], float] | None = None,
    progress: Progress | None = None,
) -> Played:
    """Run one cell to its end. Raises ValueError for what can't be played."""
    workload, config = world_of(scenario, cell, workload_of(scenario))
    curves = Curves(scenario.region_names, scenario.seed)
    tell = None if progress is None else _shares(workload, progress)
    report = run(
        workload, config, progress=tell, perf=perf, makers=TwinPolicies(), watch=curves.add
    )
    facts = {
        "load": cell.load,
        "speed": workload.facts.get("at_speed", 1.0),
        "profiles": {
            region: dict(Counter(engine.name for engine in fleet))
            for region, fleet in deal(scenario.patterns, cell.replicas).items()
        },
    }
    return Played(cell, report | facts, curves)


def _made(scenario: Scenario) -> Workload:
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


def _check_strangers(workload: Workload, regions: Sequence[RegionId]) -> None:
    asking = {arrival.region for arrival in workload.arrivals}
    asking |= {client.region for client in workload.clients}
    for region in sorted(asking.difference(regions)):
        raise ValueError(
            f"{workload.name} has clients in {region}, which is not in --regions: "
            f"say where they are, as --clients {','.join(f'{name}=10' for name in regions)}"
        )


def _shares(workload: Workload, progress: Progress) -> Progress:
    """The world's own progress, in requests and virtual seconds, as a share of the run."""
    total = len(nodes(arrival.node for arrival in workload.arrivals))
    until_s = workload.until_s

    def tell(ended: int, at_s: float) -> None:
        share = at_s / until_s if workload.clients and until_s else ended / max(1, total)
        progress(ended, min(1.0, share))

    return tell


def nodes(roots: Iterable[Node]) -> list[Node]:
    """The requests of these trees, from the roots down."""
    found = list(roots)
    for node in found:
        found.extend(node.children)
    return found


def tokens(roots: Iterable[Node]) -> int:
    """What these trees ask for: tokens of their prompts and answers."""
    return sum(node.prompt_tokens + node.answer.tokens for node in nodes(roots))
