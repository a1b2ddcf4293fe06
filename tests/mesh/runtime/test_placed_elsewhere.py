"""A peer places a request on a replica of a region that it has adopted: that is told whom to stop.

The peer is played by the test, on the bus of the router that asks it.
"""

import asyncio
import contextlib

import pytest

from infra.bus import BusAddress, connect
from infra.process import end_all
from schemas import exchange, subjects, wire
from schemas.exchange import Frame, pack_frame
from schemas.ids import ModelId, RegionId, RouterId
from schemas.residency import ground
from schemas.state import Digest, ModelCapacity, encode_state
from tests.support.flushed import flushed
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh, upload
from tests.support.until import PATIENCE_S


def digest(seq: int) -> Digest:
    """eu would take a request."""
    return Digest(
        region=RegionId("eu"),
        router=RouterId("r1"),
        epoch=1,
        seq=seq,
        accepting=True,
        replicas_ready=1,
        replicas_free=1,
        queue=0,
        models={ModelId("tiny"): ModelCapacity(ready=1, free=1)},
        requests_per_s=0.0,
        residency=("us",),
    )


async def tell(bus) -> None:
    """Digests, as a router says them."""
    for seq in range(1, 100_000):
        await bus.publish(subjects.digest("eu"), encode_state(digest(seq)))
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def spoken_for(bus):
    """eu seems to live."""
    task = asyncio.create_task(tell(bus))
    try:
        yield
    finally:
        await end_all([task])


GROUND = ground({"us": ("us",), "eu": ("us",), "ap": ()})


@pytest.fixture
async def one(nats_server):
    async with small_mesh({"us": nats_server, "eu": nats_server}) as mesh:
        await mesh.router("us", policy="skywalker", hold_s_max=0.5, ground=GROUND, **PATIENT)
        bus = await connect(BusAddress(nats_server.url), name="eu", inbox_prefix="_INBOX.eu")
        async with spoken_for(bus):
            await mesh.until_peer("us", "eu")
            mesh.bus = bus
            yield mesh
        await bus.close()


async def test_a_client_that_hangs_up_is_told_to_the_region_of_the_replica(one):
    asked = await one.bus.subscribe(subjects.ingress("eu"))
    cancels = await one.bus.subscribe(subjects.cancel("*", "*"))
    await flushed(one.bus)
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat(stream=True)))
        forwarded = await asked.next_msg(timeout=PATIENCE_S)
        placed = wire.encode(exchange.Placed("ap", "ap-0"))
        await one.bus.publish(forwarded.reply, pack_frame(Frame.PLACED, 0, placed))
        [record] = one.routers["us"].core.inflight.values()
        await one.until(lambda: record.replica == "ap-0", "us to hear of the place")
        await end_all([task])
    cancel = await cancels.next_msg(timeout=PATIENCE_S)
    assert cancel.subject == subjects.cancel("ap", "ap-0")
    assert wire.decode_as(exchange.Cancel, cancel.data).inbox == forwarded.reply


async def test_what_a_refusal_names_makes_no_new_series(one):
    asked = await one.bus.subscribe(subjects.ingress("eu"))
    await flushed(one.bus)
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat(stream=True)))
        forwarded = await asked.next_msg(timeout=PATIENCE_S)
        invented = wire.encode(exchange.Refused("invented", "ap", "g9", -1, -1))
        await one.bus.publish(forwarded.reply, pack_frame(Frame.REFUSED, 0, invented))
        await one.until(
            lambda: one.sample("us", "mesh_refusals_total", reason="other") == 1.0, "the refusal"
        )
        assert one.sample("us", "mesh_forwards_total", peer="other", result="refused") == 1.0
        assert one.sample("us", "mesh_refusals_total", reason="invented") == 0.0
        await end_all([task])


async def test_a_place_whose_name_is_none_is_no_place(one):
    asked = await one.bus.subscribe(subjects.ingress("eu"))
    await flushed(one.bus)
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat(stream=True)))
        forwarded = await asked.next_msg(timeout=PATIENCE_S)
        placed = wire.encode(exchange.Placed("ap.>", "ap-0"))
        await one.bus.publish(forwarded.reply, pack_frame(Frame.PLACED, 0, placed))
        async with await task as answer:
            assert answer.status == 502


@pytest.mark.parametrize(
    ("region", "replica"), [("ap", "ap-0"), ("eu.>", "eu-0"), ("eu", "eu-0.work")]
)
async def test_a_body_goes_nowhere_but_where_its_request_may_go(one, region, replica):
    """The peer sends the request on, by old news of labels: the body is ours to withhold."""
    asked = await one.bus.subscribe(subjects.ingress_within("eu", "us"))
    bodies = await one.bus.subscribe("mesh.*.replica.>")
    await flushed(one.bus)
    text = chat("x" * (3 * 1024 * 1024))  # goes in parts, when somebody asks for it
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        headers = {"x-mesh-residency": "us"}
        task = asyncio.create_task(session.post(url, data=upload(text), headers=headers))
        forwarded = await asked.next_msg(timeout=PATIENCE_S)
        wanted = wire.encode(exchange.BodyWanted(region, replica))
        await one.bus.publish(forwarded.reply, pack_frame(Frame.BODY_WANTED, 0, wanted))
        async with await task as answer:
            assert answer.status == 502
    await flushed(one.routers["us"]._bus.client)  # what us said, and then what came of it
    await flushed(one.bus)
    assert bodies.pending_msgs == 0


@pytest.mark.parametrize("kind", [Frame.PLACED, Frame.WORKING])
async def test_a_stray_is_told_to_stop_where_its_name_is_one(one, kind):
    """Work that nobody waits for: only names that a subject may hold get into one."""
    everything = await one.bus.subscribe("mesh.*.replica.>")
    await flushed(one.bus)
    nobody = subjects.inbox("us", "r1", "nobody")
    for region, replica in (("ap", "ap-0.work"), ("ap.>", "ap-0"), ("ap", "ap-0")):
        placed = wire.encode(exchange.Placed(region, replica))
        await one.bus.publish(nobody, pack_frame(kind, 0, placed))
    await one.bus.publish(nobody, pack_frame(Frame.WORKING, 0, b""))  # of an older agent
    first = await everything.next_msg(timeout=PATIENCE_S)
    assert first.subject == subjects.cancel("ap", "ap-0")
    assert wire.decode_as(exchange.Cancel, first.data).inbox == nobody


async def test_a_peer_that_says_held_for_ever_is_given_up(one):
    """What is asked for is served at home, a little later than anybody may be held."""
    asked = await one.bus.subscribe(subjects.ingress("eu"))
    await flushed(one.bus)
    async with scripted_engine() as engine, client() as session:
        core = one.routers["us"].core
        engine.waiting = 9
        await one.agent("us", "us-0", engine)
        await one.until(
            lambda: any(replica.heartbeat.pending for replica in core.replicas), "home to be full"
        )
        url = one.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat(stream=True)))
        forwarded = await asked.next_msg(timeout=PATIENCE_S)
        [record] = core.inflight.values()
        engine.waiting = 0
        async with asyncio.timeout(PATIENCE_S):
            while not task.done():
                await one.bus.publish(forwarded.reply, pack_frame(Frame.HELD, 0))
                await asyncio.sleep(0.1)
        async with await task as answer:
            assert (answer.status, answer.headers["x-mesh-region"]) == (200, "us")
        assert (record.failures, record.avoid) == (1, {"eu"})
