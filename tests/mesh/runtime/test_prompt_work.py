"""Rerank, score, classify, pooling, tokenize and detokenize: work that generates nothing."""

from collections.abc import AsyncIterator

import orjson
import pytest
from aiohttp import web

from schemas.http import CLASSIFY, DETOKENIZE, POOLING, RERANK, SCORE, TOKENIZE
from tests.agents.simserver.support import config, running
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import SmallMesh, client, small_mesh

SIMULATED = (RERANK, SCORE, TOKENIZE, DETOKENIZE)
WHOLE = {
    RERANK: {"query": "a river", "documents": ["the Rhine", "a mill", "the Danube"]},
    SCORE: {"text_1": "a river", "text_2": ["the Rhine", "a mill"]},
    TOKENIZE: {"prompt": "hello there"},
    DETOKENIZE: {"tokens": [1819043176, 111]},
    CLASSIFY: {"input": ["one", "two"]},
    POOLING: {"input": "one"},
}


@pytest.fixture
async def simulated(nats_server) -> AsyncIterator[SmallMesh]:
    """us, with one simulated engine."""
    engine_config = config(models=("tiny",))
    async with running(engine_config) as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        for path in SIMULATED:
            await mesh.until_ready("us", 1, f"tiny on {path}")
        yield mesh


async def sent(mesh: SmallMesh, path: str, **fields) -> tuple[int, dict]:
    body = {"model": "tiny"} | fields
    async with client() as session, session.post(mesh.urls["us"] + path, json=body) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_each_is_answered_by_the_simulated_engine_and_counted(simulated):
    status, ranked = await sent(simulated, RERANK, **WHOLE[RERANK], top_n=2)
    scores = [each["relevance_score"] for each in ranked["results"]]
    assert (status, len(scores), scores) == (200, 2, sorted(scores, reverse=True))
    await simulated.until(
        lambda: (
            simulated.sample("us", "mesh_prompt_tokens_total") == ranked["usage"]["total_tokens"]
        ),
        "the total as prompt tokens",
    )
    status, scored = await sent(simulated, SCORE, **WHOLE[SCORE])
    assert (status, len(scored["data"])) == (200, 2)
    status, tokens = await sent(simulated, TOKENIZE, **WHOLE[TOKENIZE])
    assert (status, tokens["count"]) == (200, 3)
    status, text = await sent(simulated, DETOKENIZE, tokens=tokens["tokens"])
    assert (status, text["prompt"]) == (200, "hello there")
    assert simulated.sample("us", "mesh_output_tokens_total") == 0
    core = simulated.routers["us"].core
    assert core.state.placer.index is not None
    assert core.state.placer.index.blocks("us-0") == 0
    assert core.replicas.get("us-0").heartbeat.decode_tokens_per_s is None
    assert not core.inflight


@pytest.mark.parametrize(("alias", "path"), [("/rerank", RERANK), ("/score", SCORE)])
async def test_other_names_of_a_path_are_the_same(simulated, alias, path):
    assert await sent(simulated, alias, **WHOLE[path]) == await sent(simulated, path, **WHOLE[path])
    assert (await sent(simulated, alias + "/", **WHOLE[path]))[0] == 200


BAD = [
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": "a"}, "documents"),
    (SCORE, {"text_1": "a"}, "text_2"),
    (SCORE, {"text_2": "a"}, "text_1"),
    (SCORE, {"text_1": 5, "text_2": "a"}, "text_1"),
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": ["a"]}, "prompt"),
    (TOKENIZE, {"messages": []}, "messages"),
    (DETOKENIZE, {}, "tokens"),
    (DETOKENIZE, {"tokens": ["a"]}, "tokens"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (CLASSIFY, {}, "input"),
    (POOLING, {"input": [""]}, "input"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
async def test_bad_input_is_a_400_that_names_the_field(simulated, path, fields, param):
    status, answer = await sent(simulated, path, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_classes_and_pooled_vectors_pass_byte_for_byte(nats_server):
    whole = {"object": "list", "data": [{"probs": [0.5]}], "usage": {"prompt_tokens": 6}}

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response(whole)

    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.on_path = {CLASSIFY: answer, POOLING: answer}
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        for path in (CLASSIFY, POOLING):
            await mesh.until_ready("us", 1, f"tiny on {path}")
            assert await sent(mesh, path, **WHOLE[path]) == (200, whole)
        status, refused = await sent(mesh, RERANK, **WHOLE[RERANK])
        assert (status, refused["error"]["code"]) == (404, "path_not_served")
