"""Aliases, canaries and copies, over a real server and engines of several models."""

import asyncio
import io
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import openai
import orjson
import pytest

from infra.process import end_all
from mesh.adapters.access_log import AccessLogFormat
from mesh.core.model.model_targets import ModelRule
from mesh.runtime.shadow_copies import COPIES_MAX
from schemas.exchange import LARGE_BYTES
from tests.agents.simserver.support import config, running
from tests.mesh.runtime.test_access_lines import Lines
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import event, fail, hang, say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh
from tests.support.until import PATIENCE_S

STABLE, CANARY, COPY = "org/stable-v1.0", "org/canary-v1.1", "org/next"
ALIAS = ModelRule(name="chat", to=((STABLE, 1.0),))
SPLIT = ModelRule(name="split", to=((STABLE, 0.7), (CANARY, 0.3)))
SHADOWED = ModelRule(name="tried", to=((STABLE, 1.0),), shadow=((COPY, 1.0),))
RULES = (ALIAS, SPLIT, SHADOWED)


@asynccontextmanager
async def simulated(nats_server, *models, rules=RULES, **settings):
    """A router, and for each model a replica of its own with a simulated engine."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        await mesh.router("us", models=rules, **settings)
        for number, model in enumerate(models):
            engine = await stack.enter_async_context(running(config(models=(model,))))
            await mesh.agent("us", f"us-{number}", engine)
        for model in dict.fromkeys(models):
            await mesh.until_ready_of("us", model, models.count(model))
        yield mesh


@asynccontextmanager
async def scripted(nats_server, *models, rules=RULES, **settings):
    """The same with scripted engines, by their models."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        await mesh.router("us", models=rules, **settings)
        engines = {}
        for number, model in enumerate(models):
            engine = engines[model] = await stack.enter_async_context(scripted_engine(model))
            engine.behaviour = say(model)
            await mesh.agent("us", f"us-{number}", engine)
        for model in models:
            await mesh.until_ready_of("us", model, 1)
        yield mesh, engines


def official(mesh):
    return openai.AsyncOpenAI(base_url=mesh.urls["us"] + "/v1", api_key="none", max_retries=0)


async def served(api, model, session, text="hi"):
    """The model that answered one request of that conversation."""
    answer = await api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=2,
        extra_headers={"x-mesh-session": session},
    )
    return answer.model


async def test_an_alias_is_served_listed_and_counted_by_both_names(nats_server):
    async with simulated(nats_server, STABLE) as mesh, official(mesh) as api:
        assert await served(api, "chat", "a") == STABLE
        listed = {model.id: model for model in (await api.models.list()).data}
        assert set(listed) == {STABLE, "chat", "split", "tried"}
        assert listed["chat"].root == STABLE
        assert listed["chat"].max_model_len == listed[STABLE].max_model_len
        assert (await api.models.retrieve("chat")).id == "chat"
        mapped = {"asked": "chat", "model": STABLE}
        assert mesh.sample("us", "mesh_requests_mapped_total", **mapped) == 1
        assert mesh.sample("us", "mesh_requests_total", model=STABLE) == 1
        [ended] = mesh.routers["us"].requests.ended.recent(9).requests
        assert (ended.model, ended.asked_model) == (STABLE, "chat")


async def test_a_canary_has_its_share_of_conversations_and_each_keeps_its_model(nats_server):
    async with simulated(nats_server, STABLE, CANARY) as mesh, official(mesh) as api:
        names = [f"session-{number}" for number in range(50)]
        first = [await served(api, "split", name) for name in names]
        assert 7 <= first.count(CANARY) <= 23
        again = [await served(api, "split", name, "another turn") for name in reversed(names)]
        assert again == first[::-1]


async def test_conversations_of_a_canary_that_dies_go_to_the_others_without_an_error(nats_server):
    async with simulated(nats_server, STABLE, CANARY) as mesh, official(mesh) as api:
        names = [f"session-{number}" for number in range(40)]
        first = {name: await served(api, "split", name) for name in names}
        assert CANARY in first.values()

        async def goes_on(name):
            return [await served(api, "split", name) for _ in range(3)]

        clients = [asyncio.create_task(goes_on(name)) for name in names]
        await asyncio.sleep(0)
        await mesh.kill_agent("us-1")
        for name, models in zip(names, await asyncio.gather(*clients), strict=True):
            assert first[name] == CANARY or set(models) == {STABLE}
            assert models[-1] == STABLE
        assert mesh.sample("us", "mesh_requests_total", outcome="ok") == 40 * 4
        listed = {model.id for model in (await api.models.list()).data}
        assert listed == {STABLE, "chat", "split", "tried"}


