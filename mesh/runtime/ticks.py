"""The clock of a router or a batch runner: a tick of its session every TICK_S, at rest REST_S; and
its keepalives, every ALIVE_S and at rest ALIVE_REST_S.

At rest nothing can run out of time but the next renewal of a lease, digest or sign of life, which
are half a second apart; what comes is dealt with at once and ends the rest: the next tick follows
within TICK_S.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from mesh.core.view.bus_status import CATCH_UP_S, STOOD_STILL_S
from mesh.session.session import Session
from schemas.exchange import ALIVE_REST_S, ALIVE_S

TICK_S = 0.05
REST_S = 0.2
IDLE_S = 10.0  # without a request before keepalives slow down: agents repeat the ends of answers
# of 9 s to a router whose keepalives they miss, and those of 0.1.0 miss some


async def keep_ticking(
    session: Session, late: Callable[[float], None], rests: Callable[[], bool]
) -> None:
    """Tick again and again for ever, and call `late` with the seconds that each tick came too late.

    `rests`: whether nothing is under way."""
    clock, is_over = asyncio.get_running_loop().time, asyncio.Event()

    def fed() -> None:
        if not rests():
            is_over.set()

    while True:
        began = clock()
        due = began + TICK_S
        if rests():
            due = began + REST_S
            session.fed = fed
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await is_over.wait()
                    due = clock() + TICK_S
            session.fed = None
            is_over.clear()
        await asyncio.sleep(due - clock())
        now = clock()
        late(now - due)
        if now - began > STOOD_STILL_S:
            # This process stood still: receive what came meanwhile before declaring losses.
            await asyncio.sleep(CATCH_UP_S)
        session.tick()


async def keep_alive(publish: Callable[[float], None], rests: Callable[[], bool]) -> None:
    """Call `publish`, with the seconds within which the next keepalive comes, again and again for
    ever. Where a request has come meanwhile, the next one comes within ALIVE_S all the same."""
    while True:
        left_s = ALIVE_REST_S if rests() else ALIVE_S
        publish(left_s)
        while left_s > 0.0:
            await asyncio.sleep(ALIVE_S)
            left_s = left_s - ALIVE_S if rests() else 0.0
