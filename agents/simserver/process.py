"""The process around a simulated engine: bind, say where, serve until told to stop."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
from aiohttp import web

from agents.simserver.server import SimConfig, SimServer

# Streams still open at SIGTERM are cut after this long.
_GOODBYE_S = 0.2


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen; port 0 is any free one. The ready file is written once it serves."""

    host: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None


class CannotListen(Exception):
    """The address can't be bound; the message says which and what to do."""


async def serve(config: SimConfig, listen: Listen, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is told the URL. Raises CannotListen."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        SimServer(config).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_GOODBYE_S,
    )
    await runner.setup()
    try:
        bound = _bind(listen)
        await web.SockSite(runner, bound).start()
        url = _url(bound)
        if listen.ready_file is not None:
            _write_ready(listen.ready_file, url)
        announce(url)
        await stop.wait()
    finally:
        await runner.cleanup()


def _bind(listen: Listen) -> socket.socket:
    try:
        return socket.create_server(
            (listen.host, listen.port),
            family=socket.AF_INET6 if ":" in listen.host else socket.AF_INET,
            backlog=512,
        )
    except OSError as error:
        # A name that can't be resolved comes with a negative number of its own.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else "no such address"
        raise CannotListen(
            f"can't listen on {listen.host} port {listen.port} ({reason}): "
            "choose another --port, or 0 for a free one"
        ) from None


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_ready(path: Path, url: str) -> None:
    # Whoever waits for the file must never read half of it.
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(orjson.dumps({"url": url, "pid": os.getpid()}))
    unfinished.replace(path)
