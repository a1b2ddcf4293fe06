"""Pings over the bus to every peer region: whichever of its routers hears one sends it back.

They go the way that work goes, so the round trip has in it what the bus and its links cost. A
ping that has no answer when the next one leaves is lost; an answer that comes later is none.
"""

import asyncio
import struct
from collections.abc import Callable

from mesh.adapters.bus import RouterBus
from mesh.core import events as ev
from mesh.runtime.config import RouterConfig
from schemas import subjects
from schemas.ids import RegionId

PREFIX = "ping-"  # of the last token of a router's inbox, before the peer's name
PING_S = 1.0
NUMBER = struct.Struct(">Q")


class Pings:
    """One router's. `run` until cancelled; `hear` what comes back."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        clock: Callable[[], float],
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self._feed = feed
        self._number = 0
        self._open: dict[RegionId, tuple[int, float]] = {}  # number, and when it left

    async def run(self) -> None:
        """One ping to each peer, and again."""
        while True:
            for peer in self._config.peers:
                self._send(peer)
            await asyncio.sleep(PING_S)

    def hear(self, token: str, data: bytes) -> None:
        """An answer; anything else is dropped. `token`: the last one of the inbox it came to."""
        peer = RegionId(token.removeprefix(PREFIX))
        number, sent_at = self._open.get(peer, (0, 0.0))
        if data == NUMBER.pack(number) and number:
            del self._open[peer]
            self._feed(ev.RttMeasured(peer, self._clock() - sent_at))

    def _send(self, peer: RegionId) -> None:
        if self._open.pop(peer, None) is not None:
            self._feed(ev.RttMeasured(peer, None))
        self._number += 1
        self._open[peer] = self._number, self._clock()
        inbox = subjects.inbox(self._config.region, self._config.router, PREFIX + peer)
        self._bus.publish(subjects.ping(peer), NUMBER.pack(self._number), reply=inbox)
