"""`.mesh/`: the files of a demo, and the lock that keeps two demos out of one directory.

    lock                    held while a demo runs; contains its process id
    config/<region>/        nats.conf and credentials
    logs/<program>.log      all that a process printed since the demo started
    run/<program>.json      ready files of processes
    run/console.key         the admin key of the consoles, another one at each start
    jetstream/<region>/     what the nats-servers store
    mesh.json               the running demo: what it was asked for, endpoints, processes

Only this user can read it: directories have mode 0700, the files on top 0600, also where an
earlier version left them open. A directory that was there for other things keeps its mode.

A start rewrites everything but the secrets. The lock is the kernel's (`flock`), so it ends with
its process, even a killed one; a file of process ids would not.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from infra.private_files import make_private
from infra.topology import HostPort, Topology
from schemas.ids import RegionId, ReplicaId

DEFAULT_STATE = Path(".mesh")


class StateInUse(RuntimeError):
    """Another demo runs on this directory; the message says which process."""


class StateDirectory:
    """The places of one demo's files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "config"
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.jetstream = self.path / "jetstream"
        self.lock = self.path / "lock"
        self.running = self.path / "mesh.json"
        self.console_key = self.run / "console.key"

    def require_free(self) -> None:
        """Raise StateInUse if another demo runs on it. Creates nothing."""
        if self.lock.exists():
            with self._locked():
                pass

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the directory, and lock it meanwhile. Raises StateInUse."""
        make_private(self.path, tighten=self.lock.exists())
        with self._locked() as lock:
            os.fchmod(lock, 0o600)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            for directory in (self.config, self.logs, self.run, self.jetstream):
                make_private(directory)
            self._forget_earlier()
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        lock = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(lock, 32).decode("ascii", "replace").strip()
                raise StateInUse(
                    f"{self.path} is in use by a running mesh (process {holder or 'unknown'}): "
                    "end that one; a second mesh needs a directory (--state) and a mesh.toml with "
                    "ports (--config) of its own"
                ) from error
            yield lock
        finally:
            os.close(lock)

    def _forget_earlier(self) -> None:
        """Remove what an earlier run wrote: its replicas may be gone."""
        self.running.unlink(missing_ok=True)
        for stale in (*self.logs.glob("*.log"), *self.run.glob("*.json")):
            stale.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, so that readers see it complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_bytes(data)
    partial.replace(path)


class RunningRegion(BaseModel):
    """What runs of one region. `workers`: processes of each of its routers; `servers`: where its
    nats-servers listen, by the keys of mesh.toml."""

    replicas: tuple[ReplicaId, ...]
    workers: int
    servers: dict[str, tuple[HostPort, ...]] = {}


class RunningMesh(BaseModel):
    """What other commands read from `mesh.json`."""

    pid: int
    config: Path
    regions: dict[RegionId, RunningRegion]
    processes: dict[str, int] = {}
    engines_given: bool = False

    def children(self) -> dict[str, int]:
        """Process ids by program, of those that still run.

        After the mesh was killed, its ids in the file may belong to other processes. Python
        programs are children of its preloaded process.
        """
        parents = {name: _parent(pid) for name, pid in self.processes.items()}
        return {
            name: self.processes[name]
            for name, parent in parents.items()
            if parent is not None and self.pid in (parent, _parent(parent))
        }

    def fitted(self, topology: Topology) -> Topology:
        """The topology with the replicas, workers and nats-servers that run, whatever the file
        says."""
        regions = dict(topology.regions)
        for name in regions.keys() & self.regions.keys():
            runs = self.regions[name]
            update = {"replicas": runs.replicas, "workers": runs.workers, **runs.servers}
            regions[name] = regions[name].model_copy(update=update)
        return topology.model_copy(update={"regions": regions})


def read_running_mesh(credentials: Path) -> RunningMesh | None:
    """The demo that has these credentials, or the last one if it was killed; else None."""
    state = StateDirectory(credentials.parent)
    if credentials.absolute() != state.config:
        return None
    try:
        return RunningMesh.model_validate_json(state.running.read_bytes())
    except (OSError, ValidationError):
        return None


def is_of_a_demo(credentials: Path) -> bool:
    """Whether a demo keeps these credentials, or kept them."""
    state = StateDirectory(credentials.parent)
    return credentials.absolute() == state.config and state.lock.exists()


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return None
    return int(stat.rpartition(")")[2].split()[1])
