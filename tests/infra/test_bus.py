import asyncio
from pathlib import Path

import pytest

from infra import bus
from tests.support.flushed import flushed
from tests.support.nats_server import NatsServer


async def test_connects_under_its_own_inbox_prefix(nats_server: NatsServer):
    client = await bus.connect(
        bus.BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.us.r1"
    )
    assert client.new_inbox().startswith("_INBOX.us.r1.")
    await client.close()


async def test_survives_a_server_restart_and_says_so(nats_server: NatsServer):
    lost, back = asyncio.Event(), asyncio.Event()
    client = await bus.connect(
        bus.BusAddress(nats_server.url),
        name="t",
        inbox_prefix="_INBOX.us.r1",
        on_lost=lost.set,
        on_back=back.set,
    )
    got = asyncio.Queue()
    await client.subscribe("a", cb=got.put)
    await flushed(client)
    await nats_server.restart()
    async with asyncio.timeout(10):
        await lost.wait()
        await back.wait()
    await client.publish("a", b"again")
    async with asyncio.timeout(10):
        assert (await got.get()).data == b"again"
    await client.close()


async def test_no_server_is_one_clear_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 1.0)
    with pytest.raises(bus.BusUnreachable, match="is nats-server running"):
        await bus.connect(bus.BusAddress("nats://127.0.0.1:1"), name="t", inbox_prefix="_INBOX.x")
