"""Tenants of real routers: each finds its own prompts again, and nobody finds another's."""

import orjson

from infra.tenant_table import Caller, key_hash
from mesh.core.model.prompt import PromptText
from tests.mesh.core import build
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, one_replica, post, small_mesh

KEYS = {
    key_hash("sk-a"): Caller(tenant="acme"),
    key_hash("sk-a2"): Caller(tenant="acme"),
    key_hash("sk-b"): Caller(tenant="beta"),
}
PROMPT = "What does the contract with Initech say? " * 60


async def receipt(mesh, key=None, text=PROMPT):
    """Of a request with that key; its candidates."""
    headers = {"x-mesh-debug": "1"} | ({"authorization": f"Bearer {key}"} if key else {})
    status, _, told = await post(mesh, chat(text), **headers)
    assert status == 200
    return orjson.loads(told["x-mesh-decision"])


async def matched(mesh, key=None, text=PROMPT):
    [candidate] = (await receipt(mesh, key, text))["candidates"]
    return candidate["matched_tokens"]


async def test_a_match_is_shown_to_the_tenant_whose_prompt_it_was_alone(nats_server):
    async with one_replica(nats_server, keys=KEYS, **PATIENT) as mesh:
        assert await matched(mesh, "sk-a") == 0
        assert await matched(mesh, "sk-a") > 100
        assert await matched(mesh, "sk-a2") > 100, "another key of the same tenant"
        assert await matched(mesh, "sk-b") == 0
        assert await matched(mesh, "sk-b") > 100, "its own by now"
        for key in (None, "sk-unknown"):
            for _ in range(2):
                told = await receipt(mesh, key)
                [candidate] = told["candidates"]
                assert (candidate["matched_tokens"], candidate["seconds"]) == (None, None)
                assert (candidate["terms"], told["replica"]) == ({}, "us-0")
                assert " s" not in told["reason"].replace(" shown", "")
        for tenant, asked in (("acme", 3), ("beta", 2), ("", 4)):
            assert mesh.sample("us", "mesh_requests_total", outcome="ok", tenant=tenant) == asked


async def test_where_no_keys_are_listed_everybody_is_one_tenant(nats_server):
    async with one_replica(nats_server, **PATIENT) as mesh:
        assert await matched(mesh, "sk-a") == 0
        assert await matched(mesh) > 100


async def test_a_tenant_finds_its_prompts_in_another_region(tmp_path):
    """Its router asks a peer, which reckons the same hashes without having seen the key."""
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        scripted_engine() as engine,
        small_mesh(servers) as mesh,
    ):
        for region in ("us", "eu"):
            await mesh.router(region, keys=KEYS, **PATIENT)
        await mesh.agent("eu", "eu-0", engine)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("us", "eu")
        first = await receipt(mesh, "sk-a")
        assert first["peer"] == "eu"
        placer, prompts = mesh.routers["eu"].core.state.placer, mesh.routers["us"].requests._prompts
        text = PromptText(b"\x00user\x00" + PROMPT.encode())
        for tenant, holds in (("acme", True), ("beta", False), ("", False)):
            asked = build.request(1, prompt=prompts.read("tiny", text, "", tenant), model="tiny")
            assert (placer.hit_ratio(asked) > 0.5) is holds, tenant
