"""What a running demo says of itself in `mesh.json`, as other commands read it."""

import os
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
    """What was asked of `mesh up`, by its file and by its options, and its processes' ids."""

    config: Path
    regions: dict[RegionId, RunningRegion]
    processes: dict[str, int] = {}

    def nats_servers(self, config: Path) -> dict[str, int]:
        """Ids of those nats-servers that still run with configurations below this folder.

        The record of a mesh that was killed names processes whose ids others may have by now.
        """
        below = os.fsencode(config) + b"/"
        return {
            name: pid
            for name, pid in self.processes.items()
            if any(argument.startswith(below) for argument in _command(pid))
        }

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


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []
