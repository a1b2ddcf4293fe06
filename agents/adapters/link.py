"""Whether the bus is there for the frames of answers, as its client tells.

The client's callbacks can't wait for the core, so what they say is told to it in a task of its own,
and frames wait until the core has heard of a return.
"""

import asyncio
from collections.abc import Awaitable, Callable

from agents.core.events import BusLost, BusReturned


class Link:
    """Tell it of each loss and of each return."""

    def __init__(self) -> None:
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.losses = 0
        self._clock = asyncio.get_running_loop().time
        self._news: asyncio.Queue[BusLost | BusReturned] = asyncio.Queue()
        self._lost_at = 0.0
        self.away_s = 0.0  # in all, without the loss that lasts if one does

    def present_s(self) -> float:
        """A clock that stands still while the bus is away."""
        return (self._clock() if self.is_there.is_set() else self._lost_at) - self.away_s

    def lost(self) -> None:
        """Frames are to wait."""
        self.losses += 1
        if self.is_there.is_set():
            self._lost_at = self._clock()
            self.is_there.clear()
        self._news.put_nowait(BusLost())

    def back(self) -> None:
        """Frames are to go when the core has heard."""
        self._news.put_nowait(BusReturned())

    async def tell(self, feed: Callable[[BusLost | BusReturned], Awaitable[None]]) -> None:
        """Feed the core. Runs for ever."""
        while True:
            event = await self._news.get()
            await feed(event)
            if isinstance(event, BusReturned) and self._news.empty():
                self.away_s += self._clock() - self._lost_at
                self.is_there.set()
