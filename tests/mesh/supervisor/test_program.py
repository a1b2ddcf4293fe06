import asyncio
import contextlib

import pytest
from aiohttp import web

from infra.address import Address
from mesh.supervisor.program import AllReady, FileWritten, http_ready, speaks_nats, wait_until_ready
from tests.support.until import PATIENCE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Who answers is waited for, however busy the machine."""
    monkeypatch.setattr("mesh.supervisor.program.ANSWER_TIMEOUT_S", 20.0)


@contextlib.asynccontextmanager
async def http_server(handler):
    app = web.Application()
    app.router.add_get("/ready", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Address(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def test_a_nats_server_is_ready_when_it_sends_info(nats_server):
    address = Address("127.0.0.1", nats_server.port)
    assert await speaks_nats(address).passes()
    await nats_server.stop()
    assert not await speaks_nats(address).passes()


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False), (404, False)])
async def test_a_router_is_ready_when_it_answers_200(status, ready):
    async def answer(_):
        return web.Response(status=status)

    async with http_server(answer) as address:
        assert await http_ready(address).passes() is ready


async def test_a_probe_is_repeated_until_it_passes():
    statuses = iter([503, 503, 200])

    async def answer(_):
        return web.Response(status=next(statuses))

    async with http_server(answer) as address, asyncio.timeout(PATIENCE_S):
        await wait_until_ready(http_ready(address))
    assert list(statuses) == []


async def test_a_file_of_an_earlier_run_does_not_count(tmp_path):
    probe = FileWritten(tmp_path / "ready")
    probe.path.touch()
    probe.reset()
    assert not await probe.passes()
    probe.path.touch()
    assert await probe.passes()


async def test_every_part_of_a_program_must_be_ready(tmp_path):
    files = [tmp_path / "one", tmp_path / "two"]
    both = AllReady(tuple(FileWritten(path) for path in files))
    for path in files:
        assert not await both.passes()
        path.touch()
    assert await both.passes()
    both.reset()
    assert not any(path.exists() for path in files)
