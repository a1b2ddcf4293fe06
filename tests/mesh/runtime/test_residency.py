"""Residency from the client's header to the server's log, on servers as they are rendered.

Region eu is confined to `eu`, us carries `us`; a replica each, routers and agents with the
credentials of their role.
"""

import asyncio
import time
from contextlib import asynccontextmanager

import orjson
import pytest

from infra.tenant_table import Caller, key_hash
from infra.topology import parse
from mesh.core.gossip.remote_prefixes import Origin
from schemas import exchange, subjects, wire
from schemas.residency import ground
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh, upload
from tests.support.taps import add_tap, connected
from tests.support.until import PATIENCE_S, until

TABLES = {"eu": 'residency = ["eu"]\nconfined_to = ["eu"]', "us": 'residency = ["us"]'}
KEYS = {key_hash("acme-key"): Caller(tenant="acme", residency=("us",))}
SETTINGS = {"policy": "skywalker", "peer_reply_s": 240.0} | PATIENT
HOLD_S = 1.0
SHED_SOON = {"hold_s_max": HOLD_S}


@pytest.fixture
async def regions(tmp_path):
    mesh = parse(mesh_toml(("us", "eu"), replicas=1, more=TABLES), "mesh.toml")
    running = NatsRegions(mesh, tmp_path, edit=lambda _, tree: add_tap(tree))
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def running(regions, of_us=None, **of_eu):
    """Both regions at work; `of_us` and `of_eu`: settings of their routers that differ."""
    where = regions.topology.ground
    async with scripted_engine() as near, scripted_engine() as far, small_mesh(regions) as mesh:
        await mesh.router("us", keys=KEYS, **({"ground": where} | SETTINGS | (of_us or {})))
        await mesh.router("eu", **({"ground": where} | SETTINGS | of_eu))
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        for region, peer in (("us", "eu"), ("eu", "us")):
            await mesh.until_ready(region, 1)
            await mesh.until_peer(region, peer)
        mesh.near, mesh.far = near, far
        yield mesh


async def test_labels_in_the_base_url_and_requests_without_any(regions):
    where = regions.topology.ground
    required = ground(dict(where.carried), dict(where.confined), ("us",))
    async with running(regions, of_us={"ground": required}) as mesh:
        async with client() as http:

            async def ask(base):
                url = f"{mesh.urls['us']}{base}/v1/chat/completions"
                async with http.post(url, json=chat()) as answer:
                    return answer.status, answer.headers["x-mesh-region"], await answer.text()

            assert (await ask("/labels/eu"))[:2] == (200, "eu")
            assert (await ask("/labels/us,eu"))[:2] == (200, "us")
            assert (await ask("/labels/de"))[0] == 400
            status, _, text = await ask("")
            assert status == 403
            assert "without a label (eu,us)" in text
            async with http.get(f"{mesh.urls['us']}/labels/eu/v1/models") as listed:
                assert listed.status == 200
        assert [len(mesh.near.seen), len(mesh.far.seen)] == [1, 1]


async def test_where_requests_go_and_what_they_hear(regions):
    async with running(regions) as mesh:
        spy = await connected(regions, "eu")
        work = await spy.subscribe(subjects.work("eu", "eu-0"))
        await flushed(spy)
        status, _, headers = await post(mesh, chat(), **{"x-mesh-residency": "eu", **DEBUG})
        assert (status, headers["x-mesh-region"]) == (200, "eu")
        decision = orjson.loads(headers["x-mesh-decision"])
        assert decision["residency"] == ["eu"]
        assert {one["name"]: one["why"] for one in decision["candidates"]} == {
            "eu": None,
            "us-0": "residency",
        }
        handed = await work.next_msg(timeout=PATIENCE_S)
        assert handed.headers[exchange.H_RESIDENCY] == "eu"
        await spy.close()

        status, _, headers = await post(mesh, chat())
        assert (status, headers["x-mesh-region"]) == (200, "us")
        assert (len(mesh.near.seen), len(mesh.far.seen)) == (1, 1)
        assert await refused(mesh, "us", **{"x-mesh-residency": "mars"}) == (400, "invalid_request")
        assert await refused(mesh, "us", **{"x-mesh-residency": "e u"}) == (400, "invalid_request")
        assert await refused(mesh, "eu", **{"x-mesh-residency": "us"}) == (403, "residency")
        key = {"authorization": "Bearer acme-key"}
        assert await refused(mesh, "us", **key, **{"x-mesh-residency": "eu"}) == (403, "residency")
        assert mesh.sample("us", "mesh_residency_refused_total", asker="client") == 1
        assert mesh.sample("eu", "mesh_residency_refused_total", asker="client") == 1
        assert (len(mesh.near.seen), len(mesh.far.seen)) == (1, 1)


