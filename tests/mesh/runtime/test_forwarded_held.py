"""A request that waits in a peer's line: its router hears so, and its client is served there."""

import asyncio
import logging
from contextlib import asynccontextmanager

import orjson
import pytest
from opentelemetry.trace import SpanKind

from infra.process import end_all
from schemas.exchange import HELD_S
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import event, hang, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh
from tests.support.spans import traced
from tests.support.until import PATIENCE_S

SERVER = SpanKind.SERVER
AGREE_S = 0.005
LONG = "word " * 60_000  # 75,000 tokens: seconds of work, by what a router believes at start


@asynccontextmanager
async def two_regions(directory, **of_us):
    """us has no replica; eu's only one computes a long prompt until `gate` opens."""
    async with (
        nats_pair(directory, "us", "eu") as servers,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", **of_us)
        await mesh.router("eu", **PATIENT)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("us", "eu")
        mesh.gate = asyncio.Event()
        far.behaviour = hang(gate=mesh.gate)
        mesh.long = asyncio.create_task(post(mesh, chat(LONG, stream=True), "eu"))
        await far.arrived.wait()
        mesh.far = far
        yield mesh
        mesh.gate.set()
        await mesh.long


@pytest.fixture
async def two(tmp_path):
    async with two_regions(tmp_path, peer_reply_s=240.0, **PATIENT) as mesh:
        yield mesh


@pytest.fixture
async def two_of_which_one_may_die(tmp_path):
    async with two_regions(tmp_path) as mesh:
        yield mesh


def held_requests(mesh) -> list[str]:
    held = mesh.routers["eu"].core.held
    return [request.answer_inbox for request in held if request.answer_inbox is not None]


async def test_it_is_served_where_it_waited(two):
    task = asyncio.create_task(post(two, chat(stream=True)))
    await two.until(lambda: len(held_requests(two)) == 1, "the request to wait in eu")
    us = two.routers["us"].core
    [record] = us.inflight.values()
    heard_at = record.last_frame_at
    await two.until(lambda: record.last_frame_at > heard_at + HELD_S / 2, "us to hear of it again")
    assert (record.peer, record.replica, record.refusals) == ("eu", None, 0)
    two.gate.set()
    status, body, headers = await task
    assert (status, headers["x-mesh-region"]) == (200, "eu")
    assert event("late") in body
    assert not held_requests(two)


async def test_its_wait_is_in_the_receipt_the_trace_and_the_metric(two, caplog):
    caplog.set_level(logging.INFO, "mesh.runtime.request_observer")
    before_s = two.sample("eu", "mesh_hold_seconds_sum")
    headers = {"x-mesh-debug": "1", "x-request-id": "held-1"}
    with traced() as ended:
        task = asyncio.create_task(post(two, chat(stream=True), **headers))
        await two.until(lambda: len(held_requests(two)) == 1, "the request to wait in eu")
        two.gate.set()
        status, _, answered = await task
        roots = [span for span in ended() if span.name == "chat tiny" and span.kind is SERVER]
        [hold] = [span for span in ended() if span.name == "mesh.hold"]
    assert status == 200
    receipt = orjson.loads(answered["x-mesh-decision"])
    [root] = [span for span in roots if span.attributes["mesh.request_id"] == "held-1"]
    held_s = receipt["peer_held_s"]
    assert held_s > 0.0
    assert receipt["held_s"] == 0.0
    parts_s = receipt["held_s"] + held_s + receipt["attempts_s"]
    assert parts_s == pytest.approx(receipt["ttft_s"], abs=AGREE_S)
    assert root.attributes["mesh.peer_held_s"] == pytest.approx(held_s, abs=AGREE_S)
    assert root.attributes["mesh.ttft_s"] == pytest.approx(receipt["ttft_s"], abs=AGREE_S)
    assert (hold.end_time - hold.start_time) / 1e9 == pytest.approx(held_s, abs=AGREE_S)
    metric_s = two.sample("eu", "mesh_hold_seconds_sum") - before_s
    assert metric_s == pytest.approx(held_s, abs=AGREE_S)
    ttft_s = two.sample("us", "mesh_request_ttft_seconds_sum", served="peer")
    assert ttft_s == pytest.approx(receipt["ttft_s"], abs=AGREE_S)
    assert f"held-1 placed by eu on eu-0 after {held_s:.3f} s in its hold queue" in caplog.text


async def test_a_peer_s_claim_of_a_wait_is_bounded_by_the_attempt(two):
    """What is said to have waited for an hour did not wait longer than its client did."""
    router = two.routers["us"].requests
    task = asyncio.create_task(post(two, chat(stream=True), **{"x-mesh-debug": "1"}))
    await two.until(lambda: len(held_requests(two)) == 1, "the request to wait in eu")
    [record] = router.session
    two.gate.set()
    await two.until(lambda: record.answer is not None and record.answer.replica, "its place")
    record.answer.peer_held_s = 3600.0
    _, _, answered = await task
    receipt = orjson.loads(answered["x-mesh-decision"])
    assert receipt["peer_held_s"] <= receipt["ttft_s"] < PATIENCE_S
    assert receipt["attempts_s"] >= 0.0


async def test_whose_client_leaves_meanwhile_costs_no_answer(two):
    task = asyncio.create_task(post(two, chat(stream=True)))
    await two.until(lambda: len(held_requests(two)) == 1, "the request to wait in eu")
    task.cancel()
    await two.until(lambda: not two.routers["us"].core.inflight, "its client to be gone")
    two.gate.set()
    await two.until(lambda: not held_requests(two), "eu to have placed it")
    assert (await post(two, chat(), "eu"))[0] == 200
    await two.until(lambda: not two.routers["eu"].core.inflight, "nothing to be left")


async def test_when_the_peer_is_gone_it_is_placed_anew(two_of_which_one_may_die):
    """Its client waits, and is answered by the replica that its own region has by then."""
    two = two_of_which_one_may_die
    async with scripted_engine() as near:
        task = asyncio.create_task(post(two, chat(stream=True)))
        await two.until(lambda: len(held_requests(two)) == 1, "the request to wait in eu")
        # Before eu is lost: later, eu's replica, adopted, might be the only one, and it is busy.
        await two.agent("us", "us-0", near)
        await two.until_ready("us", 1)
        # With its replica: a router that leaves may place who waits, when it hangs up on others.
        await two.kill_agent("eu-0")
        await two.routers["eu"].close()
        status, body, headers = await task
        assert (status, headers["x-mesh-region"]) == (200, "us")
        assert b"hello" in body
        two.gate.set()
        await end_all([two.long])
        two.long = asyncio.sleep(0)
