"""What engines say beside their answers reaches clients, as far as it is harmless."""

import asyncio

import pytest
from aiohttp import web

from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import event, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, one_replica, small_mesh
from tests.support.until import PATIENCE_S

CHAT = "/v1/chat/completions"
GIVEN = {
    "x-ratelimit-remaining-requests": "9",
    "openai-processing-ms": "12",
    "server-timing": "queue;dur=3",
    "set-cookie": "a=b",
    "x-mesh-region": "mars",
    "x-request-id": "the engine's",
    "x-accel-redirect": "/secret",
}
PASS = {"x-ratelimit-remaining-requests": "9", "openai-processing-ms": "12",
        "server-timing": "queue;dur=3"}  # fmt: skip


@pytest.fixture
async def mesh(nats_server):
    async with one_replica(nats_server, **PATIENT) as mesh:
        [engine] = mesh.engines
        mesh.engine = engine
        yield mesh


def answers(status: int, content_type: str, body: bytes):
    async def behaviour(request: web.Request, asked: dict) -> web.StreamResponse:
        headers = {**GIVEN, "content-type": content_type, "retry-after": "7"}
        return web.Response(status=status, body=body, headers=headers)

    return behaviour


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "application/json", b'{"choices":[]}'),
        (200, "text/event-stream", event("a") + b"data: [DONE]\n\n"),
        (400, "application/json", b'{"error":{}}'),
        (500, "application/json", b'{"error":{}}'),
    ],
    ids=["plain", "stream", "a client's error", "an engine's error"],
)
async def test_harmless_headers_pass_and_no_others(mesh, status, content_type, body):
    mesh.engine.behaviour = answers(status, content_type, body)
    async with client() as session:
        asked = chat(stream=content_type != "application/json")
        async with session.post(mesh.urls["us"] + CHAT, json=asked) as answer:
            assert (answer.status, await answer.read()) == (status, body)
            got = answer.headers
    assert {name: got.get(name) for name in PASS} == PASS
    assert got["retry-after"] == "7"
    assert "set-cookie" not in got and "x-accel-redirect" not in got
    assert got.getall("x-mesh-region") == ["us"]
    assert "engine" not in got["x-request-id"] and len(got.getall("x-request-id")) == 1


CARD = {
    "created": 1_700_000_000,
    "owned_by": "vllm",
    "root": "/models/tiny",
    "parent": None,
    "max_model_len": 8192,
}


async def until_card(session, url: str, root: str) -> dict:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(url + "/v1/models") as answer:
                if answer.status == 200:
                    [model] = (await answer.json())["data"]
                    if model["root"] == root:
                        return model
            await asyncio.sleep(0.02)


async def test_what_an_engine_says_of_its_model_is_read_here_and_in_other_regions(tmp_path):
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        scripted_engine() as engine,
        small_mesh(servers) as mesh,
        client() as session,
    ):
        engine.card = CARD | {"permission": [{"id": "x"}]}
        for region in ("us", "eu"):
            await mesh.router(region, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        expected = {"id": "tiny", "object": "model", **CARD}
        for region in ("us", "eu"):
            url = mesh.urls[region]
            assert await until_card(session, url, CARD["root"]) == expected
            async with session.get(url + "/v1/models/tiny/") as answer:
                assert await answer.json() == expected
            async with session.get(url + "/v1/models/") as answer:
                assert (await answer.json())["data"] == [expected]
