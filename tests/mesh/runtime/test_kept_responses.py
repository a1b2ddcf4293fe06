"""Responses that go on with one that an engine keeps: they go where it is, or are refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import openai
import pytest

from infra.tenant_table import Caller, key_hash
from mesh.core.model.served_names import is_keeper_name
from schemas.http import RESPONSES
from schemas.response_ids import place_of, response_id
from tests.agents.simserver.support import config, running
from tests.support.nats_pair import nats_pair
from tests.support.small_mesh import PATIENT, SmallMesh, small_mesh

ON_PATH = f"tiny on {RESPONSES}"


@contextlib.asynccontextmanager
async def sdk(
    mesh: SmallMesh, place: str = "us", key: str = "sk-r"
) -> AsyncIterator[openai.AsyncOpenAI]:
    url = mesh.urls[place] + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
        yield api


@contextlib.asynccontextmanager
async def engines(mesh: SmallMesh, region: str, number: int) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for each in range(number):
            engine = await stack.enter_async_context(running(config(models=("tiny",))))
            await mesh.agent(region, f"{region}-{each}", engine)
        await mesh.until_ready(region, number, ON_PATH)
        yield


def keeper_of(name: str) -> tuple[str, str] | None:
    place = place_of(name)
    return None if place is None else (place.region, place.replica)


async def said(api: openai.AsyncOpenAI, text: str, **more):
    return await api.responses.create(model="tiny", input=text, max_output_tokens=5, **more)


async def test_a_conversation_goes_on_where_it_is_kept(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        await mesh.router("us", "r2", **PATIENT)
        async with engines(mesh, "us", 3), sdk(mesh) as api, sdk(mesh, "us/r2") as other:
            first = await asyncio.gather(*[said(api, f"number {each}") for each in range(9)])
            keepers = {keeper_of(each.id) for each in first}
            assert None not in keepers
            assert len(keepers) > 1, "more than one replica answers"
            for each in first:
                # By the other router, which has seen none of them; and once more, streamed.
                second = await said(other, "go on", previous_response_id=each.id)
                assert keeper_of(second.id) == keeper_of(each.id)
                assert second.usage.input_tokens > each.usage.input_tokens
                stream = await said(api, "and on", previous_response_id=second.id, stream=True)
                events = [event async for event in stream]
                third = events[-1].response
                assert keeper_of(third.id) == keeper_of(each.id)
                assert third.usage.input_tokens > second.usage.input_tokens
        core = mesh.routers["us"].core
        assert not any(map(is_keeper_name, core.state.models._seen_at))


async def test_what_is_not_stored_is_the_engines_404(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh) as api:
            answer = await said(api, "hello", store=False)
            with pytest.raises(openai.NotFoundError, match="not found"):
                await said(api, "go on", previous_response_id=answer.id)
            own = await said(api, "hello", extra_body={"request_id": "resp_mine"})
            assert own.id == "resp_mine", "the client's own id holds"
            with pytest.raises(openai.BadRequestError, match="this mesh's own ids"):
                await said(api, "hello", extra_body={"request_id": answer.id})


async def test_only_the_tenant_of_a_response_goes_on_with_it(tmp_path):
    keys = {key_hash(f"sk-{tenant}"): Caller(tenant=tenant) for tenant in ("acme", "zeta")}
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, keys=keys, **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh, "us", "sk-acme") as acme:
            await mesh.until_peer("eu", "us", ON_PATH)
            answer = await said(acme, "hello")
            for region in ("us", "eu"):  # the response of a forwarded request is its tenant's too
                for key in ("sk-zeta", "sk-unlisted"):
                    async with sdk(mesh, region, key) as other:
                        with pytest.raises(openai.BadRequestError) as refused:
                            await said(other, "go on", previous_response_id=answer.id)
                        assert refused.value.code == "previous_response_not_found"
                async with sdk(mesh, region, "sk-acme") as again:
                    answer = await said(again, "go on", previous_response_id=answer.id)
            place = place_of(answer.id)
            forged = response_id(place.region, place.replica, bytes.fromhex(place.secret), "zeta")
            async with sdk(mesh, "us", "sk-zeta") as other:
                with pytest.raises(openai.NotFoundError):  # the engine's word: it has no such id
                    await said(other, "go on", previous_response_id=forged)


async def test_from_another_region_it_goes_to_the_keepers_region_and_replica(tmp_path):
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, **PATIENT)
        async with engines(mesh, "us", 3), engines(mesh, "eu", 1):
            await mesh.until_peer("eu", "us", ON_PATH)
            async with sdk(mesh) as near, sdk(mesh, "eu") as far:
                for text in ("one", "two", "three"):
                    answer = await said(near, text)
                    assert keeper_of(answer.id)[0] == "us"
                    for _ in range(2):
                        more = await said(far, "go on", previous_response_id=answer.id)
                        assert keeper_of(more.id) == keeper_of(answer.id)
