"""Calls about a response: they go to the replica that keeps it, from any region, or are a 404."""

import aiohttp
import openai
import pytest

from infra.bus import BusAddress, connect
from infra.tenant_table import Caller, key_hash
from mesh.adapters.operator_orders import ORDERS
from mesh.core.model.served_names import kept_name
from schemas.control import RegionControl
from schemas.response_calls import QUERY_CHARS_MAX, RESPONSE, RESPONSE_CANCEL
from schemas.response_ids import CHARS_MAX, place_of, response_id
from tests.mesh.runtime.test_kept_responses import ON_PATH, engines, said, sdk
from tests.support.nats_pair import nats_pair
from tests.support.small_mesh import PATIENT, small_mesh

NEVER_MADE = response_id("us", "us-0", bytes(16))


async def test_a_response_is_fetched_listed_and_deleted_where_it_is_kept(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        await mesh.router("us", "r2", **PATIENT)
        async with engines(mesh, "us", 3), sdk(mesh) as api, sdk(mesh, "us/r2") as other:
            for text in ("one", "two", "three"):
                first = await said(api, text, temperature=0)
                second = await said(api, "go on", previous_response_id=first.id)
                for kept in (first, second):
                    assert await other.responses.retrieve(kept.id) == kept
                items = [item async for item in other.responses.input_items.list(first.id)]
                assert [item.content[0].text for item in items] == [text]
                with pytest.raises(openai.BadRequestError, match="synchronous"):
                    await other.responses.cancel(first.id)
                await other.responses.delete(first.id)
                with pytest.raises(openai.NotFoundError, match="not found"):  # the engine's word
                    await api.responses.retrieve(first.id)
                assert await other.responses.retrieve(second.id) == second


async def test_lists_have_the_clients_query(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh) as api:
            texts = ["a", "b", "c", "d"]
            given = [{"role": "user", "content": text} for text in texts]
            answer = await api.responses.create(model="tiny", input=given, max_output_tokens=3)
            listing = api.responses.input_items.list
            page = await listing(
                answer.id, order="asc", limit=3, include=["reasoning.encrypted_content"]
            )
            assert [item.content[0].text for item in page.data] == texts[:3]
            rest = await listing(answer.id, order="asc", after=page.data[-1].id)
            assert [item.content[0].text for item in rest.data] == texts[3:]
            kept = await api.responses.retrieve(answer.id, stream=False)
            assert kept == answer


async def test_from_another_region_it_goes_to_the_keepers_replica(tmp_path):
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, **PATIENT)
        async with engines(mesh, "us", 3), engines(mesh, "eu", 1):
            await mesh.until_peer("eu", "us", ON_PATH)
            async with sdk(mesh) as near, sdk(mesh, "eu") as far:
                for text in ("one", "two", "three"):
                    answer = await said(near, text)
                    raw = await far.responses.with_raw_response.retrieve(answer.id)
                    assert raw.headers["x-mesh-region"] == "us"
                    assert raw.parse() == answer
                    items = [item async for item in far.responses.input_items.list(answer.id)]
                    assert len(items) == 1
                    await far.responses.delete(answer.id)
                    with pytest.raises(openai.NotFoundError):
                        await near.responses.retrieve(answer.id)


async def test_what_a_drained_replica_keeps_is_refused_at_once(tmp_path):
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, **PATIENT)
        async with engines(mesh, "us", 2), sdk(mesh) as near, sdk(mesh, "eu") as far:
            await mesh.until_peer("eu", "us", ON_PATH)
            answer = await said(near, "hello")
            keeper = place_of(answer.id).replica
            await ordered(servers["us"], drained=(keeper,))
            replicas = mesh.routers["us"].core.replicas
            await mesh.until(lambda: replicas.drains(kept_name("us", keeper)), "the drain")
            for api in (near, far):
                for call in (
                    lambda api=api: api.responses.retrieve(answer.id),
                    lambda api=api: said(api, "go on", previous_response_id=answer.id),
                ):
                    with pytest.raises(openai.InternalServerError, match="drained") as refused:
                        await call()
                    assert (refused.value.status_code, refused.value.code) == (503, "no_replica")
            await ordered(servers["us"])
            await mesh.until(lambda: not replicas.drains(kept_name("us", keeper)), "the undrain")
            assert await near.responses.retrieve(answer.id) == answer


async def ordered(server, **orders):
    """What an operator orders in us."""
    admin = await connect(BusAddress(server.url), name="test", inbox_prefix="_INBOX")
    try:
        await ORDERS.change(admin, "us", lambda known: RegionControl(region="us", **orders))
    finally:
        await admin.close()


async def test_only_the_tenant_of_a_response_reads_it(tmp_path):
    keys = {key_hash(f"sk-{tenant}"): Caller(tenant=tenant) for tenant in ("acme", "zeta")}
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, keys=keys, **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh, "us", "sk-acme") as acme:
            await mesh.until_peer("eu", "us", ON_PATH)
            answer = await said(acme, "hello")
            for region in ("us", "eu"):
                for key in ("sk-zeta", "sk-unlisted"):
                    async with sdk(mesh, region, key) as other:
                        about = other.responses
                        for call in (about.retrieve, about.delete, about.cancel):
                            with pytest.raises(openai.NotFoundError) as refused:
                                await call(answer.id)
                            assert refused.value.code == "response_not_found"
                async with sdk(mesh, region, "sk-acme") as again:
                    assert await again.responses.retrieve(answer.id) == answer


