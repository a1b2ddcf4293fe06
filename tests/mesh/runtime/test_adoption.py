"""Two regions on two nats-servers: one loses its router, the other serves its replica."""

import asyncio
import time
from contextlib import asynccontextmanager

import orjson
import pytest

from mesh.adapters.streams import lease as lease_stream
from mesh.core.view.replica import replica_name_at
from schemas import exchange, subjects, wire
from schemas.exchange import H_OWNER, SILENCE_S_MAX, Frame, unpack_frame
from schemas.state import Lease, encode_state
from tests.support.flushed import flushed
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import event, hang, opened, say, scripted_engine
from tests.support.small_mesh import chat, client, post, small_mesh, upload
from tests.support.until import PATIENCE_S

ADOPTED = replica_name_at("us", "us-0", "eu")


@asynccontextmanager
async def two_regions(directory):
    """us and eu with a replica each; eu's is full, so that only us's can be given work."""
    async with (
        nats_pair(directory, "us", "eu") as servers,
        scripted_engine() as near,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", policy="skywalker")
        await mesh.router("eu", policy="skywalker", hold_s_max=20.0)
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        for region in ("us", "eu"):
            await mesh.until_ready(region, 1)
            ownership = mesh.routers[region].core.ownership
            await mesh.until(lambda o=ownership, r=region: r in o.owned, f"the lease of {region}")
        await mesh.until_peer("eu", "us")
        far.waiting = 9
        await mesh.until_ready("eu", 0)
        mesh.near, mesh.far, mesh.servers = near, far, servers
        yield mesh


@pytest.fixture
async def two(tmp_path):
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def lose(mesh):
    """us has no router any more, and eu serves its replica."""
    await mesh.routers["us"].close()
    replicas = mesh.routers["eu"].core.replicas
    await mesh.until(lambda: replicas.get(ADOPTED) is not None, "eu to adopt us")


async def regain(mesh):
    """us has a router again, and its replica back."""
    await mesh.router("us", policy="skywalker")
    ownership = mesh.routers["eu"].core.ownership
    await mesh.until(lambda: not ownership.adopted, "eu to hand back")
    await mesh.until_ready("us", 1)


async def test_an_adopted_replica_serves_as_one_of_its_own_and_is_handed_back(two):
    await lose(two)
    status, _, headers = await post(two, chat("x"), region="eu")
    assert (status, headers["x-mesh-region"], len(two.near.seen)) == (200, "us", 1)
    assert two.sample("eu", "mesh_region_owned", of="us") == 1.0
    assert two.sample("eu", "mesh_adopted_replicas", of="us") == 1.0
    await regain(two)
    status, _, headers = await post(two, chat("y"), region="us")
    assert (status, headers["x-mesh-region"], len(two.near.seen)) == (200, "us", 2)
    assert two.sample("eu", "mesh_region_owned", of="us") == 0.0
    assert two.sample("eu", "mesh_hand_backs_total") == 1.0
    assert list(two.routers["eu"].core.replicas.names_of("us")) == []


async def test_an_answer_that_runs_on_an_adopted_replica_outlives_the_hand_back(two):
    go_on = asyncio.Event()

    async def slow(request, body):
        stream = await opened(request)
        await stream.write(event("first "))
        await go_on.wait()
        await stream.write(event("last") + b"data: [DONE]\n\n")
        return stream

    two.near.behaviour = slow
    await lose(two)
    url = two.urls["eu"] + "/v1/chat/completions"
    async with client() as session, session.post(url, data=upload(chat(stream=True))) as answer:
        assert answer.headers["x-mesh-region"] == "us"
        await answer.content.readuntil(b"\n\n")
        await regain(two)
        go_on.set()
        assert b"last" in await answer.read()
    assert two.routers["eu"].core.inflight == {}


async def test_a_client_that_hangs_up_after_the_hand_back_frees_the_engine(two):
    async def endless(request, body):
        stream = await opened(request)
        while True:
            await stream.write(event("more "))
            await asyncio.sleep(0.02)

    two.near.behaviour = endless
    await lose(two)
    url = two.urls["eu"] + "/v1/chat/completions"
    async with client() as session, session.post(url, data=upload(chat(stream=True))) as answer:
        await answer.content.readuntil(b"\n\n")
        await regain(two)
    async with asyncio.timeout(PATIENCE_S):
        await two.near.hung_up.wait()


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_replica_that_is_lost_after_the_hand_back_is_told_to_whoever_waits(two, restarts):
    """A peer of eu waits for it, played here, and a client of eu: not for the silence of 16 s."""
    two.near.behaviour = hang()
    await lose(two)
    inbox = subjects.inbox("us", "r9", "7")
    peer = await two.routers["eu"]._bus.client.subscribe(inbox)
    await flushed(two.routers["eu"]._bus.client)
    await two.routers["eu"]._bus.client.publish(
        subjects.ingress("eu"), orjson.dumps(chat()), reply=inbox, headers=ASKED
    )
    await told(peer, Frame.PLACED)
    client = asyncio.create_task(post(two, chat(stream=True), region="eu"))
    await two.until(lambda: len(two.near.seen) == 2, "both to be with the engine")
    await regain(two)
    assert [one.replica for one in two.routers["eu"].core.inflight.values()] == ["us-0"]
    two.near.behaviour = say("anew")
    began = time.monotonic()
    await two.kill_agent("us-0")
    if restarts:
        await two.agent("us", "us-0", two.near)
    frame = await told(peer, Frame.LOST)
    took_s = time.monotonic() - began
    assert took_s < SILENCE_S_MAX / 2
    lost = wire.decode_as(exchange.Lost, frame.payload)
    assert (lost.region, lost.replica) == ("us", "us-0")
    if not restarts:
        await two.agent("us", "us-0", two.near)
    assert (await client)[0] == 200, "placed anew"
    ears = two.routers["eu"].requests.beats._subscriptions
    await two.until(lambda: not ears, "eu to hear us's heartbeats no more")


async def told(inbox, kind):
    """The first frame of the kind, behind those that say that it waits or is worked on."""
    while (frame := unpack_frame((await inbox.next_msg(timeout=PATIENCE_S)).data)).kind is not kind:
        assert frame.kind in (Frame.HELD, Frame.WORKING), frame.kind
    return frame


ASKED = {
    exchange.H_REQUEST: "request-1",
    exchange.H_MODEL: "tiny",
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "60000",
    exchange.H_HOPS: "1",
    exchange.H_ORIGIN: "us",
}


async def test_a_body_in_parts_reaches_an_adopted_replica(two):
    await lose(two)
    text = "x" * (3 * 1024 * 1024)  # beyond the servers' max_payload of 1 MiB
    status, _, headers = await post(two, chat(text), region="eu")
    assert (status, headers["x-mesh-region"]) == (200, "us")
    assert two.near.seen[0]["messages"][0]["content"] == text


async def test_the_lease_outlives_its_server(two):
    """All routers gone and the server restarted: the stream is there, and its numbers go on."""
    before = two.routers["us"].core.ownership.owned["us"]
    await two.routers["us"].close()
    await two.servers["us"].restart()
    ownership = two.routers["eu"].core.ownership
    await two.until(lambda: "us" in ownership.adopted, "eu to adopt us")
    assert ownership.adopted["us"] > before
    two.near.arrived.clear()
    status, _, headers = await post(two, chat("x"), region="eu")
    assert (status, headers["x-mesh-region"]) == (200, "us")


async def test_an_agent_refuses_a_region_that_owns_it_no_longer(two):
    await lose(two)
    await regain(two)
    eu = two.routers["eu"]
    refused = asyncio.get_running_loop().create_future()

    async def heard(msg):
        if not refused.done():
            refused.set_result(msg.data)

    inbox = subjects.inbox("eu", "r1", "late-1")
    await eu._bus.client.subscribe(inbox, cb=heard)
    await flushed(eu._bus.client)
    headers = {
        "Mesh-Model": "tiny",
        "Mesh-Path": "/v1/completions",
        H_OWNER: "eu",
        "Mesh-Term": "1",
    }
    await eu._bus.client.publish(subjects.work("us", "us-0"), b"{}", reply=inbox, headers=headers)
    async with asyncio.timeout(PATIENCE_S):
        assert b"not_owner" in await refused
    assert two.near.seen == []


def read_from(stream, subject):
    """What a server adds to a message that it reads out of a stream."""
    return {"Nats-Sequence": "7", "Nats-Stream": stream, "Nats-Subject": subject}


async def test_leases_that_are_none_are_dropped_and_counted(two):
    bus = two.routers["eu"]._bus.client
    forged = Lease(region="eu", owner="us", router="r9", term=99, lease_s=1.0)
    said = [
        (subjects.leased("us"), b"{}", {"Nats-Sequence": "7"}),
        (subjects.leased("us"), encode_state(forged), {"Nats-Sequence": "7"}),  # for another
        (subjects.leased("eu"), encode_state(forged), {"Nats-Sequence": "x"}),
        (subjects.leased("eu"), encode_state(forged), None),
        (subjects.leased("eu"), encode_state(forged), {"Nats-Sequence": "7"}),
        (
            subjects.leased("eu"),
            encode_state(forged),
            read_from("HEARTBEATS", "mesh.eu.lease.owner"),
        ),
        (subjects.leased("eu"), encode_state(forged), read_from("LEASES", "mesh.us.lease.owner")),
    ]
    for subject, data, headers in said:
        await bus.publish(subject, data, headers=headers)
    await two.until(lambda: two.sample("eu", "mesh_leases_dropped_total") == 7.0, "all dropped")
    ownership = two.routers["eu"].core.ownership
    await two.until(lambda: list(ownership.owned) == ["eu"], "eu to own itself and nobody else")
    assert ownership.owned["eu"] < forged.term


async def test_the_stream_takes_one_of_two_who_claim_at_once(nats_server):
    """The fact that all of it stands on: JetStream's own compare-and-set."""
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        stream = mesh.routers["us"]._bus.client.jetstream()
        await stream.add_stream(lease_stream("us"))
        claims = [
            stream.publish(
                subjects.lease("us"),
                b"%d" % n,
                headers={"Nats-Expected-Last-Subject-Sequence": "0"},
            )
            for n in range(5)
        ]
        told = await asyncio.gather(*claims, return_exceptions=True)
        assert sum(not isinstance(one, Exception) for one in told) == 1
        assert sum("wrong last sequence: 1" in str(one) for one in told) == 4
