"""Engines that answer requests, and whose pages fail: no request is lost for that."""

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest

from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, SmallMesh, chat, post, small_mesh

REQUESTS, AT_ONCE = 40, 8
NAMES = ("us-0", "us-1", "us-2")


async def answered(mesh: SmallMesh) -> list[int]:
    """The status of each of REQUESTS, of which AT_ONCE are under way."""
    one_more = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> int:
        async with one_more:
            return (await post(mesh, chat(f"hello {number}", stream=number % 2 == 0)))[0]

    return await asyncio.gather(*map(ask, range(REQUESTS)))


@pytest.mark.parametrize(
    ("page", "status", "problem"),
    [("/metrics", 503, "metrics: HTTP 503"), ("/v1/models", 404, "models: HTTP 404")],
)
async def test_a_region_whose_engines_lose_a_page_serves_all(
    nats_server, caplog, page, status, problem
) -> None:
    caplog.set_level(logging.INFO)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in NAMES]
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        await mesh.router("us", **PATIENT)
        for name, engine in zip(NAMES, engines, strict=True):
            await mesh.agent("us", name, engine)
        await mesh.until_ready("us", len(NAMES))
        replicas = mesh.routers["us"].core.replicas

        def problems() -> set[str | None]:
            return {replicas.get(name).heartbeat.page_problem for name in NAMES}

        for engine in engines:
            engine.page_status[page] = status
        assert await answered(mesh) == [200] * REQUESTS
        await mesh.until(lambda: problems() == {problem}, "heartbeats that name the page")
        assert await answered(mesh) == [200] * REQUESTS
        assert mesh.sample("us", "mesh_replicas_page_broken") == len(NAMES)
        for engine in engines:
            engine.page_status.clear()
        await mesh.until(lambda: problems() == {None}, "pages that are read again")
    for name in NAMES:
        assert f"us/{name}: a page of the engine fails: {problem}" in caplog.text
        assert f"us/{name}: the pages of the engine can be read again" in caplog.text
