"""What was asked of `mesh up`, and the topology that follows from it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import SecretStr

from infra.topology import Region, Topology, TopologyError
from infra.workers import crowd_problems
from schemas.ids import ModelId, RegionId, ReplicaId

REPLICAS_HERE_MAX = 96  # 8 times the packaged mesh


class EngineKind(StrEnum):
    """Whose HTTP face and metrics an engine has."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class GivenEngine:
    """A server that runs already and is to serve as a replica's engine."""

    region: str
    url: str
    metrics_url: str | None = None
    batch_max: int | None = None  # None: as its agent finds out
    models: tuple[ModelId, ...] = ()  # none: those that it lists
    key: SecretStr | None = None  # that it wants


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of `mesh up`, checked."""

    config: Path
    state: Path
    replicas: int | None = None  # per region; None: as the configuration says
    time_scale: float = 1.0
    profile: str | None = None  # of simulated engines; None: their own default
    engines: tuple[GivenEngine, ...] = ()
    engine_kind: EngineKind = EngineKind.VLLM
    # Of every router; None: as the configuration says, or the router's own default.
    policy: str | None = None
    pushing: str | None = None
    hold_order: str | None = None
    log_level: str = "WARNING"  # of routers
    workers: int | None = None  # processes of each router; None: as the configuration says
    ready_file: Path | None = None


def fitted(topology: Topology, options: Options) -> Topology:
    """The topology with the replicas and the workers that the options ask for.

    Given engines replace all simulated ones, those of regions that got none too: a mesh of real
    and simulated engines would serve different models under one roof. Raises TopologyError for
    an engine of a region there is not, for a mesh of no replica or of too many, and for workers
    that a region can't have.
    """
    for engine in options.engines:
        if engine.region not in topology.regions:
            raise TopologyError(
                f'--engine {engine.region}={engine.url}: no region "{engine.region}": '
                f"there are {', '.join(topology.regions)}"
            )
    given = Counter(engine.region for engine in options.engines)

    def count(name: RegionId) -> int | None:
        return given[name] if given else options.replicas

    regions = {name: _resized(name, table, count(name)) for name, table in topology.regions.items()}
    _require_some(sum(len(region.replicas) for region in regions.values()), options.config)
    if options.workers is not None:
        update = {"workers": options.workers}
        regions = {name: table.model_copy(update=update) for name, table in regions.items()}
        _require_room(regions, options.workers)
    return topology.model_copy(update={"regions": regions})


def _require_some(replicas: int, config: Path) -> None:
    if not replicas:
        raise TopologyError(
            f"{config}: no region has a replica, so nothing could be answered; "
            "give a region some, or use --replicas"
        )
    if replicas > REPLICAS_HERE_MAX:
        raise TopologyError(
            f"{config}: {replicas} replicas, of two processes each, are too many for one machine; "
            f"use --replicas for fewer, at most {REPLICAS_HERE_MAX} in all regions together"
        )


def _require_room(regions: Mapping[RegionId, Region], workers: int) -> None:
    for name, region in regions.items():
        for key, problem in crowd_problems(dict.fromkeys(region.routers, workers)):
            raise TopologyError(f"--workers {workers}: regions.{name}.{key}: {problem}")


def _resized(name: RegionId, region: Region, count: int | None) -> Region:
    if count is None:
        return region
    names = tuple(ReplicaId(f"{name}-{number}") for number in range(count))
    return region.model_copy(update={"replicas": names})
