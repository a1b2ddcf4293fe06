"""Leaving a bus that stands still: nobody is kept, and no connection is left behind."""

import pytest

from infra.bus import BusAddress
from mesh.adapters.bus import Listeners, RouterBus
from schemas.ids import RegionId, RouterId
from tests.support.stopped import stopped


def deaf(*_: object) -> None:
    """What is heard is not this test's."""


@pytest.fixture
async def bus(nats_server):
    made = RouterBus(RegionId("us"), RouterId("r1"), (), BusAddress(nats_server.url))
    await made.open(Listeners(*(deaf for _ in range(11))))
    yield made
    await made.close()


async def test_a_server_that_stands_still_keeps_neither_router_nor_connection(
    bus, nats_server, monkeypatch
):
    monkeypatch.setattr("mesh.adapters.bus.CLOSE_S", 0.2)
    async with stopped(nats_server.pid):
        await bus.close()
        assert bus.client.is_closed
