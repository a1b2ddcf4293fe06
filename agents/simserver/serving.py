"""A simulated engine's process: it listens, and serves until a signal."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from agents.simserver.server import SimConfig, SimServer
from infra.address import Address
from infra.process import write_ready_file

# Streams still open at SIGTERM are cut after this long.
_GOODBYE_S = 0.2


class CannotListen(Exception):
    """The address can't be bound; the message says which and what to do."""


async def serve(
    config: SimConfig,
    host: str,
    port: int,
    ready_file: Path | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; port 0 is any free one. Once it serves, `announce` gets the
    URL, and the ready file is written. Raises CannotListen."""
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
        await _listen(runner, host, port)
        url = f"http://{Address(*runner.addresses[0][:2])}"
        if ready_file is not None:
            write_ready_file(ready_file, {"url": url, "pid": os.getpid()})
        announce(url)
        await stop.wait()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, backlog=512).start()
    except OSError as error:
        # A name that can't be resolved comes with a negative number of its own.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else "no such address"
        raise CannotListen(
            f"can't listen on {host} port {port} ({reason}): "
            "choose another --port, or 0 for a free one"
        ) from None
