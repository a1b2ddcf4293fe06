"""What to run where a part does not answer, by how the mesh was started."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from infra.nats.bundle import CONFIG
from infra.topology import Topology
from mesh.doctor.findings import Remedy
from mesh.doctor.folding import Part
from mesh.doctor.reach import Silence
from schemas.ids import RegionId


@dataclass(frozen=True, slots=True)
class OnMachines:
    """Of regions on machines of their own, under the units of `infra/systemd`."""

    topology: Topology
    config: Path
    credentials: Path

    def server(self, region: str, silence: Silence) -> Remedy:
        """Of the nats-server of that region."""
        host = self.topology.regions[RegionId(region)].nats.host
        state = "hangs or is stopped" if silence.listens else "is down, or there is no way to it"
        return Remedy(
            f"its nats-server {state}; see why and start it anew on {host}, if not by systemd as "
            "you start it there",
            _restarted(f"mesh-nats@{region}"),
        )

    def part(self, kind: Part, region: str, name: str) -> Remedy:
        """Of a router or an agent that is not heard."""
        what = f"{kind} {name} of {region} is not heard; see why and start it anew on its machine"
        return Remedy(what, _restarted(f"mesh-{kind}@{name}"))

    def stream(self, region: str, name: str) -> Remedy:
        """Of a stream that is missing or altered."""
        return _set_up(region, name, self.config, self.credentials)


def _set_up(region: str, name: str, config: Path, credentials: Path) -> Remedy:
    what = f"stream {name} of {region} is missing, or somebody altered it; make it as it should be"
    options = ["--config", str(config), "--credentials", str(credentials), "--region", region]
    return Remedy(what, shlex.join(["mesh", "infra", "streams", *options]))


def _restarted(unit: str) -> str:
    return f"journalctl -n 30 -u {unit}; systemctl restart {unit}"


@dataclass(frozen=True, slots=True)
class OfDemo:
    """Of `mesh up`, by its configurations, its logs, its nats-server and what of it runs."""

    file: Path  # its mesh.toml
    config: Path
    logs: Path
    pids: Mapping[str, int]  # by program
    binary: Callable[[], Path]

    def server(self, region: str, silence: Silence) -> Remedy:
        """Of the nats-server of that region."""
        name = f"nats-{region}"
        if name in self.pids:
            return self._hangs(name)
        if silence.listens:
            port = urlsplit(silence.url).port
            what = "it is no process of this `mesh up`; see whose it is, and end it with kill -KILL"
            return Remedy(what, f"ss -Hltnp 'sport = :{port}'")
        command = [str(self.binary()), "-c", str(self.config / region / CONFIG)]
        what = (
            f"{name} is down; `mesh up` starts it again, or has said that it does not any more; "
            f"{self.logs / name}.log says why; once that is mended"
        )
        return Remedy(what, shlex.join(command))

    def part(self, kind: Part, region: str, name: str) -> Remedy:
        """Of a router or an agent that is not heard."""
        program = f"router-{region}-{name}" if kind == "router" else f"agent-{name}"
        if program in self.pids:
            return self._hangs(program)
        what = (
            f"{program} is down; `mesh up` starts it again, or has said that it does not any more: "
            "then start the mesh anew; its last words"
        )
        return Remedy(what, shlex.join(["tail", "-n", "30", str(self.logs / f"{program}.log")]))

    def stream(self, region: str, name: str) -> Remedy:
        """Of a stream that is missing or altered; `mesh up` looks at them too, every 30 s."""
        return _set_up(region, name, self.file, self.config)

    def _hangs(self, program: str) -> Remedy:
        what = f"{program} hangs or is stopped; end it, and `mesh up` starts it again"
        return Remedy(what, f"kill -KILL {self.pids[program]}")
