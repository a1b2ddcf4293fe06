"""`/v1/regions`: two real regions as one of them sees both, over HTTP."""

import asyncio
from contextlib import asynccontextmanager

import jsonschema
import orjson
import pytest

from docs.openapi import document
from mesh.core.model.geo import GeoLocation
from mesh.runtime.config import RegionEntry
from schemas.ids import RegionId
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh
from tests.support.until import PATIENCE_S

ENTRIES = {
    RegionId("us"): RegionEntry("https://us.example.com/v1", GeoLocation(38.9, -77.5)),
    RegionId("eu"): RegionEntry(None, GeoLocation(50.1, 8.7)),
}


@asynccontextmanager
async def two_regions(directory, **settings):
    """us and eu, of which us has heard enough; `settings`: of both routers."""
    async with (
        nats_pair(directory, "us", "eu") as servers,
        scripted_engine() as near,
        scripted_engine("large") as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", entries=ENTRIES, **settings)
        await mesh.router("eu", entries=ENTRIES, **settings)
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready("us", 1)
        await mesh.until_peer("us", "eu", model="large")
        peer = mesh.routers["us"].core.peers.get("eu")
        await mesh.until(lambda: peer.pings.jitter_s is not None, "a second ping to come back")
        mesh.servers = servers
        yield mesh


@pytest.fixture
async def two(tmp_path):
    async with two_regions(tmp_path, **PATIENT) as mesh:
        yield mesh


@pytest.fixture
async def two_of_which_one_may_fall_silent(tmp_path):
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def regions(mesh, query="", **headers):
    """The answer of us, checked against the document."""
    async with client() as session:
        url = mesh.urls["us"] + "/v1/regions" + query
        async with session.get(url, headers=headers) as answer:
            assert (answer.status, answer.headers["x-mesh-region"]) == (200, "us")
            body = await answer.json()
    shapes = document()["components"]
    listed = {"$ref": "#/components/schemas/RegionList", "components": shapes}
    jsonschema.Draft202012Validator(listed).validate(body)
    return body["data"]


async def test_each_region_is_told_with_its_health_way_and_room(two):
    us, eu = await regions(two)
    assert [region["name"] for region in (us, eu)] == ["us", "eu"]
    assert (us["home"], us["rtt_s"], us["heard_s"]) == (True, 0.0, None)
    assert (us["health"], eu["home"]) == ("green", False)
    assert (us["models"], eu["models"]) == (["tiny"], ["large"])
    for region in (us, eu):
        assert (region["replicas_ready"], region["accepting"]) == (1, True)
        assert region["distance_km"] is region["rtt_estimate_s"] is None
    assert eu["health"] == "green" and 0.0 <= eu["heard_s"] < PATIENT["digest_late_s"]
    assert 0.0 < eu["rtt_s"] < 1.0 and eu["jitter_s"] >= 0.0 and eu["loss_ratio"] < 1.0
    assert us["endpoint"] == "https://us.example.com/v1" and eu["endpoint"] is None
    assert us["location"] == {"lat": 38.9, "lon": -77.5}


async def test_who_says_where_he_is_is_told_what_is_near(two):
    for asked in ({"query": "?near=52.5,13.4"}, {"x-mesh-client-location": "52.5,13.4"}):
        eu, us = await regions(two, **asked)
        assert (eu["name"], us["name"]) == ("eu", "us")
        assert eu["distance_km"] == pytest.approx(424, abs=10)
        assert 0.0 < eu["rtt_estimate_s"] < us["rtt_estimate_s"]


async def test_a_region_that_falls_silent_turns_red_and_green_again(
    two_of_which_one_may_fall_silent,
):
    two = two_of_which_one_may_fall_silent
    await two.servers["eu"].stop()

    async def health():
        return {region["name"]: region["health"] for region in await regions(two)}

    peers = two.routers["us"].core.peers
    await two.until(lambda: not peers.get("eu").digests, "eu to be silent for too long")
    assert await health() == {"us": "green", "eu": "red"}
    await two.servers["eu"].start()
    await two.until(lambda: bool(peers.get("eu").digests), "eu to speak again")
    async with asyncio.timeout(PATIENCE_S):
        while (await health())["eu"] not in ("green", "yellow"):
            await asyncio.sleep(0.05)
    await two.until(
        lambda: two.sample("us", "mesh_peer_ping_loss_ratio", peer="eu") > 0.0, "a ping to be lost"
    )


async def test_without_its_bus_a_region_says_so_of_itself(two):
    await two.servers["us"].stop()
    router = two.routers["us"]
    await two.until(lambda: router.requests.not_ready_because() is not None, "the bus to be missed")
    home = next(region for region in await regions(two) if region["home"])
    assert home["health"] == "red"


async def test_errors_too_say_which_region_they_are_of(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        url = await mesh.router("us", hold_s_max=0.2)
        async with client() as session:
            for method, path, body, status in (
                ("GET", "/nowhere", None, 404),
                ("DELETE", "/health", None, 405),
                ("POST", "/v1/chat/completions", b"no JSON", 400),
                ("POST", "/v1/chat/completions", orjson.dumps(chat()), 503),
                ("GET", "/ready", None, 503),
                ("GET", "/v1/regions?near=x", None, 400),
                ("GET", "/v1/regions?nera=52.5,13.4", None, 400),
            ):
                async with session.request(method, url + path, data=body) as answer:
                    assert (answer.status, answer.headers["x-mesh-region"]) == (status, "us"), path
