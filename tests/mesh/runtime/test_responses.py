"""`/v1/responses` from OpenAI's client to simulated and scripted engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import openai
import orjson
import pytest
from aiohttp import web

from schemas.http import RESPONSES
from schemas.response_ids import response_id
from tests.agents.simserver.support import config, running
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import SmallMesh, chat, client, post, small_mesh

ON_PATH = f"tiny on {RESPONSES}"
LONG = "a long conversation about rivers and mills " * 60


@pytest.fixture
async def simulated(nats_server) -> AsyncIterator[SmallMesh]:
    """us, with one simulated engine."""
    engine_config = config(models=("tiny",))
    async with running(engine_config) as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, ON_PATH)
        yield mesh


@contextlib.asynccontextmanager
async def sdk(mesh: SmallMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    url = mesh.urls["us"] + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-r", max_retries=0) as api:
        yield api


def asked(**fields) -> dict:
    return {"model": "tiny", "input": "hello there", "max_output_tokens": 5} | fields


async def sent(mesh: SmallMesh, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with client() as session, session.post(mesh.urls["us"] + RESPONSES, data=data) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_the_official_client_gets_a_response_whole_and_streamed(simulated):
    async with sdk(simulated) as api:
        whole = await api.responses.create(**asked(instructions="be brief"))
        stream = await api.responses.create(**asked(instructions="be brief"), stream=True)
        events = [event async for event in stream]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    last = events[-1].response
    assert whole.output_text == "".join(texts) == last.output_text
    assert (whole.usage.output_tokens, last.usage.output_tokens, len(texts)) == (5, 5, 5)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    prompts = simulated.sample("us", "mesh_prompt_tokens_total")
    assert prompts == 2 * whole.usage.input_tokens
    assert simulated.sample("us", "mesh_output_tokens_total") == 10
    assert simulated.sample("us", "mesh_request_ttft_seconds_count", served="local") == 1


@pytest.mark.parametrize(
    "given",
    [
        LONG,
        [{"role": "user", "content": LONG}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}],
    ],
)
async def test_a_chat_and_a_response_of_the_same_words_are_one_prefix(simulated, given):
    assert (await post(simulated, chat(LONG)))[0] == 200
    index = simulated.routers["us"].core.state.placer.index
    assert index is not None
    of_chat = index.blocks("us-0")
    assert of_chat > 8
    assert (await sent(simulated, asked(input=given)))[0] == 200
    assert index.blocks("us-0") == of_chat


async def test_state_that_nobody_keeps_is_refused_in_openais_words(simulated):
    async with sdk(simulated) as api:
        gone = response_id("us", "us-9", bytes(16))
        for more in (
            {"previous_response_id": "resp_1"},
            {"previous_response_id": gone},
            {"conversation": "conv_1"},
            {"conversation": "conv_1", "previous_response_id": gone},
        ):
            with pytest.raises(
                openai.BadRequestError, match=r"send (the whole conversation|all) as input"
            ) as refused:
                await api.responses.create(**asked(**more))
            assert refused.value.code == "previous_response_not_found"
            assert refused.value.param in more


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"no json", 400, "not JSON"),
        (asked(input=None), 400, "input"),
        (asked(input=[]), 400, "input"),
        (asked(input=["hi"]), 400, "input[0]"),
        (asked(input=[{"role": "user", "content": 5}]), 400, "input[0].content"),
        (asked(instructions=5), 400, "instructions"),
        (asked(background=True), 400, "background"),
        (asked(stream=1), 400, "stream"),
        (asked(model="nope"), 404, "known: tiny"),
        (asked(max_output_tokens=0), 400, "max_output_tokens"),
    ],
)
async def test_bad_input_is_an_error_in_openais_form(simulated, body, status, says):
    got, answer = await sent(simulated, body)
    assert (got, answer["error"]["type"]) == (status, "invalid_request_error") or got == 404
    assert says in answer["error"]["message"]


async def test_where_no_engine_has_the_path_it_is_a_404(one):
    status, answer = await sent(one, asked())
    assert (status, answer["error"]["code"]) == (404, "path_not_served")


def event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


CREATED = event("response.created", response={"usage": None, "error": None})
DELTA = event("response.output_text.delta", delta="hi")
DONE = event("response.completed", response={"usage": {"input_tokens": 9, "output_tokens": 2}})


async def test_an_engine_that_is_lost_after_its_opening_events_costs_nothing(nats_server):
    """vLLM sends them before it has computed anything."""
    lost = asyncio.Event()

    async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
        return answer

    async def breaks(request: web.Request, body: dict) -> web.StreamResponse:
        if not body.get("stream"):  # an agent's probe
            return web.json_response({})
        answer = await stream(request, CREATED)
        lost.set()
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def works(request: web.Request, body: dict) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response({})
        return await stream(request, CREATED, DELTA, DONE)

    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        first.on_path[RESPONSES], second.on_path[RESPONSES] = breaks, works
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2, ON_PATH)
        url = mesh.urls["us"] + RESPONSES
        for _ in range(2):
            async with client() as session, session.post(url, json=asked(stream=True)) as answer:
                assert (answer.status, await answer.read()) == (200, CREATED + DELTA + DONE)
        assert lost.is_set()


async def test_a_stream_that_breaks_ends_as_its_own_failed_response(nats_server):
    response = {"id": "resp_7", "object": "response", "status": "in_progress"}
    begun = event("response.created", sequence_number=0, response=response)
    parts = begun + event("response.output_text.delta", sequence_number=1, delta="hi")
    heard = asyncio.Event()

    async def breaks(request: web.Request, body: dict) -> web.StreamResponse:
        if not body.get("stream"):  # an agent's probe
            return web.json_response({})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(parts)
        await heard.wait()
        assert request.transport is not None
        request.transport.abort()
        return answer

    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.on_path[RESPONSES] = breaks
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, ON_PATH)
        url = mesh.urls["us"] + RESPONSES
        async with client() as session, session.post(url, json=asked(stream=True)) as answer:
            assert await answer.content.readexactly(len(parts)) == parts
            heard.set()
            name, _, data = (await answer.read()).partition(b"\n")
        found = orjson.loads(data.removeprefix(b"data: "))
        assert (name, found["sequence_number"]) == (b"event: response.failed", 2)
        assert (found["response"]["id"], found["response"]["status"]) == ("resp_7", "failed")
        assert found["response"]["error"]["message"] == found["error"]["message"]
