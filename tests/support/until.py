"""Waiting for a condition in the world outside this event loop, with a deadline."""

import asyncio
from collections.abc import Callable

# Of everything that takes moments: a test that waits so long has failed. A machine that has other
# work makes it twenty times as slow.
PATIENCE_S = 120.0


async def until(
    condition: Callable[[], object], *, deadline_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """Return once `condition()` is true. Raises TimeoutError after `deadline_s`."""
    async with asyncio.timeout(deadline_s):
        while True:
            if condition():
                return
            await asyncio.sleep(every_s)
