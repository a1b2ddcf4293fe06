"""A request that is sent on by the region that was asked, on three servers as they are rendered.

us knows eu alone, whose replica is full; eu knows ap, whose replica is free. eu and ap carry the
label `eu`.
"""

import asyncio

import orjson
import pytest

from infra.topology import parse
from schemas import exchange, subjects, wire
from schemas.exchange import Frame, Refusal, unpack_frame
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh, upload

pytestmark = pytest.mark.timeout(120)

TABLES = {"eu": 'residency = ["eu"]', "ap": 'residency = ["eu"]'}


@pytest.fixture
async def three(tmp_path):
    mesh_file = parse(mesh_toml(("us", "eu", "ap"), replicas=1, more=TABLES), "mesh.toml")
    regions = NatsRegions(mesh_file, tmp_path)
    try:
        await regions.start()
        where = {"ground": regions.topology.ground, "lease_s": 0.0, **PATIENT}
        where |= {"policy": "skywalker", "peer_reply_s": 20.0}
        async with scripted_engine() as near, scripted_engine() as far, small_mesh(regions) as mesh:
            await mesh.router("us", **where)
            await mesh.router("eu", hops_max=2, **where)
            await mesh.router("ap", hops_max=2, **where)
            await mesh.agent("eu", "eu-0", near)
            await mesh.agent("ap", "ap-0", far)
            for region in ("eu", "ap"):
                await mesh.until_ready(region, 1)
            await mesh.until_peer("us", "eu")
            await mesh.until_peer("eu", "ap")
            peers = mesh.routers["eu"].core.peers
            await mesh.until(lambda: peers.detour_s("ap", "us") is not None, "the way to be known")
            near.waiting = 9
            await mesh.until_ready("eu", 0)
            mesh.near, mesh.far, mesh.regions = near, far, regions
            yield mesh
    finally:
        await regions.stop()


def believe_in(mesh, region):
    """us goes by a digest from before: full is what it does not know yet."""
    peer = mesh.routers["us"].core.peers.get(region)
    peers = mesh.routers["us"].core.peers
    peers.unavailable_because = lambda one, *_, **__: None if one is peer else "other"


@pytest.mark.parametrize("label", [None, "eu"])
async def test_its_answer_comes_straight_from_where_it_ends_up(three, label):
    believe_in(three, "eu")
    wishes = {} if label is None else {"x-mesh-residency": label}
    text = "x" * (3 * 1024 * 1024)  # its body goes in parts: us to ap
    for body in (chat(stream=True), chat(text)):
        status, _, headers = await post(three, body, **wishes)
        assert (status, headers["x-mesh-region"]) == (200, "ap")
    assert (len(three.far.seen), len(three.near.seen)) == (2, 0)
    assert three.far.seen[1]["messages"][0]["content"] == text
    assert three.sample("eu", "mesh_ingress_total", origin="us", result="sent_on") >= 2
    assert three.sample("ap", "mesh_ingress_total", origin="us", result="placed") == 2
    assert three.routers["eu"].core.inflight == three.routers["us"].core.inflight == {}


async def test_a_client_that_hangs_up_frees_the_engine_two_hops_away(three):
    async def endless(request, body):
        stream = await opened(request)
        while True:
            await stream.write(event("more "))
            await asyncio.sleep(0.02)

    believe_in(three, "eu")
    three.far.behaviour = endless
    url = three.urls["us"] + "/v1/chat/completions"
    async with client() as session, session.post(url, data=upload(chat(stream=True))) as answer:
        await answer.content.readuntil(b"\n\n")
    async with asyncio.timeout(20):
        await three.far.hung_up.wait()


async def test_it_waits_and_is_refused_there_as_if_it_had_been_asked_directly(three):
    believe_in(three, "eu")
    core = three.routers["us"].core
    three.far.waiting = 9  # which eu has not heard yet
    peers = three.routers["eu"].core.peers
    peers.unavailable_because = lambda *_, **__: None
    await three.until_ready("ap", 0)
    task = asyncio.create_task(post(three, chat()))
    await three.until(
        lambda: three.sample("ap", "mesh_ingress_refusals_total", reason="no_replica") > 0, "ap"
    )
    [record] = core.inflight.values()
    await three.until(lambda: record.refusals > 0, "us to hear of it")
    three.far.waiting = 0
    status, _, headers = await task
    assert (status, headers["x-mesh-region"]) == (200, "ap")


ASKED = {
    exchange.H_REQUEST: "request-1",
    exchange.H_MODEL: "tiny",
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "5000",
    exchange.H_HOPS: "2",
    exchange.H_ORIGIN: "us",
}


@pytest.mark.parametrize(
    ("regions", "reason"), [("us,eu", Refusal.BAD_WORK), ("us,sa", Refusal.NO_REPLICA)]
)
async def test_no_request_comes_back_or_goes_further_than_it_may(three, regions, reason):
    router = await three.regions.connect("us", "router", inbox_prefix="_INBOX.us")
    inbox = subjects.inbox("us", "r9", "7")
    answers = await router.subscribe(inbox)
    await flushed(router)
    headers = ASKED | {exchange.H_REGIONS: regions}
    body = orjson.dumps(chat())
    await router.publish(subjects.ingress("eu"), body, reply=inbox, headers=headers)
    frame = unpack_frame((await answers.next_msg(timeout=20)).data)
    assert frame.kind is Frame.REFUSED
    assert wire.decode_as(exchange.Refused, frame.payload).reason == reason
    assert three.far.seen == []
    await router.close()
