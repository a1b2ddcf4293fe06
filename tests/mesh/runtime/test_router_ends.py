"""A router that can't do its work any more ends, with its reason: a half-dead one helps nobody."""

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import replace

import pytest

from infra.address import Address
from infra.bus import BusAddress, BusUnreachable
from mesh.core.model.settings import RouterSettings
from mesh.runtime.config import RouterConfig
from mesh.runtime.router import PortTaken, Router, run
from schemas.ids import RegionId, RouterId
from tests.support.nats_server import running_nats_server
from tests.support.until import PATIENCE_S


def config(url: str, password: str | None = None) -> RouterConfig:
    return RouterConfig(
        region=RegionId("us"),
        router=RouterId("r1"),
        peers=(),
        http_host="127.0.0.1",
        http_port=0,
        bus=BusAddress(url, password and "router", password),
        settings=RouterSettings(),
        hash_key="test",
        epoch=1,
        seed=7,
    )


async def started(config: RouterConfig) -> asyncio.Task[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(run(config, asyncio.Event(), lambda router: ready.set()))
    async with asyncio.timeout(PATIENCE_S):
        await ready.wait()
    return task


async def test_a_server_that_takes_the_password_back_ends_the_router(tmp_path):
    users = (
        'accounts {{ MESH {{ jetstream: enabled, users: [{{user: router, password: "{}"}}] }} }}'
    )
    async with running_nats_server(tmp_path, config=users.format("old")) as server:
        task = await started(config(server.url, "old"))
        file = tmp_path / "nats.conf"
        file.write_text(file.read_text().replace('"old"', '"new"'))
        os.kill(server.pid, signal.SIGHUP)
        with pytest.raises(BusUnreachable, match=r"for good; last error: nats: [aA]uthori"):
            async with asyncio.timeout(PATIENCE_S):
                await task


async def test_a_task_that_fails_ends_the_router(nats_server, monkeypatch):
    async def fails(self) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Router, "_ticks", fails)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        async with asyncio.timeout(PATIENCE_S):
            await run(config(nats_server.url), asyncio.Event())


async def test_a_task_that_loses_a_cancel_does_not_keep_the_router(nats_server, monkeypatch):
    async def stubborn(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    monkeypatch.setattr(Router, "_stream", stubborn)
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run(config(nats_server.url), stop, lambda router: ready.set()))
    async with asyncio.timeout(PATIENCE_S):
        await ready.wait()
        await asyncio.sleep(0)  # every task has begun
        stop.set()
        await task


async def test_the_page_opens_after_the_endpoint_whose_readiness_it_answers(nats_server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        page = Address("127.0.0.1", 0)
        router = Router(replace(config(nats_server.url), http_port=port, metrics=page))
        try:
            with pytest.raises(PortTaken):
                await router.open()
            assert router._page is None
        finally:
            await router.close()