async def test_what_nobody_keeps_is_a_404_that_says_so(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh) as api:
            with pytest.raises(openai.NotFoundError, match="not found"):
                await api.responses.retrieve(NEVER_MADE)  # the engine's word
            gone = response_id("us", "us-9", bytes(16))
            with pytest.raises(openai.NotFoundError, match="us-9 of us, which kept") as refused:
                await api.responses.retrieve(gone)
            assert refused.value.body["param"] == "response_id"
            assert len(NEVER_MADE) < CHARS_MAX
            for unknown in ("resp_mine", "resp_" + "x" * 5000, "é\x00", NEVER_MADE + "0"):
                with pytest.raises(openai.NotFoundError, match="keeps a response of that id"):
                    await api.responses.retrieve(unknown)
        assert mesh.routers["us"].requests.open_requests == 0


async def test_whose_keeper_is_gone_is_a_404_in_every_region(tmp_path):
    async with nats_pair(tmp_path, "eu", "us") as servers, small_mesh(servers) as mesh:
        for region in ("eu", "us"):
            await mesh.router(region, hold_s_max=30.0)
        async with engines(mesh, "us", 2):
            await mesh.until_peer("eu", "us", ON_PATH)
            async with sdk(mesh) as near, sdk(mesh, "eu") as far:
                answer = await said(near, "hello")
                keeper = place_of(answer.id).replica
                await mesh.kill_agent(keeper)
                gone = kept_name("us", keeper)
                core = mesh.routers["us"].core
                await mesh.until(lambda: not core.is_served(gone), "the keeper to be forgotten")
                for api in (near, far):
                    with pytest.raises(openai.NotFoundError, match="is gone") as refused:
                        await api.responses.retrieve(answer.id)
                    assert refused.value.code == "response_not_found"
                    with pytest.raises(openai.BadRequestError, match="is gone") as refused:
                        await said(api, "go on", previous_response_id=answer.id)
                    assert refused.value.code == "previous_response_not_found"


async def test_a_router_that_knows_no_replica_calls_nothing_gone(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with sdk(mesh) as api:
            with pytest.raises(openai.InternalServerError) as refused:
                await api.responses.retrieve(NEVER_MADE)
            assert (refused.value.status_code, refused.value.code) == (503, "no_replica")
            with pytest.raises(openai.InternalServerError) as refused:
                await said(api, "go on", previous_response_id=NEVER_MADE)
            assert (refused.value.status_code, refused.value.code) == (503, "no_replica")


async def test_logs_name_the_call_and_neither_its_response_nor_tokens(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh) as api:
            answer = await said(api, "hello")
            await api.responses.retrieve(answer.id)
            await api.responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.cancel(answer.id)
            ended = mesh.routers["us"].requests.ended
            await mesh.until(lambda: len(ended.recent(9).requests) == 4, "all to be logged")
            first, *calls = ended.recent(9).requests
            assert [(each.method, each.route, each.status) for each in calls] == [
                ("GET", RESPONSE, 200),
                ("DELETE", RESPONSE, 200),
                ("POST", RESPONSE_CANCEL, 404),
            ]
            assert first.output_tokens
            assert all(each.output_tokens is each.prompt_tokens is None for each in calls)
            assert all(each.served_by_replica == "us-0" for each in calls)
            assert answer.id not in repr(calls)


async def test_calls_that_are_not_served_are_refused_before_they_are_placed(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        async with engines(mesh, "us", 1), sdk(mesh) as api:
            answer = await said(api, "hello")
            for more in ({"stream": True}, {"stream": True, "starting_after": 3}):
                with pytest.raises(openai.BadRequestError, match="not streamed again"):
                    await api.responses.retrieve(answer.id, **more)
            path = f"{mesh.urls['us']}/v1/responses/{answer.id}"
            async with aiohttp.ClientSession() as http:
                for method, url, status in (
                    ("GET", f"{path}?include={'x' * (QUERY_CHARS_MAX - 8)}", 200),
                    ("GET", f"{path}?include={'x' * (QUERY_CHARS_MAX - 7)}", 400),
                    ("GET", f"{path}/", 200),
                    ("HEAD", path, 405),
                    ("POST", path, 405),
                    ("GET", f"{path}/cancel", 405),
                    ("DELETE", f"{path}/input_items", 405),
                    ("GET", f"{path}/other", 404),
                    ("GET", f"{path}/../../metrics", 404),
                    ("GET", f"{path}%2Fcancel", 405),
                ):
                    async with http.request(method, url) as got:
                        assert got.status == status, (method, url, await got.text())
                # A body is not read, and does not become the connection's next request.
                async with http.post(f"{path}/cancel", data=b"x" * 300_000) as got:
                    assert got.status == 400 and b"synchronous" in await got.read()
                    assert got.headers["connection"] == "close"
                async with http.get(path) as got:
                    assert (await got.json())["id"] == answer.id
