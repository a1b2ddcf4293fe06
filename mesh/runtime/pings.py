"""Pings over the bus to every peer region: whichever of its routers hears one sends it back.

They go the way that work goes, so the round trip has in it what the bus and its links cost. A
ping that has no answer when the next one leaves is lost; an answer that comes later is none.
"""

import asyncio
import secrets
from collections.abc import Callable

from nats.aio.msg import Msg

from mesh.adapters.bus import RouterBus
from mesh.adapters.reply_guard import ReplyGuard
from mesh.core import events as ev
from mesh.runtime.config import RouterConfig
from schemas import subjects
from schemas.ids import RegionId
from schemas.replies import PING_BYTES, PING_PREFIX

PING_S = 1.0


class Pings:
    """One router's. `run` until cancelled; `hear` what comes back."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        clock: Callable[[], float],
        feed: Callable[[ev.Event], None],
        guard: ReplyGuard,
    ) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self._feed = feed
        self._guard = guard
        self._open: dict[RegionId, tuple[bytes, float]] = {}  # its body, and when it left

    async def run(self) -> None:
        """One ping to each peer, and again."""
        while True:
            for peer in self._config.peers:
                self._send(peer)
            await asyncio.sleep(PING_S)

    def answer(self, msg: Msg) -> None:
        """A peer's ping: its few bytes go back to its ping inbox."""
        if len(msg.data) > PING_BYTES:
            self._guard.drop("ping", msg)
        elif self._guard.inbox("ping", msg) is not None:
            self._bus.publish(msg.reply, msg.data)

    def hear(self, token: str, data: bytes) -> None:
        """An answer; anything else is dropped. `token`: the last one of the inbox it came to."""
        peer = RegionId(token.removeprefix(PING_PREFIX))
        body, sent_at = self._open.get(peer, (b"", 0.0))
        if body and data == body:
            del self._open[peer]
            self._feed(ev.RttMeasured(peer, self._clock() - sent_at))

    def _send(self, peer: RegionId) -> None:
        if self._open.pop(peer, None) is not None:
            self._feed(ev.RttMeasured(peer, None))
        body = secrets.token_bytes(PING_BYTES)  # that nobody else can answer
        self._open[peer] = body, self._clock()
        inbox = subjects.inbox(self._config.region, self._config.router, PING_PREFIX + peer)
        self._bus.publish(subjects.ping(peer), body, reply=inbox)
