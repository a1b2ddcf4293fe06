"""`/v1/embeddings` from OpenAI's client to simulated and scripted engines, and in a batch."""

import asyncio
import base64
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Iterator

import openai
import orjson
import pytest
from aiohttp import web

from mesh.core.view.slowness import WINDOW
from schemas.batch import JobStatus
from tests.agents.simserver.support import config, running
from tests.support.batch_mesh import batch_mesh
from tests.support.batch_regions import batch_toml
from tests.support.batch_store import output_lines
from tests.support.nats_pair import nats_pair
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.scripted_engine import event, fail, scripted_engine
from tests.support.small_mesh import (
    PATIENT,
    SmallMesh,
    chat,
    client,
    post,
    small_mesh,
)

EMBEDDINGS = "/v1/embeddings"
SIMULATED = config(models=("tiny",))
KEYS = map("sk-e{}".format, itertools.count(1))
ON_PATH = f"tiny on {EMBEDDINGS}"


@contextlib.asynccontextmanager
async def sdk(mesh: SmallMesh, region: str = "us") -> AsyncIterator[openai.AsyncOpenAI]:
    url = mesh.urls[region] + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=next(KEYS), max_retries=0) as api:
        yield api


async def asked(mesh: SmallMesh, region: str = "us", **fields) -> tuple[int, bytes, dict]:
    body = {"model": "tiny", "input": "hello"} | fields
    url = mesh.urls[region] + EMBEDDINGS
    async with client() as session, session.post(url, json=body) as answer:
        return answer.status, await answer.read(), dict(answer.headers)


async def vectors(request: web.Request, body: dict) -> web.StreamResponse:
    """Says its usage before the vectors, as llama.cpp does."""
    data = [{"object": "embedding", "index": 0, "embedding": [0.25] * 5000}]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return web.json_response({"object": "list", "usage": usage, "data": data})


@pytest.fixture
async def simulated(nats_server) -> AsyncIterator[SmallMesh]:
    """us, with one simulated engine."""
    async with running(SIMULATED) as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        await mesh.until_ready("us", 1, ON_PATH)
        yield mesh


@pytest.fixture
def regions(tmp_path) -> Iterator[NatsRegions]:
    """A region with a batch runner."""
    with running_regions(tmp_path, toml=batch_toml()) as started:
        yield started


async def test_the_official_client_gets_vectors_in_either_encoding(simulated):
    texts = ["one river", "two mills", "one river"]
    async with sdk(simulated) as api:
        by_default = await api.embeddings.create(model="tiny", input=texts)  # asks for base64
        floats = await api.embeddings.create(model="tiny", input=texts, encoding_format="float")
        short = await api.embeddings.create(model="tiny", input=texts[0], dimensions=8)
        encoded = await api.embeddings.create(
            model="tiny", input=texts[0], dimensions=8, encoding_format="base64"
        )
        names = [model.id for model in (await api.models.list()).data]
    assert [each.index for each in floats.data] == [0, 1, 2]
    one, two, again = (each.embedding for each in floats.data)
    assert one == again != two
    for ours, theirs in zip(floats.data, by_default.data, strict=True):
        assert theirs.embedding == pytest.approx(ours.embedding, abs=1e-6)
    raw = base64.b64decode(encoded.data[0].embedding)
    assert struct.unpack("<8f", raw) == pytest.approx(short.data[0].embedding, abs=1e-6)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == 9
    assert names == ["tiny"], "the path is no model of its own"


