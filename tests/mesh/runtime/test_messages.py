"""`/v1/messages` from Anthropic's client to simulated and scripted engines."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator

import anthropic
import orjson
import pytest
from aiohttp import web

from schemas.http import COUNT_TOKENS, MESSAGES
from tests.agents.simserver.support import config, running
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import SmallMesh, chat, client, post, small_mesh

ON_PATH = f"tiny on {MESSAGES}"
HELLO = [{"role": "user", "content": "hello there"}]
LONG = "a long conversation about rivers and mills " * 60


@pytest.fixture
async def simulated(nats_server) -> AsyncIterator[SmallMesh]:
    """us, with one simulated engine."""
    engine_config = config(models=("tiny",))
    async with running(engine_config) as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, ON_PATH)
        await mesh.until_ready("us", 1, f"tiny on {COUNT_TOKENS}")
        yield mesh


@pytest.fixture
async def scripted(nats_server) -> AsyncIterator[tuple[SmallMesh, dict]]:
    """us, with one scripted engine that has the path, and what it answers there."""
    script: dict = {"status": 200, "events": None}

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response({"type": "message"}, status=script["status"])
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for part in script["events"]:
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                await stream.write(part)
        return stream

    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.on_path[MESSAGES] = answer
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, ON_PATH)
        yield mesh, script


@contextlib.asynccontextmanager
async def sdk(mesh: SmallMesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = mesh.urls["us"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-m", max_retries=0) as api:
        yield api


def asked(**fields) -> dict:
    return {"model": "tiny", "max_tokens": 5, "messages": HELLO} | fields


async def sent(mesh: SmallMesh, body: object, path: str = MESSAGES) -> tuple[int, dict]:
    data = io.BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
    async with client() as session, session.post(mesh.urls["us"] + path, data=data) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_the_official_client_gets_a_message_whole_and_streamed(simulated):
    async with sdk(simulated) as api:
        whole = await api.messages.create(**asked(system="be brief"))
        async with api.messages.stream(**asked(system="be brief")) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await api.messages.count_tokens(model="tiny", system="be brief", messages=HELLO)
    assert whole.content[0].text == "".join(texts) == streamed.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens, len(texts)) == ("max_tokens", 5, 5)
    read = (whole.usage, streamed.usage)
    assert {each.input_tokens + each.cache_read_input_tokens for each in read} == {
        counted.input_tokens
    }
    prompts = simulated.sample("us", "mesh_prompt_tokens_total")
    assert prompts == 2 * counted.input_tokens
    assert simulated.sample("us", "mesh_request_ttft_seconds_count", served="local") == 1
    assert not simulated.routers["us"].core.inflight


async def test_a_chat_and_a_message_of_the_same_words_are_one_prefix(simulated):
    assert (await post(simulated, chat(LONG)))[0] == 200
    index = simulated.routers["us"].core.state.placer.index
    assert index is not None
    of_chat = index.blocks("us-0")
    assert of_chat > 8
    same = asked(messages=[{"role": "user", "content": [{"type": "text", "text": LONG}]}])
    assert (await sent(simulated, same))[0] == 200
    assert index.blocks("us-0") == of_chat


async def test_counting_leaves_no_prefix(simulated):
    assert (await sent(simulated, asked(system=LONG), COUNT_TOKENS))[0] == 200
    index = simulated.routers["us"].core.state.placer.index
    assert index is not None
    assert index.blocks("us-0") == 0


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        (b"no json", 400, "invalid_request_error", "not JSON"),
        (asked(messages=[]), 400, "invalid_request_error", "messages"),
        (asked(messages=["hi"]), 400, "invalid_request_error", "messages[0]"),
        (asked(messages=[{"role": "user"}]), 400, "invalid_request_error", "content"),
        (asked(system=7), 400, "invalid_request_error", "system"),
        (asked(stream="yes"), 400, "invalid_request_error", "stream"),
        (asked(model="nope"), 404, "not_found_error", "known: tiny"),
        (asked(max_tokens=0), 400, "invalid_request_error", "max_tokens"),
        (b"x" * (33 * 1024 * 1024), 413, "request_too_large", "more than"),
    ],
)
async def test_refusals_have_anthropics_form(simulated, body, status, kind, says):
    got, answer = await sent(simulated, body)
    assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert says in answer["error"]["message"]
    assert set(answer) == {"type", "error"}


async def test_the_official_client_raises_its_own_exceptions(simulated):
    async with sdk(simulated) as api:
        with pytest.raises(anthropic.NotFoundError, match="known: tiny"):
            await api.messages.create(**asked(model="nope"))
        with pytest.raises(anthropic.APIStatusError, match="time") as late:
            slow = {"x-mesh-timeout-s": "0.000001"}
            await api.messages.create(**asked(max_tokens=2000), extra_headers=slow)
    assert late.value.status_code == 504
    assert late.value.body["error"]["type"] == "timeout_error"
    async with client() as session, session.get(simulated.urls["us"] + MESSAGES) as answer:
        assert (answer.status, (await answer.json())["type"]) == (405, "error")


async def test_where_no_engine_has_the_path_it_is_a_404(one):
    status, answer = await sent(one, asked())
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert "'tiny' answers /v1/messages" in answer["error"]["message"]


def event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


START = event("message_start", message={"usage": {"input_tokens": 30, "output_tokens": 1,
                                                  "cache_read_input_tokens": 10}})  # fmt: skip
BLOCK = event("content_block_start", index=0) + event("ping")
DELTA = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"})
END = event("message_delta", usage={"output_tokens": 7}) + event("message_stop")


async def streamed(mesh: SmallMesh) -> tuple[int, bytes]:
    url = mesh.urls["us"] + MESSAGES
    async with client() as session, session.post(url, json=asked(stream=True)) as answer:
        return answer.status, await answer.read()


async def test_events_pass_unchanged_and_their_counts_are_read(scripted):
    mesh, script = scripted
    script["events"] = [START, BLOCK, DELTA, END]
    assert await streamed(mesh) == (200, START + BLOCK + DELTA + END)
    await mesh.until(lambda: mesh.sample("us", "mesh_prompt_tokens_total") == 40, "prompt tokens")
    assert mesh.sample("us", "mesh_output_tokens_total") == 7


async def test_a_stream_that_breaks_before_content_is_an_error_in_anthropics_form(scripted):
    mesh, script = scripted
    script["events"] = [START, BLOCK[:-5]]
    status, body = await streamed(mesh)
    assert (status, orjson.loads(body)["type"]) == (502, "error")


async def test_a_stream_that_breaks_after_content_ends_with_anthropics_error_event(scripted):
    mesh, script = scripted
    script["events"] = [START, BLOCK, DELTA, seen := asyncio.Event(), DELTA[:-5]]
    url = mesh.urls["us"] + MESSAGES
    async with client() as session, session.post(url, json=asked(stream=True)) as answer:
        first = await answer.content.readexactly(len(START + BLOCK + DELTA))
        seen.set()
        _, _, last = (await answer.read()).rpartition(b"event: error\n")
    assert first == START + BLOCK + DELTA
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["type"] == "api_error"


async def test_anthropics_headers_reach_the_engine_and_no_others(nats_server):
    got = []

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        got.append(request.headers)
        return web.json_response({"usage": {"input_tokens": 1, "output_tokens": 1}})

    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.on_path = {MESSAGES: answer}
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, f"tiny on {MESSAGES}")
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        sent = [("anthropic-version", "2023-06-01"), ("anthropic-beta", "a-1"), ("x-other", "1"),
                ("anthropic-beta", "b-2"), ("x-api-key", "secret"), ("cookie", "c=1")]  # fmt: skip
        url = mesh.urls["us"] + MESSAGES
        async with client() as session:
            got.clear()  # the agent's own requests
            async with session.post(url, json=body, headers=sent) as found:
                assert found.status == 200
            wrong = {"anthropic-version": "2023 06"}
            async with session.post(url, json=body, headers=wrong) as found:
                problem = (await found.json())["error"]
        (headers,) = got
        assert headers["anthropic-version"] == "2023-06-01"
        assert headers["anthropic-beta"] == "a-1, b-2"
        assert not {"x-other", "x-api-key", "cookie", "authorization"} & {*map(str.lower, headers)}
        assert (found.status, problem["type"]) == (400, "invalid_request_error")
        assert "anthropic-version" in problem["message"]
