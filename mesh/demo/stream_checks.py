"""The streams of a region, checked again and again while its nats-server answers.

A server that hangs keeps its port, and no process has ended: that is logged once, and so is that it
answers again. One that has ended is reported by its supervisor.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mesh.doctor.connectivity import check_server

log = logging.getLogger(__name__)

GREETING_S = 3.0  # a lost packet is sent again after one


async def keep_checking(
    server: str, url: str, set_up: Callable[[], Awaitable[None]], every_s: float
) -> None:
    """Call `set_up` every `every_s` while the server greets. Runs for ever. `server`: its name."""
    hangs = False
    while True:
        await asyncio.sleep(every_s)
        unreachable = await check_server(url, GREETING_S)
        if unreachable is None:
            if hangs:
                log.warning("%s answers again", server)
            hangs = False
            await set_up()
        elif unreachable.listens and not hangs:
            hangs = True
            log.warning(
                "%s hangs or is stopped: %s; `mesh doctor` says what to do", server, unreachable.why
            )
