"""The whole agent between a real bus and a real HTTP engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import orjson
import pytest

from agents.adapters.relay import Relay
from agents.config import AgentConfig
from agents.runtime.agent import FAULT_OF_OURS, Agent
from agents.runtime.process import Stop, run
from infra.bus import BusUnreachable
from schemas.exchange import WINDOW_BYTES, Frame, Outcome, Refusal
from schemas.state import ReplicaState
from tests.agents.asker import REGION, REPLICA, Asker, asking
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    Script,
    ScriptedEngine,
    chunk,
    plain,
    running,
)


@dataclass(slots=True)
class Scene:
    """An agent at work, and both of its neighbours."""

    asker: Asker
    engine: ScriptedEngine
    stop: Stop
    task: asyncio.Task


@contextlib.asynccontextmanager
async def scene(nats_server, script: Script, **settings) -> AsyncIterator[Scene]:
    async with running(script) as engine, asking(nats_server.url) as asker:
        values = {
            "region": REGION,
            "replica": REPLICA,
            "engine_kind": "vllm",
            "engine_url": engine.url,
            "nats_url": nats_server.url,
            "read_interval_ms": 10,
            **settings,
        }
        stop = Stop()
        agent = run(AgentConfig(**values), time.monotonic, time.time_ns(), stop)
        task = asyncio.create_task(agent)
        try:
            await asker.state(state=ReplicaState.READY)
            yield Scene(asker, engine, stop, task)
        finally:
            stop.ask()
            stop.ask()
            await task


async def hello(talk: Conversation) -> None:
    await talk.send(plain(200, b'{"text":"hello"}'))


class Gate:
    """A script whose answer begins at once and ends when the test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def __call__(self, talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b"data: 1\n\n"))
        waiting = asyncio.create_task(talk.hung_up())
        opened = asyncio.create_task(self.open.wait())
        await asyncio.wait((waiting, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if waiting.done():
            self.hung_up.set()
            return
        waiting.cancel()
        await talk.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


async def test_work_is_answered_and_counted(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        inbox = await on.asker.ask(7, b'{"prompt":"x"}')
        end = await on.asker.answer(inbox)
        assert end.outcome == Outcome.DONE
        assert on.asker.kinds(inbox) == "HDE"
        assert on.asker.text(inbox) == b'{"text":"hello"}'
        assert on.engine.requests[0].body == b'{"prompt":"x"}'
        beat = await on.asker.state(served_total=1, outstanding=0)
    assert beat.taken == {"r1": 7}
    assert beat.models == ("org/llama",)
    assert (beat.pending, beat.running, beat.full) == (0, 0, False)


async def test_a_hundred_at_once_do_not_wait_for_each_other(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inboxes = [await on.asker.ask(number) for number in range(100)]
        await on.asker.until(lambda: sum(bool(on.asker.text(name)) for name in inboxes) == 100)
        await on.asker.state(outstanding=100)
        gate.open.set()
        ends = [await on.asker.answer(name) for name in inboxes]
        assert {end.outcome for end in ends} == {Outcome.DONE}
        await on.asker.state(outstanding=0)


async def test_a_full_agent_refuses_and_says_so_at_once(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate, outstanding_max=1, heartbeat_ms=1000) as on:
        first = await on.asker.ask(1)
        await on.asker.state(full=True)
        refused = await on.asker.refusal(await on.asker.ask(2))
        assert (refused.reason, refused.pending, refused.running) == (Refusal.FULL, 0, 0)
        gate.open.set()
        await on.asker.answer(first)
        await on.asker.state(full=False)


async def test_pending_requests_of_the_engine_make_it_full(nats_server) -> None:
    async with scene(nats_server, hello, heartbeat_ms=1000) as on:
        on.engine.metrics = "vllm:num_requests_running 4\nvllm:num_requests_waiting 2\n"
        await on.asker.state(full=True, pending=2, running=4)
        refused = await on.asker.refusal(await on.asker.ask(1))
        assert (refused.reason, refused.pending, refused.running) == (Refusal.FULL, 2, 4)


async def test_a_cancel_reaches_the_engine(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        await on.asker.cancel(inbox)
        assert (await on.asker.answer(inbox)).outcome == Outcome.CANCELLED
        await gate.hung_up.wait()
        await on.asker.state(outstanding=0)


async def test_a_deadline_reaches_the_engine(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.asker.ask(1, **{"Mesh-Deadline-Ms": "200"})
        assert (await on.asker.answer(inbox)).outcome == Outcome.DEADLINE
        await gate.hung_up.wait()


async def test_a_restarted_router_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        await on.asker.alive(1)
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        await on.asker.alive(2)
        await gate.hung_up.wait()
        assert (await on.asker.answer(inbox)).outcome == Outcome.CANCELLED


async def test_a_router_that_falls_silent_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        began = time.monotonic()
        inbox = await on.asker.ask(1)
        assert (await on.asker.answer(inbox)).outcome == Outcome.CANCELLED
        assert 2.9 < time.monotonic() - began < 10
        await gate.hung_up.wait()


async def test_flow_control_reaches_the_engine(nats_server) -> None:
    piece = b"data: " + b"x" * 8186 + b"\n\n"

    async def flood(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        for _ in range(300):
            await talk.send(chunk(piece))
        await talk.send(LAST_CHUNK)

    async with scene(nats_server, flood) as on:
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: len(on.asker.text(inbox)) >= WINDOW_BYTES)
        count = len(on.asker.beats)
        await on.asker.until(lambda: len(on.asker.beats) > count + 2)
        held = len(on.asker.text(inbox))
        assert held <= 2 * WINDOW_BYTES
        while on.asker.frames[inbox][-1].kind is not Frame.END:
            seen = len(on.asker.frames[inbox])
            await on.asker.credit(inbox, len(on.asker.text(inbox)))
            await on.asker.until(lambda seen=seen: len(on.asker.frames[inbox]) > seen)
        assert on.asker.text(inbox) == piece * 300


async def test_a_large_body_in_parts(nats_server) -> None:
    body = orjson.dumps({"prompt": "y" * 3_000_000})
    async with scene(nats_server, hello) as on:
        inbox = await on.asker.ask(1, b"", **{"Mesh-Body-Bytes": str(len(body))})
        await on.asker.until(lambda: on.asker.frames[inbox])
        assert on.asker.kinds(inbox) == "B"
        for offset in range(0, len(body), 500_000):
            await on.asker.part(inbox, offset, body[offset : offset + 500_000])
        assert (await on.asker.answer(inbox)).outcome == Outcome.DONE
        assert on.asker.kinds(inbox) == "BHDE"
        assert on.engine.requests[0].body == body


async def test_a_body_with_a_hole_is_lost(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        inbox = await on.asker.ask(1, b"", **{"Mesh-Body-Bytes": "100"})
        await on.asker.part(inbox, 50, b"z" * 50)
        assert (await on.asker.answer(inbox)).outcome == Outcome.BODY_LOST
        assert on.asker.kinds(inbox) == "BE"
        assert on.engine.requests == []


async def test_a_long_prefill_is_not_silent(nats_server, monkeypatch) -> None:
    monkeypatch.setattr("agents.adapters.frames.WORKING_S", 0.05)
    monkeypatch.setattr("agents.runtime.agent.SILENCE_CHECK_S", 0.05)
    go = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await go.wait()
        await hello(talk)

    async with scene(nats_server, slow) as on:
        inbox = await on.asker.ask(1, b"", **{"Mesh-Body-Bytes": "2"})
        await on.asker.until(lambda: on.asker.kinds(inbox).startswith("BWW"))
        await on.asker.part(inbox, 0, b"{}")
        before = len(on.asker.kinds(inbox))
        await on.asker.until(lambda: len(on.asker.kinds(inbox)) > before + 1)
        go.set()
        await on.asker.answer(inbox)
        assert on.asker.kinds(inbox).replace("W", "") == "BHDE"


async def test_bytes_that_are_no_message_of_ours_do_no_harm(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        for subject in ("cancel", "credit", "body", "work"):
            await on.asker.client.publish(f"mesh.us.replica.g0.{subject}", b"\xff\x00rubbish")
        await on.asker.client.publish("mesh.eu.router.r9.alive", b"")
        refused = await on.asker.refusal(await on.asker.ask(1, **{"Mesh-Path": "/admin"}))
        assert refused.reason == Refusal.BAD_WORK
        assert (await on.asker.answer(await on.asker.ask(2))).outcome == Outcome.DONE


async def test_an_engine_that_dies_and_returns_with_another_model(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        await on.engine.stop()
        await on.asker.state(state=ReplicaState.DOWN)
        refused = await on.asker.refusal(await on.asker.ask(1))
        assert refused.reason == Refusal.ENGINE_DOWN
        on.engine.models = ["org/other"]
        await on.engine.start()
        beat = await on.asker.state(state=ReplicaState.READY)
        assert beat.models == ("org/other",)
        refused = await on.asker.refusal(await on.asker.ask(2))
        assert refused.reason == Refusal.WRONG_MODEL


async def test_a_restarted_bus_brings_the_agent_back(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        await nats_server.restart()
        await on.asker.state(state=ReplicaState.READY)
        inbox = await on.asker.ask(1)
        assert (await on.asker.answer(inbox)).outcome == Outcome.DONE


async def test_an_answer_across_a_restart_of_the_bus_does_not_hang(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        await nats_server.restart()
        await on.asker.state(outstanding=1)
        gate.open.set()
        assert (await on.asker.answer(inbox)).outcome == Outcome.DONE
        assert on.asker.kinds(inbox) == "HDDE"


async def test_draining_finishes_what_runs_refuses_the_rest_and_says_goodbye(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        on.stop.ask()
        await on.asker.state(state=ReplicaState.DRAINING, outstanding=1)
        refused = await on.asker.refusal(await on.asker.ask(2))
        assert refused.reason == Refusal.DRAINING
        gate.open.set()
        assert (await on.asker.answer(inbox)).outcome == Outcome.DONE
        await on.task
        await on.asker.until(lambda: on.asker.beats[-1].state is ReplicaState.GONE)


@pytest.mark.parametrize("impatient", [True, False])
async def test_a_drain_that_takes_too_long_ends_the_answers(nats_server, impatient) -> None:
    gate = Gate()
    patience_s = 600.0 if impatient else 0.05
    async with scene(nats_server, gate, drain_timeout_s=patience_s) as on:
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        on.stop.ask()
        if impatient:
            await on.asker.state(state=ReplicaState.DRAINING)
            on.stop.ask()
        assert (await on.asker.answer(inbox)).outcome == Outcome.ENGINE_LOST
        await gate.hung_up.wait()
        await on.task
        await on.asker.until(lambda: on.asker.beats[-1].state is ReplicaState.GONE)


async def test_a_fault_of_ours_in_one_answer_ends_that_answer_alone(
    nats_server, monkeypatch, caplog
) -> None:
    pass_on = Relay._pass_on

    async def fails(self, chunk: bytes) -> None:
        if b"poison" in chunk:
            raise RuntimeError("a bug of ours")
        await pass_on(self, chunk)

    monkeypatch.setattr(Relay, "_pass_on", fails)
    gate = Gate()

    async def script(talk: Conversation) -> None:
        if talk.request.body == b"poison":
            await talk.send(CHUNKED + chunk(b"data: poison\n\n"))
            await talk.hung_up()
        else:
            await gate(talk)

    async with scene(nats_server, script) as on:
        other = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(other))
        inbox = await on.asker.ask(2, b"poison")
        end = await on.asker.answer(inbox)
        assert (end.outcome, end.detail) == (Outcome.ENGINE_BROKEN, FAULT_OF_OURS)
        assert on.asker.kinds(inbox) == "HE"
        await on.asker.state(outstanding=1)
        gate.open.set()
        assert (await on.asker.answer(other)).outcome == Outcome.DONE
    [record] = [
        record
        for record in caplog.records
        if record.name == "agents.runtime.agent" and record.exc_info
    ]
    assert inbox in record.getMessage()
    assert "a bug of ours" in record.exc_text


async def stubborn(self) -> None:
    """Loses one cancel, as Python 3.11's wait_for may."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


async def test_a_task_that_loses_a_cancel_does_not_keep_a_stopped_agent(
    nats_server, monkeypatch
) -> None:
    monkeypatch.setattr(Agent, "keep_working", stubborn)
    async with scene(nats_server, hello) as on:
        on.stop.ask()
        async with asyncio.timeout(10):
            await on.task


async def test_a_task_that_fails_ends_the_agent_and_every_answer(nats_server, monkeypatch) -> None:
    broken = asyncio.Event()

    async def fails(self) -> None:
        await broken.wait()
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Agent, "keep_working", fails)
    monkeypatch.setattr("agents.runtime.process._tell_ready", lambda path, ready: stubborn(None))
    gate = Gate()
    with pytest.raises(ExceptionGroup) as failure:
        async with scene(nats_server, gate) as on:
            inbox = await on.asker.ask(1)
            await on.asker.until(lambda: on.asker.text(inbox))
            broken.set()
            async with asyncio.timeout(10):
                await asyncio.wait([on.task])
            await gate.hung_up.wait()
    assert [str(problem) for problem in failure.value.exceptions] == ["a bug of ours"]


async def test_the_fleet_is_visible_as_micro_services(nats_server) -> None:
    async with scene(nats_server, hello) as on:

        async def info() -> dict:
            reply = await on.asker.client.request("$SRV.INFO.mesh-agent", b"", timeout=5)
            return orjson.loads(reply.data)

        expected = {"region": "us", "replica": "g0", "engine": "vllm", "models": "org/llama"}
        assert (await info())["metadata"] == expected
        on.engine.models = ["org/other"]
        await on.asker.state(models=("org/other",))
        assert (await info())["metadata"]["models"] == "org/other"


async def test_its_own_metrics_page(nats_server, unused_tcp_port) -> None:
    async with (
        scene(nats_server, hello, metrics_port=unused_tcp_port) as on,
        aiohttp.ClientSession() as http,
    ):
        await on.asker.answer(await on.asker.ask(1))
        async with http.get(f"http://127.0.0.1:{unused_tcp_port}/metrics") as response:
            page = await response.text()
    labels = 'engine="vllm",region="us",replica="g0"'
    assert f"mesh_agent_served_total{{{labels}}} 1.0" in page
    assert f'mesh_agent_state{{{labels},state="ready"}} 1.0' in page
    assert "\nmesh_agent_prefill_s_per_token{" not in page  # unknown is not zero


async def test_without_a_bus_there_is_no_agent(unused_tcp_port, monkeypatch) -> None:
    monkeypatch.setattr("infra.bus.START_TIMEOUT_S", 0.3)
    config = AgentConfig(
        region="us",
        replica="g0",
        engine_kind="openai",
        engine_url="http://127.0.0.1:1",
        nats_url=f"nats://127.0.0.1:{unused_tcp_port}",
    )
    with pytest.raises(BusUnreachable, match="no bus at"):
        await run(config, time.monotonic, 1, Stop())