DEBUG = {"x-mesh-debug": "1"}


async def refused(mesh, region, **headers):
    status, body, answer_headers = await post(mesh, chat(), region, **headers)
    assert "retry-after" not in answer_headers
    return status, orjson.loads(body)["error"]["code"]


async def test_carriers_that_are_away_are_waited_for_and_then_503_and_not_403(regions):
    async with running(regions, SHED_SOON, heartbeat_lost_s=2.0, heartbeat_late_s=2.0) as mesh:
        await mesh.kill_agent("eu-0")
        peer = mesh.routers["us"].core.peers.get("eu")
        await mesh.until(lambda: not peer.ready("tiny"), "us to hear that eu has nobody")
        wish = {"x-mesh-residency": "eu", **DEBUG}
        began_at = time.monotonic()
        status, body, headers = await post(mesh, chat(), **wish)
        assert time.monotonic() - began_at >= HOLD_S
        error = orjson.loads(body)["error"]
        assert (status, error["code"]) == (503, "no_replica")
        assert "no replica that carries eu serves" in error["message"]
        assert int(headers["retry-after"]) >= 1
        decision = orjson.loads(headers["x-mesh-decision"])
        assert (decision["placement"], decision["reason"]) == ("shed", error["message"])
        assert mesh.sample("us", "mesh_residency_refused_total", asker="client") == 0
        assert mesh.near.seen == []


async def test_a_key_keeps_its_tenants_prompts_where_they_may_be(regions):
    async with running(regions, SHED_SOON) as mesh:
        mesh.near.waiting = 9
        await mesh.until_ready("us", 0)
        free_key = {"authorization": "Bearer another"}
        status, _, headers = await post(mesh, chat(), **free_key)
        assert (status, headers["x-mesh-region"]) == (200, "eu")
        key = {"authorization": "Bearer acme-key", **DEBUG}
        status, body, headers = await post(mesh, chat(), **key)
        assert status == 429, body  # held for its second, and never moved
        candidates = orjson.loads(headers["x-mesh-decision"])["candidates"]
        assert {one["name"]: one["why"] for one in candidates}["eu"] == "residency"
        assert len(mesh.far.seen) == 1


async def test_a_confined_region_waits_and_does_not_leak(regions):
    async with running(regions, **SHED_SOON) as mesh:
        assert (await post(mesh, chat("for the EU alone " * 100), "eu"))[0] == 200
        mesh.far.waiting = 9
        await mesh.until_ready("eu", 0)
        status, _, _ = await post(mesh, chat(), "eu")
        assert status == 429
        assert mesh.near.seen == []
        assert (await post(mesh, chat("for us alone " * 100), "us"))[0] == 200
        told = mesh.routers["us"].core.gossip.remote
        await mesh.until(
            lambda: any(
                one.region == "us" for one in mesh.routers["eu"].core.gossip.remote.origins
            ),
            "eu to hear of us's prefixes",
        )
        assert all(origin.region != "eu" for origin in told.origins)


async def test_what_is_secret_to_peers_is_none_to_siblings_and_stays_one(regions, monkeypatch):
    """Over its own link's rules us may tell eu; what wants the label `us` it does not."""
    secret, said = chat("for us alone " * 100), chat("for everybody " * 100)
    async with running(regions) as mesh:
        where = regions.topology.ground
        first = mesh.routers["us"].core.gossip.siblings
        await mesh.until(lambda: first.sync.warm_at is not None, "r1 to be warm")
        monkeypatch.setattr("mesh.core.gossip.siblings.ALONE_S", 600.0)  # nobody else is alone
        await mesh.router("us", "r2", ground=where, keys=KEYS, **SETTINGS)
        await mesh.until_ready("us/r2", 1)
        second = mesh.routers["us/r2"].core.gossip
        await mesh.until(lambda: second.siblings.sync.warm_at is not None, "r2 to be warm")
        assert (await post(mesh, secret, "us", **{"x-mesh-residency": "us"}))[0] == 200
        [index] = second.siblings.indexes
        await mesh.until(lambda: len(index) > 0, "r2 to know what r1 placed")
        secrets = {block for block, _ in index.held("us-0")}

        assert (await post(mesh, said, "us"))[0] == 200
        await mesh.until(lambda: len(index) > len(secrets), "r2 to know of the second one")
        open_blocks = {block for block, _ in index.held("us-0")} - secrets
        heard = mesh.routers["eu"].core.gossip.remote
        await mesh.until(lambda: told_by(heard, "r1") == open_blocks, "eu to hear what is open")

        await mesh.routers["us"].close()  # r2 has to tell what r1 told, and no more
        await mesh.router("us", ground=where, keys=KEYS, **SETTINGS)
        await mesh.until(lambda: told_by(heard, "r2") == open_blocks, "eu to hear it from r2")
        first = mesh.routers["us"].core.gossip.siblings
        await mesh.until(lambda: first.sync.source == "r2", "r1 to be told everything by r2")
        [again] = first.indexes
        assert {block for block, _ in again.held("us-0")} == secrets | open_blocks
        assert (await post(mesh, chat("for later " * 100), "us"))[0] == 200
        await mesh.until(lambda: told_by(heard, "r1") != set(), "eu to hear from r1 again")
        assert not secrets & (told_by(heard, "r1") | told_by(heard, "r2"))


