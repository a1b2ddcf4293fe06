"""A tenant floods one of three regions: what its peers hold for their tenants' sake stays there."""

import asyncio

import orjson
import pytest

from infra.tenant_table import Caller, key_hash
from mesh.core.lifecycle import ends
from mesh.core.policies.base import PREFILL_S_PER_TOKEN
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

REGIONS = ("us", "eu", "ap")
TENANTS = ("acme", "beta")
KEYS = {key_hash(f"sk-{tenant}"): Caller(tenant=tenant) for tenant in TENANTS}
TOKEN_BYTES = 4  # as routers reckon


@pytest.fixture
def servers(tmp_path):
    with running_regions(tmp_path, toml=mesh_toml(REGIONS, replicas=1)) as made:
        yield made


@pytest.fixture
def handed_back(monkeypatch):
    """Of each request that was: whether its tenant had had more than others there."""
    found, hand_back = [], ends.refuse_as_elsewhere

    def spied(state, record, now):
        request = record.request
        shares = state.shares.get(request.model)
        found.append(shares is not None and shares.is_behind_others(request.tenant, now))
        hand_back(state, record, now)

    monkeypatch.setattr(ends, "refuse_as_elsewhere", spied)
    return found


def one_at_a_time(engine) -> None:
    """It computes one prompt after the other, as fast as routers believe."""
    free, answer = asyncio.Lock(), say("hello")

    async def behaviour(request, body):
        engine.waiting += 1
        async with free:
            engine.waiting, engine.running = engine.waiting - 1, 1
            tokens = len(body["messages"][0]["content"]) / TOKEN_BYTES
            await asyncio.sleep(tokens * PREFILL_S_PER_TOKEN)
            engine.running = 0
        return await answer(request, body)

    engine.behaviour = behaviour


async def test_no_request_goes_back_and_forth(servers, handed_back):
    async with (
        scripted_engine() as us,
        scripted_engine() as eu,
        scripted_engine() as ap,
        small_mesh(servers) as mesh,
    ):
        for region, engine in zip(REGIONS, (us, eu, ap), strict=True):
            one_at_a_time(engine)
            await mesh.router(region, keys=KEYS, **PATIENT)
            await mesh.agent(region, f"{region}-0", engine)
        for region in REGIONS:
            await mesh.until_ready(region, 1)
            for peer in REGIONS:
                if peer != region:
                    await mesh.until_peer(region, peer)
        attempts, places = [], []

        async def client(tenant, region, number, words):
            headers = {"authorization": f"Bearer sk-{tenant}", "x-mesh-debug": "1"}
            for turn in range(4):
                text = f"{tenant} {region} {number} {turn} " * words
                status, _, told = await post(mesh, chat(text, stream=True), region, **headers)
                assert status == 200
                receipt = orjson.loads(told["x-mesh-decision"])
                attempts.append(receipt["attempt"])
                places.append((tenant, receipt["placement"]))

        async with asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(client("acme", "us", number, 250))
            for region in REGIONS:
                for number in range(4):
                    group.create_task(client("beta", region, number, 120))
        print(f"attempts of {len(attempts)}: {sum(attempts)}, most of one: {max(attempts)}")
        assert ("acme", "peer") in places
        assert not any(handed_back)
        assert sum(attempts) <= 2 * len(attempts)
