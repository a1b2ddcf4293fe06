"""`.mesh/`: what a demo leaves on disk, and the lock that keeps two demos out of one directory.

    lock                    held while a demo runs; its process's id is in it
    config/<region>/        nats.conf and credentials
    logs/<program>.log      all that a process printed since the demo started
    run/<program>.json      ready files of processes
    jetstream/<region>/     what the nats-servers store
    mesh.json               the running demo: what it was asked for, endpoints, processes

All of it is readable by this user alone: directories have mode 0700, the files on top 0600, also
where an earlier version left them open. A directory that was there for other things keeps its mode.

Everything in it may be stale: a start writes anew what it reads, and keeps only the secrets.
The lock is the kernel's (`flock`), so a supervisor that was killed leaves none behind; a file of
process ids, the usual way, outlives its process and then lies.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from infra.nats.private_file import make_private

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
        self.running = self.path / "mesh.json"

    def require_free(self) -> None:
        """Raise StateInUse if another demo runs on it. Makes nothing."""
        if (self.path / "lock").exists():
            with self._locked():
                pass

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the directory, and keep others out meanwhile. Raises StateInUse."""
        make_private(self.path, tighten=(self.path / "lock").exists())
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
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
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
        """Remove what an earlier run said: its replicas may not be there any more."""
        self.running.unlink(missing_ok=True)
        for stale in (*self.logs.glob("*.log"), *self.run.glob("*.json")):
            stale.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that only its owner reads, and sees whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_bytes(data)
    partial.replace(path)
