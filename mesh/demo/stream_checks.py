"""The streams of a region, checked again and again while one of its nats-servers answers.

A server that hangs keeps its port, and no process has ended: that is logged once, and so is that it
answers again. One that has ended is reported by its supervisor.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from mesh.doctor.connectivity import check_server

log = logging.getLogger(__name__)

GREETING_S = 3.0  # a lost packet is sent again after one


async def keep_checking(
    servers: Mapping[str, str], set_up: Callable[[], Awaitable[None]], every_s: float
) -> None:
    """Call `set_up` every `every_s` while a server greets. Runs for ever. `servers`: name → URL."""
    hanging: set[str] = set()
    while True:
        await asyncio.sleep(every_s)
        found = await asyncio.gather(*(check_server(url, GREETING_S) for url in servers.values()))
        for server, unreachable in zip(servers, found, strict=True):
            if unreachable is None:
                if server in hanging:
                    log.warning("%s answers again", server)
                hanging.discard(server)
            elif unreachable.listens and server not in hanging:
                hanging.add(server)
                text = "%s hangs or is stopped: %s; `mesh doctor` says what to do"
                log.warning(text, server, unreachable.why)
        if None in found:
            await set_up()
