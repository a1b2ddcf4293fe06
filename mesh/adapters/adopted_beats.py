"""Ears for the heartbeats of regions that this one has adopted; deaf to them otherwise.

A subscription asks the link for every heartbeat of that region, so there is none before it is
needed. nats-py subscribes by awaiting, and effects are performed without: so what is wanted is
noted at once, and one task makes it so.
"""

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

RETRY_S = 0.1
# A subscription that has ended: by an earlier try that failed half-way, or with its connection.
OVER = (nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError)


class AdoptedBeats:
    """`want` regions, run `keep` in a task."""

    def __init__(self, client: Callable[[], Client], heard: Callable[[Msg], None]) -> None:
        self._client = client
        self._heard = heard
        self._wanted: set[RegionId] = set()
        self._ears: dict[RegionId, Subscription] = {}
        self._leaving: list[Subscription] = []  # not wanted any more, and not ended yet
        self._changed = asyncio.Event()

    def want(self, region: RegionId, *, wanted: bool) -> None:
        """Listen to that region soon, or not any more."""
        (self._wanted.add if wanted else self._wanted.discard)(region)
        self._changed.set()

    async def keep(self) -> None:
        """Listen to whom is wanted. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._settle()
            except nats.errors.Error as error:  # the bus is away; its subscriptions come back
                log.warning("heartbeats of peers: %s", error or type(error).__name__)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _settle(self) -> None:
        for region in sorted(self._ears.keys() - self._wanted):
            self._leaving.append(self._ears.pop(region))
        while self._leaving:
            with suppress(*OVER):
                await self._leaving[-1].unsubscribe()
            self._leaving.pop()
        for region in sorted(self._wanted - self._ears.keys()):
            subject = subjects.heartbeat(region, subjects.ANY)
            self._ears[region] = await self._client().subscribe(subject, cb=self._hear)

    async def _hear(self, msg: Msg) -> None:
        self._heard(msg)
