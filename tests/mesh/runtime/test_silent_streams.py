"""Clients that wait long for a stream: what they are sent meanwhile hurts none, and what ends the
wait arrives, in the clients that people use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import anthropic
import openai
import orjson
import pytest
from aiohttp import web

from mesh.explain.story import summary
from mesh.session.answer import PLAIN_BYTES_MAX
from schemas.http import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ErrorForm, keep_alive_event
from tests.agents.simserver.support import config, running
from tests.support.scripted_engine import Behaviour, fail, opened, scripted_engine
from tests.support.small_mesh import PATIENT, SmallMesh, client, one_replica, small_mesh
from tests.support.until import until

TALK = [{"role": "user", "content": "hello there"}]
ASKED = {
    CHAT: {"messages": TALK, "max_tokens": 5},
    COMPLETIONS: {"prompt": "hello there", "max_tokens": 5},
    MESSAGES: {"messages": TALK, "max_tokens": 5},
    RESPONSES: {"input": "hello there", "max_output_tokens": 5},
}
PASSED_OVER = {path: keep_alive_event() for path in ASKED} | {
    MESSAGES: keep_alive_event(ErrorForm.ANTHROPIC)
}


class Waits:
    """A mesh whose engine answers nobody before `go`, and then as `behaviour` says."""

    def __init__(self, mesh: SmallMesh, behaviour: Behaviour) -> None:
        self.mesh, self.behaviour = mesh, behaviour
        self.go, self.arrived = asyncio.Event(), 0

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        self.arrived += 1
        await self.go.wait()
        return await self.behaviour(request, body)


def passed_on(url: str) -> Behaviour:
    """As the engine there answers."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + request.path, json=body) as answer,
        ):
            stream = await opened(request)
            async for piece in answer.content.iter_any():
                await stream.write(piece)
        return stream

    return behaviour


@pytest.fixture
async def waits(nats_server) -> AsyncIterator[Waits]:
    async with (
        running(config(models=("tiny",))) as simulated,
        scripted_engine() as engine,
        small_mesh({"us": nats_server}) as mesh,
    ):
        found = Waits(mesh, passed_on(simulated.url))
        engine.behaviour = found.answer
        engine.on_path |= dict.fromkeys((MESSAGES, RESPONSES), found.answer)
        await mesh.router("us", sse_keep_alive_s=0.2, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        for path in (MESSAGES, RESPONSES):
            await mesh.until_ready("us", 1, f"tiny on {path}")
        found.arrived = 0
        yield found


async def text_of(mesh: SmallMesh, path: str, **headers: str) -> str:
    """What the client of that API makes of a stream."""
    url, asked = mesh.urls["us"], {"model": "tiny", **ASKED[path]}
    known = {"api_key": "unused", "max_retries": 0, "default_headers": headers}
    if path == MESSAGES:
        async with (
            anthropic.AsyncAnthropic(base_url=url, **known) as api,
            api.messages.stream(**asked) as stream,
        ):
            return "".join([text async for text in stream.text_stream])
    async with openai.AsyncOpenAI(base_url=url + "/v1", **known) as api:
        if path == RESPONSES:
            events = [event async for event in await api.responses.create(**asked, stream=True)]
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            return "".join(event.delta for event in deltas)
        if path == CHAT:
            chunks = [
                chunk async for chunk in await api.chat.completions.create(**asked, stream=True)
            ]
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
            )
        chunks = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@contextlib.asynccontextmanager
async def waiting(mesh: SmallMesh, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream for which its client has been kept waiting, twice."""
    body = orjson.dumps({"model": "tiny", "stream": True, **ASKED[path]})
    async with client() as session, session.post(mesh.urls["us"] + path, data=body) as answer:
        passed_over = 2 * PASSED_OVER[path]
        assert answer.status == 200
        assert await answer.content.readexactly(len(passed_over)) == passed_over
        yield answer


async def kept_waiting(waits: Waits, **headers: str) -> dict[str, asyncio.Task[str]]:
    """Clients that have been, by now: others that came later have been."""
    texts = {path: asyncio.create_task(text_of(waits.mesh, path, **headers)) for path in ASKED}
    await until(lambda: waits.arrived == len(texts))
    for path in ASKED:
        async with waiting(waits.mesh, path):
            pass
    return texts


async def test_clients_that_were_kept_waiting_read_the_same(waits):
    texts = await kept_waiting(waits)
    waits.go.set()
    for path, text in texts.items():
        assert await text
        assert await text == await text_of(waits.mesh, path)


async def test_and_are_told_of_an_error(waits):
    texts = await kept_waiting(waits)
    waits.behaviour = fail(400, "the engine's reason")
    waits.go.set()
    for text in texts.values():
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine's reason"):
            await text


async def test_and_of_an_engine_that_does_not_stream_which_has_failed(waits):
    async def never_ends(request: web.Request, body: dict) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        await answer.write(b"x" * 2 * PLAIN_BYTES_MAX)
        await asyncio.Event().wait()
        return answer

    texts = await kept_waiting(waits)
    waits.behaviour = never_ends
    waits.go.set()
    for text in texts.values():
        with pytest.raises((openai.APIError, anthropic.APIError), match="where a stream was asked"):
            await text
    assert not waits.mesh.routers["us"].core.inflight, "the engine is told to stop"


async def test_and_of_their_deadline(waits):
    texts = await kept_waiting(waits, **{"x-mesh-timeout-s": "5"})
    for text in texts.values():
        with pytest.raises((openai.APIError, anthropic.APIError), match="deadline"):
            await text
    ended = waits.mesh.routers["us"].requests.ended.slowest(len(texts)).requests
    assert [one.status for one in ended] == [200] * len(texts), "as they were sent"
    assert all(", with an error event in its stream: " in summary(one) for one in ended)


async def test_the_request_is_still_placed_elsewhere_unseen(waits, nats_server):
    async with scripted_engine() as other, waiting(waits.mesh, CHAT) as answer:
        await waits.mesh.agent("us", "us-1", other)
        await waits.mesh.until_ready("us", 2, "tiny")
        waits.behaviour = fail(500)
        waits.go.set()
        body = await answer.read()
    assert b"hello" in body and body.endswith(b"data: [DONE]\n\n")
    assert b"error" not in body
    assert len(other.seen) == 1


async def test_a_client_that_waits_in_the_hold_queue_is_told_as_well(nats_server):
    kept = {"sse_keep_alive_s": 0.2, "policy": "least-load", **PATIENT}
    async with one_replica(nats_server, **kept) as mesh:
        [engine] = mesh.engines
        engine.waiting = 5
        await mesh.until_ready("us", 0)
        async with waiting(mesh, CHAT) as answer:
            assert not engine.seen
            engine.waiting = 0
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
