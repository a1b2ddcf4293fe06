"""Whether the bus is there for the frames of answers, as its client tells.

All that a nats-server has lost come back by themselves, an agent perhaps before the router that it
answers, and what is published while nobody listens is gone. So frames wait a moment longer.
"""

import asyncio

from infra.bus import RECONNECT_WAIT_S

SETTLE_S = 2 * RECONNECT_WAIT_S  # of routers, which try as often


class Link:
    """Tell it of each loss and of each return."""

    def __init__(self) -> None:
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.has_returned = asyncio.Event()  # whoever waits for it clears it
        self._settling: asyncio.TimerHandle | None = None

    def lost(self) -> None:
        """Frames are to wait."""
        self.is_there.clear()
        self._stop_settling()

    def back(self) -> None:
        """Frames are to go when routers have had their time to be back, too."""
        self._stop_settling()
        self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self.is_there.set)
        self.has_returned.set()

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
