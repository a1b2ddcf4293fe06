"""What a running demo says of itself in `mesh.json`, as other commands read it."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from infra.topology import Topology
from mesh.demo.state_directory import StateDirectory
from schemas.ids import RegionId, ReplicaId


class RunningRegion(BaseModel):
    """What runs of one region. `workers`: processes of each of its routers."""

    replicas: tuple[ReplicaId, ...]
    workers: int


class Running(BaseModel):
    """What was asked of `mesh up`, by its file and by its options, and the ids of its processes."""

    pid: int
    config: Path
    regions: dict[RegionId, RunningRegion]
    processes: dict[str, int] = {}

    def children(self) -> dict[str, int]:
        """Ids of those of its processes that run, by program.

        Others may have the ids by now that the record of a mesh that was killed names.
        """
        return {name: pid for name, pid in self.processes.items() if _parent(pid) == self.pid}

    def fitted(self, topology: Topology) -> Topology:
        """The topology with the replicas and workers that run, whatever the file says."""
        regions = {
            name: region.model_copy(update=dict(self.regions.get(name, ())))
            for name, region in topology.regions.items()
        }
        return topology.model_copy(update={"regions": regions})


def running_with(credentials: Path) -> Running | None:
    """The demo whose credentials these are, or the last one if it was killed; else None."""
    state = StateDirectory(credentials.parent)
    if credentials.absolute() != state.config:
        return None
    try:
        return Running.model_validate_json(state.running.read_bytes())
    except (OSError, ValidationError):
        return None


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return None
    return int(stat.rpartition(")")[2].split()[1])