async def test_every_shape_of_input_is_answered_and_counted(simulated):
    core = simulated.routers["us"].core
    for given, number in (("ab cd", 1), (["ab", "cd"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        status, body, _ = await asked(simulated, input=given)
        answer = orjson.loads(body)
        assert (status, len(answer["data"])) == (200, number)
    assert simulated.sample("us", "mesh_prompt_tokens_total") == 2 + 2 + 3 + 3
    assert not core.inflight


@pytest.mark.parametrize(
    "given",
    [None, "", [], [""], ["a", 1], [1, "a"], [[]], [[1], []], [[1], "a"], [1, -1], [True], 7, {}],
)
async def test_bad_input_is_a_400_in_openais_form(simulated, given):
    status, body, _ = await asked(simulated, input=given)
    error = orjson.loads(body)["error"]
    assert (status, error["param"], error["type"]) == (400, "input", "invalid_request_error")
    assert "token ids" in error["message"]


async def test_the_engines_own_limits_reach_the_client(simulated):
    async with sdk(simulated) as api:
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await api.embeddings.create(model="tiny", input="a", dimensions=100_000)
        with pytest.raises(openai.BadRequestError, match="2048"):
            await api.embeddings.create(model="tiny", input=["a"] * 2049)
        with pytest.raises(openai.NotFoundError, match="tiny") as refused:
            await api.embeddings.create(model="other", input="a")
    assert refused.value.code == "model_not_found"


async def test_embeddings_count_as_no_first_token_and_are_no_prefix(simulated):
    text = "the same document again and again " * 100
    for _ in range(3):
        assert (await asked(simulated, input=text))[0] == 200
    heartbeat = simulated.routers["us"].core.replicas.get("us-0").heartbeat
    assert heartbeat.decode_tokens_per_s is None
    assert (await post(simulated, chat("y" * 2000, stream=True)))[0] == 200
    name = "mesh_request_ttft_seconds_count"
    assert simulated.sample("us", name, served="local") == 1, "of the chat alone"
    index = simulated.routers["us"].core.state.placer.index
    assert index is not None
    assert 0 < index.blocks("us-0") < 12, "of the chat alone"


async def whole_stream(request: web.Request, body: dict) -> web.StreamResponse:
    """As a proxy sends it that buffers."""
    data = event("hello") + b"data: [DONE]\n\n"
    return web.Response(body=data, headers={"content-type": "text/event-stream"})


async def test_routers_learn_of_embeddings_and_of_streams_that_come_at_once(nats_server):
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.embeddings, engine.behaviour = vectors, whole_stream
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        await mesh.until_ready("us", 1, ON_PATH)
        for _ in range(WINDOW):
            assert (await asked(mesh))[0] == 200
            assert (await post(mesh, chat(stream=True)))[0] == 200
        places = mesh.routers["us"].core.replicas.slow._places
        learned = {key[1]: len(each.ended) + len(each.answers) for key, each in places.items()}
    assert learned == {ON_PATH: WINDOW, "tiny": WINDOW}


async def test_an_answer_comes_back_byte_for_byte_and_its_usage_is_read(nats_server):
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        large = (
            b'{"usage":{"prompt_tokens":7,"total_tokens":7},"data":["' + b"x" * 3_000_000 + b'"]}'
        )
        seen = []

        async def answer(request: web.Request, body: dict) -> web.StreamResponse:
            seen.append(body)
            return web.Response(body=large, content_type="application/json")

        engine.embeddings = answer
        await mesh.router("us")
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1, ON_PATH)
        status, body, _ = await asked(mesh, input=["hello"], dimensions=3, odd={"a": 1})
        assert (status, body == large) == (200, True)
        assert seen[-1] == {"model": "tiny", "input": ["hello"], "dimensions": 3, "odd": {"a": 1}}
        await mesh.until(lambda: mesh.sample("us", "mesh_prompt_tokens_total") == 7, "its usage")


async def test_where_no_engine_has_the_path_it_is_a_404_that_says_so(one):
    async with sdk(one) as api:
        with pytest.raises(openai.NotFoundError, match=r"'tiny'.*/v1/embeddings") as refused:
            await api.embeddings.create(model="tiny", input="hello")
    assert refused.value.code == "path_not_served"
    # A name of the router's own tables is nobody's model.
    assert (await post(one, {"model": ON_PATH, "messages": [{"role": "user"}]}))[0] == 404


async def test_only_replicas_that_have_the_path_are_asked(nats_server):
    async with (
        scripted_engine() as without,
        running(SIMULATED) as engine,
        small_mesh({"us": nats_server}) as mesh,
    ):
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", without)
        await mesh.agent("us", "us-1", engine)
        await mesh.until_ready("us", 2)
        await mesh.until_ready("us", 1, ON_PATH)
        answers = await asyncio.gather(*(asked(mesh) for _ in range(6)))
        assert [status for status, _, _ in answers] == [200] * 6
        assert mesh.sample("us", "mesh_refusals_total", reason="wrong_model") == 0


async def test_a_region_without_the_path_forwards_to_one_that_has_it(tmp_path):
    async with (
        nats_pair(tmp_path, "eu", "us") as servers,
        scripted_engine() as without,
        running(SIMULATED) as engine,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("eu")
        await mesh.router("us")
        await mesh.agent("eu", "eu-0", without)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("eu", "us", ON_PATH)
        status, body, headers = await asked(mesh, "eu", input=["a", "b"])
        assert (status, headers["x-mesh-region"]) == (200, "us")
        assert len(orjson.loads(body)["data"]) == 2
        regions = await _regions(mesh, "eu")
        assert {name for each in regions for name in each["models"]} == {"tiny"}


async def _regions(mesh: SmallMesh, region: str) -> list[dict]:
    async with client() as session, session.get(mesh.urls[region] + "/v1/regions") as answer:
        return (await answer.json())["data"]


async def test_an_engine_that_has_lost_the_path_costs_no_request(nats_server):
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        first.embeddings = second.embeddings = vectors
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2, ON_PATH)
        first.embeddings = None
        answers = [await asked(mesh) for _ in range(4)]
        assert [status for status, _, _ in answers] == [200] * 4
        await mesh.until_ready("us", 1, ON_PATH)
        await mesh.until_ready("us", 2)


async def test_an_engines_error_is_tried_elsewhere_before_the_first_byte(nats_server):
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        first.embeddings = second.embeddings = vectors
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2, ON_PATH)
        first.embeddings = fail(500)
        assert [(await asked(mesh))[0] for _ in range(4)] == [200] * 4


async def test_a_batch_of_embeddings_through_the_official_client(regions):
    texts = [f"document {number}" for number in range(40)]
    body = [{"model": "tiny", "input": text, "dimensions": 4} for text in texts]
    lines = [
        {"custom_id": f"d{number}", "method": "POST", "url": EMBEDDINGS, "body": each}
        for number, each in enumerate(body)
    ]
    wrong = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body[0]}
    empty = {"custom_id": "empty", "method": "POST", "url": EMBEDDINGS, "body": {"model": "tiny"}}
    data = b"".join(orjson.dumps(each) + b"\n" for each in (*lines, wrong, empty))
    async with batch_mesh(regions) as mesh, running(SIMULATED) as engine:
        await mesh.mesh.router("us")
        await mesh.agent("us-0", engine)
        await mesh.runner()
        await mesh.mesh.until_ready("us", 1, ON_PATH)
        async with sdk(mesh.mesh) as api:
            file = await api.files.create(file=data, purpose="batch")
            batch = await api.batches.create(
                input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h"
            )
            await mesh.until(await mesh.store.jobs.get(batch.id), JobStatus.COMPLETED)
            done = await api.batches.retrieve(batch.id)
            alone = await api.embeddings.create(
                model="tiny", input=texts[3], dimensions=4, encoding_format="float"
            )
        answers = await output_lines(mesh.store, done.output_file_id)
        errors = await output_lines(mesh.store, done.error_file_id)
    assert (done.request_counts.completed, done.request_counts.failed) == (40, 2)
    assert answers.keys() == {f"d{number}" for number in range(40)}
    answer = answers["d3"]["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, "list")
    assert answer["body"]["data"][0]["embedding"] == alone.data[0].embedding
    assert answer["body"]["usage"]["prompt_tokens"] > 0
    assert errors["chat"]["error"]["code"] == "invalid_url"
    assert errors["empty"]["error"]["param"] == "body.input"
