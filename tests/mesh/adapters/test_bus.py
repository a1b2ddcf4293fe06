"""A router's own connection: what it may send, and how it leaves a bus that stands still."""

import asyncio

import pytest
from nats.aio.msg import Msg

from infra.bus import BusAddress, BusClient, BusUnreachable, close, connect
from mesh.adapters.bus import Listeners, RouterBus, header_bytes
from schemas import subjects
from schemas.ids import RegionId, RouterId
from tests.support.stopped import stopped
from tests.support.until import PATIENCE_S


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
    flush = BusClient.flush

    async def flush_stopped_server(client):
        async with stopped(nats_server.pid):
            await flush(client, 0.05)

    monkeypatch.setattr(BusClient, "flush", flush_stopped_server)
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
    assert (await seen.next_msg(timeout=PATIENCE_S)).data == whole
    assert (await seen.next_msg(timeout=PATIENCE_S)).data == b"last"
    await asyncio.sleep(0)
    assert not bus.sending.done() and bus.is_connected


async def test_before_its_name_is_settled_a_process_receives_answers_about_that_alone(nats_server):
    """A second router of a name ended the answers of the first: what it received made it publish
    keepalives in the name of both."""
    others = await connect(BusAddress(nats_server.url), name="others", inbox_prefix="_INBOX")
    heard: list[tuple[str, bytes]] = []
    said = (
        subjects.controlled("us"),
        subjects.leased("us"),
        subjects.heartbeat("us", "us-0"),
        subjects.ingress("us"),
        subjects.inbox("us", "r1", "7"),
    )

    class Name:
        tokens = ("who", "here")

        def receive(self, token: str, data: bytes) -> bool:
            heard.append((token, data))
            answered.set()
            return True

        async def settle(self) -> None:
            for subject in (*said, subjects.inbox("us", "r1", "here")):
                await others.publish(subject, b"before")
            async with asyncio.timeout(PATIENCE_S):
                await answered.wait()

    def receive(msg: Msg) -> None:
        heard.append((msg.subject, msg.data))
        if len(heard) == 1 + len(said):
            all_heard.set()

    answered, all_heard = asyncio.Event(), asyncio.Event()
    mine = RouterBus(RegionId("us"), RouterId("r1"), (RegionId("eu"),), BusAddress(nats_server.url))
    await mine.open(Listeners(*[receive] * 10, deaf, deaf), Name())
    for subject in said:
        await others.publish(subject, b"after")
    async with asyncio.timeout(PATIENCE_S):
        await all_heard.wait()
    assert heard == [("here", b"before"), *((subject, b"after") for subject in said)]
    await mine.close()
    await close(others)
