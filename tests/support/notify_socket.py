"""The datagram socket that systemd gives to a service of Type=notify."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.until import PATIENCE_S


class NotifySocket:
    """What a service said, one datagram after another."""

    def __init__(self, receiving: socket.socket, path: Path) -> None:
        self.path = path
        self._receiving = receiving

    def environment(self, watchdog_s: float | None = None) -> dict[str, str]:
        """What systemd would add to the service's environment."""
        watchdog = {} if watchdog_s is None else {"WATCHDOG_USEC": str(int(watchdog_s * 1e6))}
        return {"NOTIFY_SOCKET": str(self.path), **watchdog}

    async def next(self) -> list[str]:
        """The lines of the next datagram."""
        async with asyncio.timeout(PATIENCE_S):
            data = await asyncio.get_running_loop().sock_recv(self._receiving, 4096)
        return data.decode().split("\n")

    async def until(self, text: str) -> str:
        """The first line that holds the text."""
        while True:
            for line in await self.next():
                if text in line:
                    return line


@contextlib.contextmanager
def notify_socket() -> Iterator[NotifySocket]:
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving,
    ):
        path = Path(directory) / "notify"
        receiving.bind(str(path))
        receiving.setblocking(False)
        yield NotifySocket(receiving, path)
