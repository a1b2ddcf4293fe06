"""A plain request whose client left, or whose time was over, counts as running at an engine that
may compute it."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from infra.process import end_all
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh


@pytest.mark.parametrize("headers", [{}, {"x-mesh-timeout-s": "2"}])
async def test_it_counts_until_another_one_is_answered(nats_server, headers) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(scripted_engine())
        answers = say("hello")

        async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
            if body["max_tokens"] == 3000:
                await asyncio.Event().wait()
            return await answers(request, body)

        engine.behaviour = behaviour
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", engine, engine_kind="openai")
        await mesh.until_ready("us", 1)
        replica = mesh.routers["us"].core.replicas.get("us-0")

        def load() -> tuple[int | None, int]:
            return replica.heartbeat.running, replica.heartbeat.outstanding

        asking = asyncio.create_task(post(mesh, chat(max_tokens=3000), **headers))
        await engine.arrived.wait()
        if headers:
            assert (await asking)[0] == 504
        else:
            await mesh.until(lambda: load() == (1, 1), "a request at the engine")
            await end_all([asking])
        await mesh.until(lambda: load() == (1, 0), "one that was cut, and still counts")
        assert (await post(mesh, chat(max_tokens=2)))[0] == 200
        await mesh.until(lambda: load() == (0, 0), "an engine that has nothing left")
