"""What an engine sends before content, over HTTP: no sign of work, and no first token."""

import asyncio
import logging

import pytest

from infra.process import end_all
from mesh.core.view.slowness import WINDOW
from schemas.state import ReplicaState
from tests.support.scripted_engine import Behaviour, event, opened
from tests.support.small_mesh import PATIENT, SmallMesh, chat, one_replica, post, set_all
from tests.support.until import PATIENCE_S

COMMENT = b": keep-alive\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
REQUESTS = 8
BEFORE_S = 0.5


def sends_alone(beat: bytes) -> Behaviour:
    """As an HTTP server does whose engine is frozen behind it."""

    async def behaviour(request, body):
        stream = await opened(request)
        while True:
            await stream.write(beat)
            await asyncio.sleep(0.02)

    return behaviour


async def takes_a_moment(request, body):
    """Between its first token and its end."""
    stream = await opened(request)
    await stream.write(event("hello"))
    await asyncio.sleep(0.02)
    await stream.write(b"data: [DONE]\n\n")
    return stream


def ask(mesh: SmallMesh, requests: int) -> list[asyncio.Task]:
    return [asyncio.create_task(post(mesh, chat(stream=True))) for _ in range(requests)]


def is_answered(asked: asyncio.Task) -> bool:
    status, body, _ = asked.result()
    return status == 200 and b"hello" in body and b"error" not in body


@pytest.fixture(params=[COMMENT, ROLE], ids=["comments", "roles"])
async def beat(request):
    return request.param


async def test_an_engine_that_sends_nothing_else_is_hung(one, beat, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("agents.core.engine_health.FLOOR_S", 0.5)
    replica = one.routers["us"].core.replicas.get("us-0")
    await asyncio.wait(ask(one, 4))  # both have answered
    one.engines[0].behaviour = sends_alone(beat)
    asked = ask(one, REQUESTS)
    await asyncio.wait(asked)
    assert all(map(is_answered, asked)), "also those that it had"
    down = (ReplicaState.DOWN, "hung")
    await one.until(
        lambda: (replica.heartbeat.state, replica.heartbeat.down_reason) == down, "it is down"
    )
    assert "us-0 is down: engine hung: " in caplog.text
    assert one.sample("us", "mesh_attempt_failures_total") == 0
    elsewhere = len(one.engines[1].seen)
    later = ask(one, REQUESTS)
    await asyncio.wait(later)
    assert all(map(is_answered, later)) and len(one.engines[1].seen) == elsewhere + REQUESTS


async def test_what_waits_at_it_is_answered_elsewhere_before_its_agent_notices(
    one, beat, monkeypatch
):
    monkeypatch.setattr("agents.core.engine_health.FLOOR_S", PATIENCE_S)
    monkeypatch.setattr("mesh.core.view.slowness.JUDGE_S", 0.05)
    set_all(one, takes_a_moment)
    usual = one.routers["us"].core.replicas.slow._usual
    async with asyncio.timeout(PATIENCE_S):
        while not any(each.seen >= 2 * WINDOW for each in usual.values()):
            await asyncio.wait(ask(one, 2))
    one.engines[0].behaviour = sends_alone(beat)
    first, later = ask(one, REQUESTS), []
    async with asyncio.timeout(PATIENCE_S / 2):
        while not all(each.done() for each in first):
            await asyncio.sleep(0.05)
            later += ask(one, 1)  # what is late is told by what came later
        await one.engines[0].hung_up.wait()
    assert all(map(is_answered, first))
    assert one.sample("us", "mesh_replica_left_out", replica="us-0") == 1
    assert one.sample("us", "mesh_replica_left_out", replica="us-1") == 0
    await end_all(later)  # some may wait at it still: each end allows placing one again


async def test_the_first_token_is_the_first_content(nats_server, beat):
    async def behaviour(request, body):
        stream = await opened(request)
        await stream.write(beat)
        await asyncio.sleep(BEFORE_S)
        await stream.write(event("hello") + b"data: [DONE]\n\n")
        return stream

    async with one_replica(nats_server, **PATIENT) as mesh:
        mesh.engines[0].behaviour = behaviour
        asked = ask(mesh, 1)
        await asyncio.wait(asked)
        assert is_answered(asked[0])
        assert mesh.sample("us", "mesh_request_ttft_seconds_count") == 1
        assert mesh.sample("us", "mesh_request_ttft_seconds_sum") >= BEFORE_S
        [life] = mesh.routers["us"].requests.ended.recent(1).requests
        assert life.agent_ttft_s >= BEFORE_S