async def test_the_model_alone_is_replaced_in_bodies_small_and_large(nats_server):
    async with scripted(nats_server, STABLE) as (mesh, engines), client() as session:
        seen, url = engines[STABLE].seen, mesh.urls["us"] + "/v1/chat/completions"
        for size in (1, LARGE_BYTES + 1):
            body = chat("x" * size, tools=[{"model": "inner"}]) | {"model": "chat"}
            assert (await post(mesh, body))[0] == 200
            assert seen.pop() == body | {"model": STABLE}
        for twice in (b"", b"x" * LARGE_BYTES):
            text = b'{"model":"chat","messages":[{"role":"user","content":"%b"}],"model":"chat"}'
            async with session.post(url, data=io.BytesIO(text % twice)) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["param"] == "model"
        assert seen == []


async def test_a_form_names_the_model_that_serves(nats_server):
    path = "/v1/audio/transcriptions"
    async with simulated(nats_server, STABLE) as mesh, client() as session:
        await mesh.until(lambda: mesh.routers["us"].core.knows(f"{STABLE} on {path}"), "the path")
        for size in (9, LARGE_BYTES + 9):
            for model, status in (("chat", 200), (STABLE, 200), ("nowhere", 404)):
                form = aiohttp.FormData()
                form.add_field("file", b"\r\n--" * (size // 4), filename="a.wav")
                form.add_field("model", model)
                async with session.post(mesh.urls["us"] + path, data=form) as answer:
                    assert answer.status == status, await answer.text()


async def test_a_router_that_has_just_started_waits_for_models_that_it_may_hear_of(nats_server):
    engines = scripted_engine(), scripted_engine("other")
    async with engines[0] as first, engines[1] as second, small_mesh({"us": nats_server}) as mesh:
        mesh.listens_s = PATIENCE_S
        await mesh.router("us")
        await mesh.agent("us", "us-0", first)
        await mesh.until_ready("us", 1)
        kept = mesh.routers["us"].requests.bodies
        async with official(mesh) as api:
            leaves = asyncio.create_task(served(api, "third", "a"))
            await mesh.until(lambda: kept.taken_bytes > 0, "a request that waits")
            await end_all([leaves])
            await mesh.until(lambda: kept.taken_bytes == 0, "its room to be free again")
            asked = asyncio.create_task(served(api, second.model, "a"))
            await served(api, first.model, "a")
            await mesh.agent("us", "us-1", second)
            await asked
            assert (len(first.seen), len(second.seen)) == (1, 1)


async def test_an_unknown_model_is_answered_with_those_that_are_there(nats_server):
    gone = ModelRule(name="gone", to=(("org/never", 1.0),))
    async with simulated(nats_server, STABLE, rules=(*RULES, gone)) as mesh, official(mesh) as api:
        for name in ("org/stable-v1", "gone"):
            with pytest.raises(openai.NotFoundError) as caught:
                await served(api, name, "a")
            assert caught.value.code == "model_not_found"
            assert STABLE in caught.value.message and "gone," not in caught.value.message
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("gone")
        body = orjson.dumps({"model": "nowhere", "max_tokens": 1, "messages": chat()["messages"]})
        url = mesh.urls["us"] + "/v1/messages"
        async with client() as session, session.post(url, data=body) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["type"] == "not_found_error"


async def test_a_models_objective_is_for_requests_that_name_none(nats_server):
    rule = ModelRule(name="chat", to=((STABLE, 1.0),), slo_ttft_s=0.25)
    own = ModelRule(name=STABLE, slo_ttft_s=7.0)
    async with scripted(nats_server, STABLE, rules=(rule, own)) as (mesh, _):
        found = []
        router = mesh.routers["us"]
        admit = router.requests.session.admit
        router.requests.session.admit = lambda record: (
            found.append(record.request.slo_ttft_s),
            admit(record),
        )
        await post(mesh, chat() | {"model": "chat"})
        await post(mesh, chat() | {"model": "chat"}, **{"x-mesh-slo-ttft-ms": "9000"})
        await post(mesh, chat() | {"model": STABLE})
        assert found == [0.25, 9.0, 7.0]


async def copies_ended(mesh, count, **labels):
    name = "mesh_shadow_copies_total"
    await mesh.until(lambda: mesh.sample("us", name, **labels) == count, f"{count} copies")


async def test_a_copy_reaches_its_model_and_its_answer_nobody(nats_server):
    async with scripted(nats_server, STABLE, COPY) as (mesh, engines):
        for stream in (False, True):
            body = chat("hello", stream=stream) | {"model": "tried"}
            status, answer, _ = await post(mesh, body)
            assert status == 200 and STABLE.encode() in answer and COPY.encode() not in answer
        await copies_ended(mesh, 2, model=COPY, outcome="ok")
        assert [one["model"] for one in engines[COPY].seen] == [COPY, COPY]
        assert mesh.sample("us", "mesh_requests_total") == 2
        assert mesh.sample("us", "mesh_placements_total") == 2
        assert mesh.sample("us", "mesh_prompt_tokens_total", model=COPY) == 0
        assert mesh.routers["us"].requests.bodies.taken_bytes == 0


async def test_a_copy_that_hangs_fails_or_finds_no_room_concerns_no_client(nats_server):
    async with scripted(nats_server, STABLE, COPY) as (mesh, engines):
        gate = asyncio.Event()
        engines[COPY].behaviour = fail(500)
        body = chat(stream=True) | {"model": "tried"}
        assert (await post(mesh, body))[0] == 200
        await copies_ended(mesh, 1, outcome="failed")
        engines[COPY].behaviour = hang(event("first"), gate)
        for _ in range(COPIES_MAX + 3):
            assert (await post(mesh, body))[0] == 200
        assert mesh.sample("us", "mesh_shadow_copies_total", outcome="skipped") >= 3
        assert mesh.sample("us", "mesh_requests_total", outcome="ok") == COPIES_MAX + 4
        assert mesh.sample("us", "mesh_attempt_failures_total") == 0
        await engines[COPY].stop()
        await mesh.until(lambda: not mesh.routers["us"].requests.open_requests, "the copies' end")
        assert mesh.routers["us"].requests.bodies.taken_bytes == 0


async def test_copies_hold_up_no_shutdown(nats_server):
    async with scripted(nats_server, STABLE, COPY) as (mesh, engines):
        engines[COPY].behaviour = hang(event("first"))
        assert (await post(mesh, chat(stream=True) | {"model": "tried"}))[0] == 200
        await asyncio.wait_for(engines[COPY].arrived.wait(), 20.0)
        router = mesh.routers["us"]
        await asyncio.wait_for(router.drain(), 4.0)
        assert mesh.sample("us", "mesh_shadow_copies_total", outcome="cancelled") == 1
        await asyncio.wait_for(engines[COPY].hung_up.wait(), 20.0)


async def test_the_access_log_names_what_was_asked_for_and_copies(nats_server, capfd):
    style = AccessLogFormat.LOGFMT
    async with scripted(nats_server, STABLE, COPY, access_log=style) as (mesh, _):
        lines = Lines(capfd)
        assert (await post(mesh, chat() | {"model": "tried"}, **{"x-request-id": "q-1"}))[0] == 200
        line = await lines.of(id="q-1")
        assert (line["model"], line["asked_model"], line.get("shadow")) == (STABLE, "tried", None)
        copy = await lines.of(id="q-1:copy")
        assert (copy["model"], copy["asked_model"], copy["shadow"]) == (COPY, "tried", "1")
        assert (copy["outcome"], copy["status"], copy["replica"]) == ("ok", "200", "us-1")


async def test_a_mapped_request_is_forwarded_with_the_model_that_serves_it(tmp_path):
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        scripted_engine(STABLE) as far,
        scripted_engine("else") as near,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", models=RULES, peer_reply_s=240.0, **PATIENT)
        await mesh.router("eu", **PATIENT)  # it knows no alias
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready_of("eu", STABLE, 1)
        await mesh.until_peer("us", "eu", STABLE)
        for size in (1, LARGE_BYTES + 1):
            body = chat("x" * size) | {"model": "chat"}
            status, _, headers = await post(mesh, body)
            assert (status, headers["x-mesh-region"]) == (200, "eu")
            assert far.seen.pop() == body | {"model": STABLE}


async def test_a_response_goes_on_with_the_model_that_made_it(nats_server):
    async with simulated(nats_server, STABLE, CANARY) as mesh, official(mesh) as api:
        core, path = mesh.routers["us"].core, "/v1/responses"
        for model in (STABLE, CANARY):
            name = f"{model} on {path}"
            await mesh.until(lambda name=name: core.knows(name), "the path")
        made, number = set(), 0
        while made != {STABLE, CANARY}:  # three in ten are the canary's
            number += 1
            first = await api.responses.create(
                model="split", input=f"story {number}", max_output_tokens=3
            )
            second = await api.responses.create(
                model="split", input="go on", previous_response_id=first.id, max_output_tokens=3
            )
            assert second.model == first.model
            made.add(first.model)
