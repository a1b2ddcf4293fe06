"""Which regions' heartbeats a router receives beside its own: those of regions it has adopted."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas import subjects
from schemas.ids import RegionId

log = logging.getLogger(__name__)

SUBSCRIBE_RETRY_S = 0.1
# The subscription has ended already: in an earlier try that failed, or with its connection.
OVER = (nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError)


class AdoptedHeartbeats:
    """Subscriptions to the heartbeats of regions that this one has adopted, and to no others.

    Each brings every heartbeat of that region over the link. Subscribing awaits, and performing an
    effect must not: so `want` notes the region, and `keep`, in a task, subscribes.
    """

    def __init__(self, client: Callable[[], Client], listener: Callable[[Msg], None]) -> None:
        self._client = client
        self._listener = listener
        self._wanted: set[RegionId] = set()
        self._subscriptions: dict[RegionId, Subscription] = {}
        self._leaving: list[Subscription] = []  # not wanted any more, and not ended yet
        self._changed = asyncio.Event()

    def want(self, region: RegionId, *, wanted: bool) -> None:
        """Subscribe to that region soon, or unsubscribe."""
        (self._wanted.add if wanted else self._wanted.discard)(region)
        self._changed.set()

    async def keep(self) -> None:
        """Subscribe and unsubscribe as wanted. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._settle()
            except nats.errors.Error as error:  # the bus is away; its subscriptions come back
                log.warning("heartbeats of peers: %s", error or type(error).__name__)
                await asyncio.sleep(SUBSCRIBE_RETRY_S)
                self._changed.set()

    async def _settle(self) -> None:
        for region in sorted(self._subscriptions.keys() - self._wanted):
            self._leaving.append(self._subscriptions.pop(region))
        while self._leaving:
            with suppress(*OVER):
                await self._leaving[-1].unsubscribe()
            self._leaving.pop()
        for region in sorted(self._wanted - self._subscriptions.keys()):
            subject = subjects.heartbeat(region, subjects.ANY)
            self._subscriptions[region] = await self._client().subscribe(subject, cb=self._receive)

    async def _receive(self, msg: Msg) -> None:
        self._listener(msg)
