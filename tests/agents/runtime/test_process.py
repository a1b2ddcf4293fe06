"""The whole agent between a real bus and a real HTTP engine."""

import asyncio
import time

import orjson
import pytest

from agents.adapters.engine_kinds import KINDS
from agents.config import AgentConfig
from agents.runtime.process import outstanding_max
from schemas.exchange import WINDOW_BYTES, Frame, Outcome, Refusal
from tests.agents.scene import Gate, hello, scene
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    chunk,
)


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


async def test_a_full_agent_refuses_and_publishes_at_once(nats_server) -> None:
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
    gate, ahead_s = Gate(), [0.0]
    async with scene(nats_server, gate, clock=lambda: time.monotonic() + ahead_s[0]) as on:
        inbox = await on.asker.ask(1, **{"Mesh-Deadline-Ms": "30000"})
        await on.asker.until(lambda: on.asker.text(inbox))
        ahead_s[0] = 30.0
        assert (await on.asker.answer(inbox)).outcome == Outcome.DEADLINE
        await gate.hung_up.wait()


async def test_a_restarted_router_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        await on.asker.say_alive()
        inbox = await on.asker.ask(1)
        await on.asker.until(lambda: on.asker.text(inbox))
        on.asker.epoch = 2
        await on.asker.say_alive()
        await gate.hung_up.wait()
        assert (await on.asker.answer(inbox)).outcome == Outcome.CANCELLED


async def test_a_router_that_falls_silent_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        on.asker.epoch = None
        began = time.monotonic()
        inbox = await on.asker.ask(1)
        assert (await on.asker.answer(inbox)).outcome == Outcome.CANCELLED
        assert 2.9 < time.monotonic() - began < 15
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
        # Not before it is requested: work and parts are received by different tasks of the agent.
        await on.asker.until(lambda: on.asker.frames[inbox])
        await on.asker.part(inbox, 50, b"z" * 50)
        assert (await on.asker.answer(inbox)).outcome == Outcome.BODY_LOST
        assert on.asker.kinds(inbox) == "BE"
        assert on.engine.requests == []


async def test_a_long_prefill_is_not_silent(nats_server, monkeypatch) -> None:
    monkeypatch.setattr("agents.adapters.outbox.WORKING_S", 0.05)
    monkeypatch.setattr("agents.runtime.agent.SILENCE_CHECK_S", 0.05)
    go = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await go.wait()
        await hello(talk)

    async with scene(nats_server, slow) as on:
        inbox = await on.asker.ask(1, b"", **{"Mesh-Body-Bytes": "2"})
        await on.asker.until(lambda: on.asker.all_kinds(inbox).startswith("BWW"))
        await on.asker.part(inbox, 0, b"{}")
        before = len(on.asker.all_kinds(inbox))
        await on.asker.until(lambda: len(on.asker.all_kinds(inbox)) > before + 1)
        go.set()
        await on.asker.answer(inbox)
        assert on.asker.kinds(inbox) == "BHDE"


async def test_bytes_that_are_no_message_of_ours_do_no_harm(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        for subject in ("cancel", "credit", "body", "work"):
            await on.asker.client.publish(f"mesh.us.replica.g0.{subject}", b"\xff\x00rubbish")
        await on.asker.client.publish("mesh.eu.router.r9.alive", b"")
        refused = await on.asker.refusal(await on.asker.ask(1, **{"Mesh-Path": "/admin"}))
        assert refused.reason == Refusal.BAD_WORK
        assert (await on.asker.answer(await on.asker.ask(2))).outcome == Outcome.DONE


@pytest.mark.parametrize(
    ("kind", "given", "most"),
    [
        ("openai", {}, 8),
        ("openai", {"batch_max": 64}, 64),
        ("openai", {"batch_max": 2}, 2),
        ("openai", {"batch_max": 2, "outstanding_max": 5}, 5),
        ("openai", {"batch_max": 60_000}, 4096),
        ("vllm", {}, 256),
        ("vllm", {"batch_max": 16}, 256),
        ("vllm", {"batch_max": 512}, 512),
    ],
)
def test_an_engine_without_a_queue_is_given_what_it_runs_at_once(kind, given, most) -> None:
    config = AgentConfig(
        region="us",
        replica="us-0",
        engine_kind=kind,
        engine_url="http://e:1",
        nats_url="nats://n:1",
        **given,
    )
    assert outstanding_max(config, KINDS[kind]) == most
