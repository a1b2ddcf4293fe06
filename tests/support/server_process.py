"""One nats-server process, from a configuration file: started, known to be ready, stopped.

Ready is what the server itself says: it writes a ports file that carries its process id once all
its ports listen. Connecting to the port instead would also reach a stranger who holds it, even
another nats-server of the same name.
"""

import asyncio
import json
import re
import subprocess
from pathlib import Path

READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
LOG_TAIL_CHARS = 2000
_TAKEN = re.compile(r"listen tcp (\S+): bind: address already in use")


class ServerNotStarted(RuntimeError):
    """The server ended or stayed silent; the message names the port or quotes its log."""


class ServerProcess:
    """`start`, then `stop`: the process never outlives a stop, whatever it is doing."""

    def __init__(self, binary: Path, config: Path, *, log: Path) -> None:
        """`log` is appended to; the server's ports file stands beside it while it runs."""
        self._binary, self._folder = binary.absolute(), config.absolute().parent
        self._log = log.absolute()
        self._arguments = ["--config", str(config.absolute())]
        self._arguments += ["--ports_file_dir", str(self._log.parent)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        return None if self._process is None else self._process.pid

    @property
    def ports(self) -> dict[str, list[str]]:
        """Kind of port → URLs it listens at, as the running server wrote them."""
        [file] = self._log.parent.glob(f"*_{self.pid}.ports")
        ports: dict[str, list[str]] = json.loads(file.read_text())
        return ports

    async def start(self) -> None:
        """Start and return once clients can connect. Raises ServerNotStarted, leaving nothing."""
        if self._process is not None:
            raise RuntimeError(f"{self._binary} runs already, as process {self.pid}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        start_of_log = self._log.stat().st_size if self._log.exists() else 0
        self._process = self._spawn()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._until_ready(self._process)
        except BaseException as problem:
            await self.stop()
            if isinstance(problem, ServerNotStarted | TimeoutError):
                raise ServerNotStarted(self._why(start_of_log)) from problem
            raise

    async def stop(self) -> None:
        """End the process: asked first, killed after STOP_TIMEOUT_S. Nothing runs: nothing done."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        process, self._process = self._process, None
        assert process is not None, "not running"
        process.kill()
        process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._binary, *self._arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _until_ready(self, process: subprocess.Popen[bytes]) -> None:
        # The file is there a moment before its text is.
        files = self._log.parent
        while not any(f.stat().st_size for f in files.glob(f"*_{process.pid}.ports")):
            if process.poll() is not None:
                raise ServerNotStarted(f"ended with status {process.returncode}")
            await asyncio.sleep(POLL_S)

    def _why(self, start_of_log: int) -> str:
        with self._log.open("rb") as file:
            file.seek(start_of_log)
            said = file.read().decode(errors="replace")
        taken = _TAKEN.search(said)
        if taken:
            return (
                f"nats-server: {taken[1]} is taken by another process; "
                "end that one, or choose another port in mesh.toml"
            )
        return f"nats-server did not start; its log {self._log} ends:\n{said[-LOG_TAIL_CHARS:]}"
