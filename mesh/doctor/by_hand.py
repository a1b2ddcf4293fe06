"""What to run where a region's nats-server does not answer, by how the mesh was started."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.nats.bundle import CONFIG
from infra.topology import Topology
from mesh.doctor.findings import Remedy
from mesh.doctor.folding import ByHand
from mesh.doctor.reach import Silence
from schemas.ids import RegionId


def on_machines(topology: Topology) -> ByHand:
    """Of regions on machines of their own, under the units of `infra/systemd`."""

    def of(region: str, silence: Silence) -> Remedy:
        unit = f"mesh-nats@{region}"
        host = topology.regions[RegionId(region)].nats.host
        state = "hangs or is stopped" if silence.listens else "is down, or there is no way to it"
        return Remedy(
            f"its nats-server {state}; see why and start it anew on {host}, if not by systemd as "
            "you start it there",
            f"journalctl -n 30 -u {unit}; systemctl restart {unit}",
        )

    return of


def of_demo(
    config: Path, logs: Path, pids: Mapping[str, int], binary: Callable[[], Path]
) -> ByHand:
    """Of `mesh up`, by its configurations, its logs, its processes and its nats-server."""

    def of(region: str, silence: Silence) -> Remedy:
        name = f"nats-{region}"
        if silence.listens and name in pids:
            what = f"{name} hangs or is stopped; end it, and `mesh up` starts it again"
            return Remedy(what, f"kill -KILL {pids[name]}")
        server = [str(binary()), "-c", str(config / region / CONFIG)]
        return Remedy(
            f"{name} is down, and `mesh up` starts it again unless it ended six times in a row; "
            f"{logs / name}.log says why; once that is mended",
            shlex.join(server),
        )

    return of
