"""A batch runner's connection to the bus: a router's, with other subscriptions.

It receives the heartbeats of its own region, what peers' runners publish of their offline work, the
answers to its attempts, and the requests of peers' runners. Offline work for a peer goes to the
runners of that region, not to its routers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.msg import Msg

from mesh.adapters.bus import NameCheck, RouterBus, label_sent
from mesh.core.model.request import Request
from schemas import subjects
from schemas.ids import RegionId


@dataclass(frozen=True, slots=True)
class RunnerListeners:
    """Callbacks by kind of message. Called on the event loop, one message after another."""

    heartbeat: Callable[[Msg], None]
    offline_state: Callable[[Msg], None]
    lease: Callable[[Msg], None]
    answer: Callable[[Msg], None]
    offline: Callable[[Msg], None]
    lost: Callable[[], None]
    back: Callable[[], None]


class RunnerBus(RouterBus):
    """One batch runner's connection. Use `open_runner`, then `publish` freely, then `close`."""

    async def open_runner(self, listeners: RunnerListeners, name: NameCheck | None = None) -> None:
        """As `open` of a router."""

        async def subscribe() -> None:
            await self._subscribe_runner(listeners)

        await self._open("batch runner", subscribe, listeners.lost, listeners.back, name)

    async def _subscribe_runner(self, listeners: RunnerListeners) -> None:
        region, batch = self.region, subjects.QUEUE_BATCH
        listen = self.client.listen
        await listen(subjects.heartbeat(region, subjects.ANY), listeners.heartbeat)
        await listen(subjects.inbox(region, self.router, subjects.ANY), listeners.answer)
        for origin in (region, *self._peers):  # its own region's other runners too
            await listen(subjects.offline_state(origin), listeners.offline_state)
        if self._peers:
            await listen(subjects.leased(region), listeners.lease)
        await listen(subjects.offline(region), listeners.offline, batch)
        within = subjects.offline_within(region, subjects.ANY)
        await listen(within, listeners.offline, batch)
        await self.client.flush()

    def _peer_subject(self, peer: RegionId, request: Request) -> str:
        """Its batch runners' for offline work, its routers' for a line that was raised."""
        labels = request.residency
        if not request.offline:
            return super()._peer_subject(peer, request)
        if not labels:
            return subjects.offline(peer)
        return subjects.offline_within(peer, label_sent(self._ground, self.region, peer, labels))
