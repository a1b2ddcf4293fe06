"""Forwarding between two regions: one hop, and the answer comes straight from the far agent."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import orjson
import pytest
from nats.aio.msg import Msg

from infra.bus import BusAddress, connect
from infra.process import end_all
from schemas import exchange, subjects
from schemas.exchange import Frame
from schemas.state import decode_heartbeat, encode_state
from tests.support.flushed import flushed
from tests.support.frames import frames_of
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh
from tests.support.until import PATIENCE_S


@pytest.fixture
async def servers(tmp_path):
    async with nats_pair(tmp_path, "us", "eu") as servers:
        yield servers


@asynccontextmanager
async def two_regions(servers, **of_eu):
    """us and eu, a replica each; us is full. `of_eu`: settings of eu's router."""
    async with (
        scripted_engine() as near,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", policy="skywalker", peer_reply_s=240.0, **PATIENT)
        await mesh.router("eu", policy="skywalker", **of_eu)
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready("us", 1)
        await mesh.until_ready("eu", 1)
        near.waiting = 9
        await mesh.until_ready("us", 0)
        await mesh.until_peer("us", "eu")
        mesh.near, mesh.far = near, far
        yield mesh


@pytest.fixture
async def two(servers):
    """What is said of eu's replica stays true for its router, whatever the replica says since."""
    async with two_regions(servers, **PATIENT) as mesh:
        yield mesh


async def test_a_full_region_is_answered_by_its_peer_in_one_hop(two):
    two.far.behaviour = say("from ", "afar")
    status, body, headers = await post(two, chat(stream=True), **{"x-mesh-debug": "1"})
    decision = orjson.loads(headers["x-mesh-decision"])
    assert (status, b"afar" in body) == (200, True)
    assert (decision["placement"], decision["peer"], decision["hops"]) == ("peer", "eu", 1)
    assert decision["replica"] == "eu-0"
    assert headers["x-mesh-region"] == "eu"  # who answered
    assert two.near.seen == []


async def test_what_its_client_wishes_goes_with_a_forwarded_request(two, servers):
    spy = await connect(BusAddress(servers["eu"].url), name="spy", inbox_prefix="_INBOX.spy")
    work = await spy.subscribe(subjects.work("eu", subjects.ANY))
    await flushed(spy)
    async with openai.AsyncOpenAI(base_url=two.urls["us"] + "/v1", api_key="none") as api:
        answer = await api.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={
                "x-mesh-priority": "low",
                "x-mesh-slo-ttft-ms": "30000",
                "x-mesh-session": "chat-1",
            },
        )
    headers = (await work.next_msg(timeout=PATIENCE_S)).headers
    assert answer.choices
    assert headers[exchange.H_PRIORITY] == "low"
    assert headers[exchange.H_SLO_TTFT_MS] == "30000"
    assert headers[exchange.H_SESSION] == "chat-1"
    await spy.close()


async def test_tokens_never_pass_the_other_router(two, servers):
    inboxes: list[str] = []
    spy = await connect(BusAddress(servers["us"].url), name="spy", inbox_prefix="_INBOX.spy")

    async def see(msg) -> None:
        inboxes.extend(inbox for inbox, frame in frames_of(msg) if frame.kind is Frame.DATA)

    await spy.subscribe("_INBOX.us.>", cb=see)
    eu_inbox = await spy.subscribe("_INBOX.eu.>")
    await flushed(spy)
    assert (await post(two, chat(stream=True)))[0] == 200
    await flushed(spy)
    assert inboxes and all(subjects.owner(subject) == "us" for subject in inboxes)
    assert all(b"hello" not in msg.data for msg in _drained(eu_inbox))
    await spy.close()


def _drained(subscription):
    queue = subscription._pending_queue
    while not queue.empty():
        yield queue.get_nowait()


async def test_a_forwarded_request_is_never_forwarded_again(two):
    two.far.waiting = 9  # both are full now: neither may bounce it back
    await two.until_ready("eu", 0)
    task = asyncio.create_task(post(two, chat()))
    core = two.routers["us"].core
    await two.until(lambda: len(core.held) == 1, "the request to be held at home")
    assert len(two.routers["eu"].core.held) == 0
    two.near.waiting = 0
    assert (await task)[0] == 200
    assert two.far.seen == []


async def test_a_peer_that_has_filled_up_refuses_and_nothing_is_lost(two, servers):
    two.far.waiting = 9
    await two.until_ready("eu", 0)
    peer = two.routers["us"].core.peers.get("eu")
    [latest] = peer.digests.values()
    capacity = {name: replace(old, free=old.ready) for name, old in latest.models.items()}
    async with liar(servers["eu"]) as say_it:  # another router of eu, that knows no better
        free = replace(latest, router="r2", replicas_free=1, models=capacity)
        await say_it(subjects.digest("eu"), encode_state(free))
        await two.until_peer("us", "eu")
    task = asyncio.create_task(post(two, chat(stream=True)))
    await two.until(lambda: forwards(two, "refused") >= 1, "the peer to refuse")
    assert two.sample("eu", "mesh_ingress_total", origin="us", result="refused") >= 1
    assert not task.done()
    two.near.waiting = 0
    status, body, _ = await task
    assert (status, b"hello" in body) == (200, True)
    assert (len(two.near.seen), len(two.far.seen)) == (1, 0)
    assert forwards(two, "placed") == 0