def told_by(heard, router):
    return set(heard.blocks(Origin("us", router)))


async def test_the_bus_stops_a_wrong_router_and_says_so(regions):
    """eu's router believes that prompts may go anywhere, and us says that it is free."""
    async with running(regions, ground=ground({}), peer_reply_s=2.0) as mesh:
        mesh.far.waiting = 9
        await mesh.until_ready("eu", 0)
        task = asyncio.create_task(post(mesh, chat(), "eu"))
        await until(lambda: regions.forbade("eu", "router", subjects.ingress("us")))
        assert mesh.sample("us", "mesh_ingress_total", origin="eu", result="placed") == 0
        mesh.far.waiting = 0  # what the bus refused is not lost: it is served at home
        status, _, headers = await task
        assert (status, headers["x-mesh-region"]) == (200, "eu")
        assert mesh.near.seen == []


async def test_a_receiving_router_looks_again(regions):
    """us's router believes that eu carries `us`; the subject can't be said, so it says another."""
    async with running(regions) as mesh:
        router = await regions.connect("us", "router", inbox_prefix="_INBOX.us")
        for labels, subject in (
            ("us", subjects.ingress("eu")),
            ("us", subjects.ingress_within("eu", "eu")),
            (None, subjects.ingress_within("eu", "eu")),
        ):
            headers = HEADERS | ({exchange.H_RESIDENCY: labels} if labels else {})
            inbox = await router.subscribe(subjects.inbox("us", "r9", "7"))
            body = orjson.dumps(chat())
            await router.publish(
                subject, body, reply=subjects.inbox("us", "r9", "7"), headers=headers
            )
            frame = exchange.unpack_frame((await inbox.next_msg(timeout=PATIENCE_S)).data)
            assert frame.kind is exchange.Frame.REFUSED
            await inbox.unsubscribe()
        assert mesh.far.seen == []
        await router.close()


HEADERS = {
    exchange.H_REQUEST: "request-1",
    exchange.H_MODEL: "tiny",
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "5000",
    exchange.H_HOPS: "1",
    exchange.H_ORIGIN: "us",
}


async def test_a_replica_whose_label_was_taken_away_refuses_what_a_router_still_sends_it(regions):
    """The router has not heard of it yet: here, one that goes by its last heartbeat."""
    async with running(regions) as mesh:
        await mesh.kill_agent("eu-0")
        await mesh.agent("eu", "eu-0", mesh.far, residency="none")
        core = mesh.routers["eu"].core
        await mesh.until(
            lambda: [one.heartbeat.residency for one in core.replicas] == [()], "its new labels"
        )
        await mesh.until_ready("eu", 1)  # it says its labels before it knows its engine
        router = await regions.connect("eu", "router", inbox_prefix="_INBOX.eu")
        answers = subjects.inbox("eu", "r9", "7")
        inbox = await router.subscribe(answers)
        headers = HEADERS | {exchange.H_RESIDENCY: "eu", exchange.H_HOPS: "0"}
        body, work = orjson.dumps(chat()), subjects.work("eu", "eu-0")
        await router.publish(work, body, reply=answers, headers=headers)
        frame = exchange.unpack_frame((await inbox.next_msg(timeout=PATIENCE_S)).data)
        assert frame.kind is exchange.Frame.REFUSED
        refused = wire.decode_as(exchange.Refused, frame.payload)
        assert (refused.reason, refused.replica) == (exchange.Refusal.RESIDENCY, "eu-0")
        assert mesh.far.seen == []
        await router.close()


async def test_a_large_body_follows_its_label(regions):
    body = chat("x" * (9 * 1024 * 1024))
    async with running(regions) as mesh, client() as session:
        url = mesh.urls["us"] + "/v1/chat/completions"
        headers = {"x-mesh-residency": "eu"}
        async with session.post(url, data=upload(body), headers=headers) as answer:
            assert (answer.status, answer.headers["x-mesh-region"]) == (200, "eu")
        assert mesh.near.seen == []
