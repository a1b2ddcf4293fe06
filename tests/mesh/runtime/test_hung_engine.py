"""An engine that hangs behind its HTTP server, beside one that is idle: nobody waits for it."""

import asyncio
import logging
import re
import time
from contextlib import AsyncExitStack

import orjson
import pytest

from agents.core.engine_health import FLOOR_S, MARGIN, S_PER_TOKEN
from schemas.settings import BLIND
from schemas.state import ReplicaState
from tests.agents.simserver.support import MODEL, config, running
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

pytestmark = pytest.mark.drill

REQUESTS = 12
PROMPT_TOKENS_MAX = 50  # of what is asked here
LOOK_S = (
    2.0  # from when it is time to the look that sees it, at the most: a later one is told apart
)


async def test_requests_to_a_hung_engine_are_answered_by_the_other(nats_server, caplog):
    """12 of 12: those that it has taken, and those that come before anybody knows."""
    caplog.set_level(logging.INFO)

    def ask(stream: bool) -> asyncio.Task:
        body = chat("hello", stream=stream, max_tokens=8) | {"model": MODEL}
        return asyncio.create_task(post(mesh, body))

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(config()))
        second = await stack.enter_async_context(running(config()))
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        await mesh.router("us", policy="round-robin", pushing=BLIND, **PATIENT)
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2, MODEL)
        usual_s = 0.0
        for _ in range(4):  # then what is usual is known
            began = time.monotonic()
            assert (await ask(True))[0] == 200
            usual_s = max(usual_s, time.monotonic() - began)
        await first.post("/sim/faults", {"hang": "engine"})
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(n % 2 == 0) for n in range(REQUESTS)))
        took_s = time.monotonic() - began
        assert [status for status, _, _ in answers] == [200] * REQUESTS
        assert not [body for _, body, _ in answers if b"error" in body]
        [said] = re.findall(r"us-0 is down: engine hung: .* for ([\d.]+) s", caplog.text)
        patience_s = FLOOR_S + max(S_PER_TOKEN * PROMPT_TOKENS_MAX, MARGIN * usual_s)
        assert FLOOR_S <= float(said) <= patience_s + LOOK_S, "by what is usual for it"
        replica = mesh.routers["us"].core.replicas.get("us-0")
        assert replica.heartbeat.state is ReplicaState.DOWN
        assert replica.heartbeat.down_reason == "hung"
        assert mesh.sample("us", "mesh_attempt_failures_total") == 0
        await first.post("/sim/faults", {"hang": "off"})
        await mesh.until_ready("us", 2, MODEL)
        print(orjson.dumps({"answered_s": round(took_s, 2)}).decode())
