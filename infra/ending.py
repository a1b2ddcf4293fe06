"""Ending tasks for sure.

One cancel is not enough. Python 3.11's `asyncio.wait_for`, with which nats-py awaits replies,
loses a cancel that comes together with what it waits for (python/cpython#86296, mended in 3.12),
and nats-py's `Client._flush_pending`, which every publish may pass, swallows one on purpose. A
task that loops would go on for ever, and whoever awaits its end with it.
"""

import asyncio
from collections.abc import Collection
from typing import Any

CANCEL_AGAIN_S = 0.1


async def end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended. What they raise is left to whoever awaits them.

    Who is cancelled meanwhile, ends when they have: none is left behind.
    """
    cancelled: asyncio.CancelledError | None = None
    while tasks := [task for task in tasks if not task.done()]:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
