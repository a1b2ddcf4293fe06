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
        inbox = await on.router.send_work(7, b'{"prompt":"x"}')
        end = await on.router.answer(inbox)
        assert end.outcome == Outcome.DONE
        assert on.router.kinds(inbox) == "HDE"
        assert on.router.text(inbox) == b'{"text":"hello"}'
        assert on.engine.requests[0].body == b'{"prompt":"x"}'
        beat = await on.router.state(served_total=1, outstanding=0)
    assert beat.taken == {"r1": 7}
    assert beat.models == ("org/llama",)
    assert (beat.pending, beat.running, beat.full) == (0, 0, False)


async def test_a_hundred_at_once_do_not_wait_for_each_other(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inboxes = [await on.router.send_work(number) for number in range(100)]
        await on.router.until(lambda: sum(bool(on.router.text(name)) for name in inboxes) == 100)
        await on.router.state(outstanding=100)
        gate.open.set()
        ends = [await on.router.answer(name) for name in inboxes]
        assert {end.outcome for end in ends} == {Outcome.DONE}
        await on.router.state(outstanding=0)


async def test_a_full_agent_refuses_and_publishes_at_once(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate, outstanding_max=1, heartbeat_ms=1000) as on:
        first = await on.router.send_work(1)
        await on.router.state(full=True)
        refused = await on.router.refusal(await on.router.send_work(2))
        assert (refused.reason, refused.pending, refused.running) == (Refusal.FULL, 0, 0)
        gate.open.set()
        await on.router.answer(first)
        await on.router.state(full=False)


async def test_pending_requests_of_the_engine_make_it_full(nats_server) -> None:
    async with scene(nats_server, hello, heartbeat_ms=1000) as on:
        on.engine.metrics = "vllm:num_requests_running 4\nvllm:num_requests_waiting 2\n"
        await on.router.state(full=True, pending=2, running=4)
        refused = await on.router.refusal(await on.router.send_work(1))
        assert (refused.reason, refused.pending, refused.running) == (Refusal.FULL, 2, 4)


async def test_a_cancel_reaches_the_engine(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(inbox))
        await on.router.cancel(inbox)
        assert (await on.router.answer(inbox)).outcome == Outcome.CANCELLED
        await gate.hung_up.wait()
        await on.router.state(outstanding=0)


async def test_a_deadline_reaches_the_engine(nats_server) -> None:
    gate, ahead_s = Gate(), [0.0]
    async with scene(nats_server, gate, clock=lambda: time.monotonic() + ahead_s[0]) as on:
        inbox = await on.router.send_work(1, **{"Mesh-Deadline-Ms": "30000"})
        await on.router.until(lambda: on.router.text(inbox))
        ahead_s[0] = 30.0
        assert (await on.router.answer(inbox)).outcome == Outcome.DEADLINE
        await gate.hung_up.wait()


async def test_a_restarted_router_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        await on.router.publish_alive()
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(inbox))
        on.router.epoch = 2
        await on.router.publish_alive()
        await gate.hung_up.wait()
        assert (await on.router.answer(inbox)).outcome == Outcome.CANCELLED


async def test_a_router_that_falls_silent_has_its_answers_aborted(nats_server) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        on.router.epoch = None
        began = time.monotonic()
        inbox = await on.router.send_work(1)
        assert (await on.router.answer(inbox)).outcome == Outcome.CANCELLED
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
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: len(on.router.text(inbox)) >= WINDOW_BYTES)
        count = len(on.router.beats)
        await on.router.until(lambda: len(on.router.beats) > count + 2)
        held = len(on.router.text(inbox))
        assert held <= 2 * WINDOW_BYTES
        while on.router.frames[inbox][-1].kind is not Frame.END:
            seen = len(on.router.frames[inbox])
            await on.router.credit(inbox, len(on.router.text(inbox)))
            await on.router.until(lambda seen=seen: len(on.router.frames[inbox]) > seen)
        assert on.router.text(inbox) == piece * 300


async def test_a_large_body_in_parts(nats_server) -> None:
    body = orjson.dumps({"prompt": "y" * 3_000_000})
    async with scene(nats_server, hello) as on:
        inbox = await on.router.send_work(1, b"", **{"Mesh-Body-Bytes": str(len(body))})
        await on.router.until(lambda: on.router.frames[inbox])
        assert on.router.kinds(inbox) == "B"
        for offset in range(0, len(body), 500_000):
            await on.router.part(inbox, offset, body[offset : offset + 500_000])
        assert (await on.router.answer(inbox)).outcome == Outcome.DONE
        assert on.router.kinds(inbox) == "BHDE"
        assert on.engine.requests[0].body == body


async def test_a_body_with_a_hole_is_lost(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        inbox = await on.router.send_work(1, b"", **{"Mesh-Body-Bytes": "100"})
        # Not before it is requested: work and parts are received by different tasks of the agent.
        await on.router.until(lambda: on.router.frames[inbox])
        await on.router.part(inbox, 50, b"z" * 50)
        assert (await on.router.answer(inbox)).outcome == Outcome.BODY_LOST
        assert on.router.kinds(inbox) == "BE"
        assert on.engine.requests == []


async def test_a_long_prefill_is_not_silent(nats_server, monkeypatch) -> None:
    monkeypatch.setattr("agents.adapters.outbox.WORKING_S", 0.05)
    monkeypatch.setattr("agents.runtime.agent.SILENCE_CHECK_S", 0.05)
    go = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await go.wait()
        await hello(talk)

    async with scene(nats_server, slow) as on:
        inbox = await on.router.send_work(1, b"", **{"Mesh-Body-Bytes": "2"})
        await on.router.until(lambda: on.router.all_kinds(inbox).startswith("BWW"))
        await on.router.part(inbox, 0, b"{}")
        before = len(on.router.all_kinds(inbox))
        await on.router.until(lambda: len(on.router.all_kinds(inbox)) > before + 1)
        go.set()
        await on.router.answer(inbox)
        assert on.router.kinds(inbox) == "BHDE"


async def test_bytes_that_are_no_message_of_ours_do_no_harm(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        for subject in ("cancel", "credit", "body", "work"):
            await on.router.client.publish(f"mesh.us.replica.g0.{subject}", b"\xff\x00rubbish")
        await on.router.client.publish("mesh.eu.router.r9.alive", b"")
        refused = await on.router.refusal(await on.router.send_work(1, **{"Mesh-Path": "/admin"}))
        assert refused.reason == Refusal.WRONG_MODEL
        assert (await on.router.answer(await on.router.send_work(2))).outcome == Outcome.DONE


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
