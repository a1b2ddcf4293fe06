"""A region that can't take more, asked by the official client: who waits, who is told to go."""

import asyncio
from contextlib import asynccontextmanager

import openai
import orjson
import pytest

from tests.support.small_mesh import PATIENT, chat, client, one_replica, post

HIGH, LOW = {"x-mesh-priority": "high"}, {"x-mesh-priority": "low"}


@asynccontextmanager
async def full_region(nats_server, **settings):
    """One replica, whose engine says that five others wait in it."""
    async with one_replica(nats_server, **({"policy": "least-load"} | PATIENT | settings)) as mesh:
        [engine] = mesh.engines
        engine.waiting = 5
        await mesh.until(
            lambda: all(one.heartbeat.pending for one in mesh.routers["us"].core.replicas),
            "the engine's queue to be known",
        )
        yield mesh, engine


@asynccontextmanager
async def official_client(mesh):
    url = mesh.urls["us"] + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


def ask(api, **headers):
    message = {"role": "user", "content": "hi"}
    return api.chat.completions.create(model="tiny", messages=[message], extra_headers=headers)


async def until_held(mesh, count):
    held = mesh.routers["us"].core.held
    await mesh.until(lambda: len(held) == count, f"{count} to be held")


async def test_overload_never_trips_health(nats_server):
    async with full_region(nats_server, hold_max=3) as (mesh, engine):
        held = [asyncio.create_task(post(mesh, chat())) for _ in range(3)]
        await until_held(mesh, 3)
        shed = [await post(mesh, chat()) for _ in range(5)]
        assert [status for status, _, _ in shed] == [429] * 5
        async with client() as session:
            for path in ("/health", "/ready"):
                async with session.get(mesh.urls["us"] + path) as answer:
                    assert answer.status == 200, path
        engine.waiting = 0
        assert [(await one)[0] for one in held] == [200] * 3


async def test_in_a_full_queue_the_official_client_s_high_priority_goes_first(nats_server):
    async with full_region(nats_server, hold_max=1) as (mesh, engine), official_client(mesh) as api:
        low = asyncio.create_task(ask(api, **LOW))
        await until_held(mesh, 1)
        high = asyncio.create_task(ask(api, **HIGH))
        with pytest.raises(openai.RateLimitError) as caught:
            await low
        assert caught.value.code == "saturated"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            await ask(api, **LOW)
        engine.waiting = 0
        assert (await high).choices


async def test_an_objective_that_has_passed_is_told_with_its_receipt(nats_server):
    async with full_region(nats_server) as (mesh, _):
        status, body, headers = await post(
            mesh, chat(), **{"x-mesh-slo-ttft-ms": "200", "x-mesh-debug": "1"}
        )
        decision = orjson.loads(headers["x-mesh-decision"])
        assert (status, orjson.loads(body)["error"]["code"]) == (429, "objective_missed")
        assert int(headers["retry-after"]) >= 1 and headers["x-should-retry"] == "false"
        assert decision["placement"] == "shed"
        assert 0.2 <= decision["held_s"] < 5.0
        assert decision["reason"].endswith("is too late for 0.2 s")
        assert [one["why"] for one in decision["candidates"]] == ["full"]


async def test_who_judges_load_may_give_a_busy_replica_more(nats_server):
    async with full_region(nats_server, policy="mesh") as (mesh, engine):
        status, _, headers = await post(mesh, chat(), **{"x-mesh-debug": "1"})
        decision = orjson.loads(headers["x-mesh-decision"])
        assert (status, decision["placement"], len(engine.seen)) == (200, "local", 1)
        assert decision["candidates"][0]["pending"] >= 5


async def test_a_line_that_does_not_move_takes_nobody_more_and_its_first_waits_on(nats_server):
    """Nobody said an objective but the last; one replica, so one may wait for a long job."""
    limit_s = 0.2
    async with full_region(nats_server, queue_delay_s_max=limit_s) as (mesh, engine):
        first = asyncio.create_task(post(mesh, chat()))
        await until_held(mesh, 1)
        core, clock = mesh.routers["us"].core, asyncio.get_running_loop().time
        [held] = core.held
        await mesh.until(lambda: clock() - held.arrived_at > 2 * limit_s, "its wait to be long")
        status, body, headers = await post(mesh, chat())
        error = orjson.loads(body)["error"]
        assert (status, error["code"]) == (429, "saturated")
        assert "s > the queue_delay_s_max of 0.2 s" in error["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
        patient = asyncio.create_task(post(mesh, chat(), **{"x-mesh-slo-ttft-ms": "60000"}))
        await until_held(mesh, 2)
        engine.waiting = 0
        assert [(await one)[0] for one in (first, patient)] == [200, 200]