async def test_a_refusal_tells_the_asker_how_the_region_is_now(two):
    """No digest comes by gossip any more, so what us knows in the end came with the refusal."""
    us, eu = two.routers["us"], two.routers["eu"]
    subscriptions = us._bus.client._subs.values()
    [gossip] = [each for each in subscriptions if each.subject == subjects.digest("eu")]
    await gossip.unsubscribe()
    two.far.waiting = 9
    await two.until_ready("eu", 0)
    old = us.core.peers.get("eu").digests["r1"]
    capacity = {name: replace(it, free=it.ready) for name, it in old.models.items()}
    wrong = replace(old, seq=old.seq + 1, replicas_free=1, models=capacity)
    await two.until(lambda: eu.core.state.digest._seq > wrong.seq, "eu to have said more")
    us.requests.messages.receive_digest(Msg(None, subjects.digest("eu"), data=encode_state(wrong)))
    task = asyncio.create_task(post(two, chat()))
    await two.until(lambda: forwards(two, "refused") >= 1, "the peer to refuse")
    fresh = us.core.peers.get("eu").digests["r1"]
    assert (fresh.seq > wrong.seq, fresh.replicas_free) == (True, 0)
    assert two.sample("eu", "mesh_ingress_refusals_total", reason="no_replica") == 1
    two.near.waiting = 0
    assert (await task)[0] == 200


async def test_a_far_replica_that_has_filled_up_refuses_and_nothing_is_lost(two, servers):
    two.far.waiting = 9
    await two.until_ready("eu", 0)
    [replica] = two.routers["eu"].core.replicas
    beat = replica.heartbeat  # with a higher number what the agent itself says is old
    async with liar(servers["eu"]) as say_it:
        free = replace(beat, seq=beat.seq + 1_000_000, full=False, pending=0)
        await say_it(subjects.heartbeat("eu", "eu-0"), encode_state(free))
        await two.until_peer("us", "eu")
    task = asyncio.create_task(post(two, chat(stream=True)))
    await two.until(
        lambda: two.sample("us", "mesh_refusals_total", reason="full") >= 1, "the agent to refuse"
    )
    assert forwards(two, "placed") >= 1
    two.near.waiting = 0
    status, body, _ = await task
    assert (status, b"hello" in body) == (200, True)
    assert (len(two.near.seen), len(two.far.seen)) == (1, 0)


async def test_a_client_that_hangs_up_while_the_peer_refuses_leaves_nothing(two, servers):
    two.far.waiting = 9
    await two.until_ready("eu", 0)
    [replica] = two.routers["eu"].core.replicas
    beat = replica.heartbeat
    async with liar(servers["eu"]) as say_it:
        free = replace(beat, seq=beat.seq + 1_000_000, full=False, pending=0)
        await say_it(subjects.heartbeat("eu", "eu-0"), encode_state(free))
        await two.until_peer("us", "eu")
    task = asyncio.create_task(post(two, chat(stream=True)))
    await two.until(lambda: forwards(two, "placed") >= 1, "the peer to have placed it")
    await end_all([task])
    router = two.routers["us"]
    await two.until(lambda: router.requests.open_requests == 0, "no request to be open")
    assert not router.core.inflight
    assert len(router.core.held) == 0
    assert two.near.seen == two.far.seen == []


def forwards(mesh, result: str) -> float:
    return mesh.sample("us", "mesh_forwards_total", peer="eu", result=result)


@asynccontextmanager
async def liar(server):
    """Publishes what is not so."""
    bus = await connect(BusAddress(server.url), name="liar", inbox_prefix="_INBOX.liar")
    try:
        yield bus.publish
    finally:
        await bus.close()


async def test_each_region_keeps_the_last_heartbeats_of_its_own(two, servers):
    for region, server in servers.items():
        bus = await connect(BusAddress(server.url), name="reader", inbox_prefix="_INBOX.reader")
        stream = await bus.jetstream().stream_info(subjects.STREAM_HEARTBEATS)
        last = await bus.jetstream().get_last_msg(
            subjects.STREAM_HEARTBEATS, subjects.heartbeat(region, f"{region}-0")
        )
        await bus.close()
        assert stream.config.subjects == [subjects.heartbeat(region, subjects.ANY)]
        assert decode_heartbeat(last.data).region == region


@pytest.mark.parametrize("kib", [300, 4096])  # what fits one message, too
async def test_a_large_body_reaches_the_far_engine_in_parts(two, kib):
    text = "far " * 256 * kib
    assert (await post(two, chat(text)))[0] == 200
    assert two.far.seen == [chat(text)]


async def test_round_trips_are_measured(two):
    peers = two.routers["us"].core.peers
    await two.until(lambda: peers.get("eu").rtt_s is not None, "a ping to come back")
    assert 0.0 < peers.get("eu").rtt_s < 1.0


async def test_garbage_on_every_subject_of_a_router_harms_nothing(two, servers):
    vandal = await connect(BusAddress(servers["us"].url), name="v", inbox_prefix="_INBOX.v")
    for subject in (
        subjects.heartbeat("us", "us-0"),
        subjects.digest("eu"),
        subjects.digest("nowhere"),
        subjects.inbox("us", "r1", "1-1-1"),
        subjects.inbox("us", "r1", "ping-eu"),
        subjects.ingress("us"),
    ):
        for data in (b"", b"\xff" * 40, b'{"v":1}', b"E\x00\x00\x00\x00\x90", b"Z1234"):
            await vandal.publish(subject, data, reply="_INBOX.v.x")
    await flushed(vandal)
    await vandal.close()
    assert (await post(two, chat()))[0] == 200
