"""Waiting for a condition in the world outside this event loop, with a deadline."""

import asyncio
from collections.abc import Callable


async def until(
    condition: Callable[[], object], *, deadline_s: float = 20.0, every_s: float = 0.005
) -> None:
    """Return once `condition()` is true. Raises TimeoutError after `deadline_s`."""
    async with asyncio.timeout(deadline_s):
        while True:
            if condition():
                return
            await asyncio.sleep(every_s)
