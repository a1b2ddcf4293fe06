"""Whom is listened to, also when the bus fails in between."""

import asyncio

import nats.errors
import pytest

from infra.bus import BusAddress, connect
from infra.process import end_all
from mesh.adapters.adopted_heartbeats import AdoptedHeartbeats
from schemas import subjects
from schemas.ids import RegionId
from tests.support.flushed import flushed
from tests.support.until import until

EU = RegionId("eu")


class Failing:
    """A real subscription whose end fails the first time, before or after it has ended."""

    def __init__(self, real, *, half_way: bool) -> None:
        self._real, self._half_way = real, half_way
        self.tries = 0

    async def unsubscribe(self) -> None:
        self.tries += 1
        if self.tries == 1 and not self._half_way:
            raise nats.errors.OutboundBufferLimitError
        await self._real.unsubscribe()
        if self.tries == 1:
            raise nats.errors.OutboundBufferLimitError


class Client:
    """A real one that hands out failing subscriptions."""

    def __init__(self, real, *, half_way: bool) -> None:
        self._real, self._half_way = real, half_way
        self.given: list[Failing] = []

    async def subscribe(self, subject, cb):
        real = await self._real.subscribe(subject, cb=cb)
        self.given.append(Failing(real, half_way=self._half_way))
        return self.given[-1]


@pytest.mark.parametrize("half_way", [False, True])
async def test_an_end_that_fails_is_tried_again_and_it_can_be_wanted_anew(nats_server, half_way):
    bus = await connect(BusAddress(nats_server.url), name="us", inbox_prefix="_INBOX.us")
    client, heard = Client(bus, half_way=half_way), []
    beats = AdoptedHeartbeats(lambda: client, heard.append)
    task = asyncio.create_task(beats.keep())
    beats.want(EU, wanted=True)
    await until(lambda: len(client.given) == 1)
    beats.want(EU, wanted=False)
    await until(lambda: client.given[0].tries == 2)
    beats.want(EU, wanted=True)
    await until(lambda: len(client.given) == 2)
    await bus.publish(subjects.heartbeat("eu", "eu-0"), b"beat")
    await flushed(bus)
    await until(lambda: heard)
    assert [msg.data for msg in heard] == [b"beat"], "by one subscription, not by two"
    await end_all([task])
    await bus.close()
