"""A router's own connection: what it may send, and how it leaves a bus that stands still."""

import asyncio

import pytest

from infra.bus import BusAddress, BusUnreachable, flush
from mesh.adapters.bus import Listeners, RouterBus, header_bytes
from schemas.ids import RegionId, RouterId
from tests.support.stopped import stopped


def deaf(*_: object) -> None:
    """What is heard is not this test's."""


@pytest.fixture
async def bus(nats_server):
    made = RouterBus(RegionId("us"), RouterId("r1"), (), BusAddress(nats_server.url))
    await made.open(Listeners(*(deaf for _ in range(12))))
    yield made
    await made.close()


async def test_a_server_that_stands_still_keeps_neither_router_nor_connection(
    bus, nats_server, monkeypatch
):
    monkeypatch.setattr("mesh.adapters.bus.CLOSE_S", 0.2)
    async with stopped(nats_server.pid):
        await bus.close()
        assert bus.client.is_closed


async def test_subscriptions_that_the_server_does_not_confirm_are_one_clear_error(
    nats_server, monkeypatch
):
    async def flush_stopped_server(client):
        async with stopped(nats_server.pid):
            await flush(client, 0.05)

    monkeypatch.setattr("mesh.adapters.bus.flush", flush_stopped_server)
    other = RouterBus(RegionId("us"), RouterId("r2"), (), BusAddress(nats_server.url))
    with pytest.raises(BusUnreachable, match="did not confirm the subscriptions"):
        await other.open(Listeners(*(deaf for _ in range(12))))
    monkeypatch.undo()
    await other.close()


@pytest.mark.parametrize("name", ["Mesh-Model", "a"])
async def test_a_message_of_exactly_the_servers_limit_is_sent_and_no_larger_one(bus, name):
    headers = {name: "x" * 3000, "b": "y"}
    whole = b"x" * (bus.client.max_payload - header_bytes(headers))
    seen = await bus.client.subscribe("seen")
    assert bus.publish("seen", whole, headers=headers)
    assert not bus.publish("seen", whole + b"x", headers=headers)
    assert not bus.publish("seen", b"", headers={name: "\udcff"})
    assert bus.publish("seen", b"last")
    assert (await seen.next_msg(timeout=10)).data == whole
    assert (await seen.next_msg(timeout=10)).data == b"last"
    await asyncio.sleep(0)
    assert not bus.sending.done() and bus.is_connected
