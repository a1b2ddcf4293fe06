"""Whoever hears and may say everything, a client on each region's server: what really crosses."""

import asyncio
import collections
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.nats.region_config import ACCOUNT
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions
from tests.support.until import PATIENCE_S

TAP = "tap"  # a user of every test server whom nothing is forbidden


def add_tap(tree: dict[str, Any]) -> None:
    tree["accounts"][ACCOUNT]["users"].append({"user": TAP, "password": TAP})


async def connected(mesh: NatsRegions, region: str) -> Client:
    """That user, on the region's server."""
    url = mesh.address(region, "router").url
    return await bus.connect(
        bus.BusAddress(url, TAP, TAP), name=TAP, inbox_prefix=subjects.inboxes(region)[:-2]
    )


FENCES = itertools.count()


class Taps:
    """One all-powerful client a region, and everything that each has heard."""

    def __init__(self, mesh: NatsRegions) -> None:
        self._mesh = mesh
        self.clients: dict[str, Client] = {}
        self.heard: dict[str, collections.Counter[str]] = {}
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> "Taps":
        for region in self._mesh.topology.regions:
            self.clients[region] = await connected(self._mesh, region)
            self.heard[region] = collections.Counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()

    async def listen(self, region: str, pattern: str) -> None:
        async def note(message: Msg) -> None:
            async with self._changed:
                self.heard[region][message.subject] += 1
                self._changed.notify_all()

        await self.clients[region].subscribe(pattern, cb=note)
        await flushed(self.clients[region])

    async def say(self, region: str, said: list[str]) -> None:
        for subject in said:
            await self.clients[region].publish(subject, b"said")
        await flushed(self.clients[region])

    async def fence(self, speaker: str, listener: str) -> None:
        """All that `speaker` said before has arrived at `listener` or never will.

        A link keeps order. The subject is a digest or a sign of life that the speaker may send;
        it is repeated until it arrives, because interest takes a moment to cross a new link, and
        new every time, because a repetition may arrive long after its fence has fallen.
        """
        subject = subjects.alive(speaker, f"fence-{listener}-{next(FENCES)}")
        client = self.clients[speaker]

        async def speak(subject: str) -> None:
            await client.publish(subject, b"said")
            await flushed(client)

        await self.until_heard(listener, subject, speak)

    async def until_heard(
        self, listener: str, subject: str, speak: Callable[[str], Awaitable[None] | None]
    ) -> None:
        """Have it said until it arrives: interest takes a moment to reach a new link's account."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.heard[listener][subject]:
                said = speak(subject)
                if said is not None:
                    await said
                try:
                    async with asyncio.timeout(0.1), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def heard_of(self, region: str, said: list[str]) -> set[str]:
        return {subject for subject in said if self.heard[region][subject]}
