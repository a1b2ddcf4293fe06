"""The clock of a router or a batch runner: a tick of its session every TICK_S."""

import asyncio
from collections.abc import Callable

from mesh.core.view.bus_status import STOOD_STILL_S

TICK_S = 0.05
CATCH_UP_S = 0.2


async def keep_ticking(tick: Callable[[], None], late: Callable[[float], None]) -> None:
    """Call `tick` every TICK_S, and `late` with the seconds that each came too late, for ever."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s = clock() - due
        late(late_s)
        if late_s > STOOD_STILL_S - TICK_S:
            # This process stood still: receive what came meanwhile before declaring losses.
            await asyncio.sleep(CATCH_UP_S)
        tick()
