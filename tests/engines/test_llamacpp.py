"""The mesh over llama.cpp's own server, in every run of the tests."""

import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType

import openai
import pytest
import pytest_asyncio

from schemas.http import EMBEDDINGS
from tests.engines import llamacpp_server, probed_speed, route_table, routes, tiny_gguf
from tests.engines.contract import (
    KEYS,
    CodingAgentContract,
    GoesOnContract,
    KeyedEngineContract,
    prompt,
)
from tests.engines.engine import MODEL
from tests.engines.llamacpp import LlamaCpp
from tests.engines.mesh_over_engines import BY_TURNS, Asked, MeshOverEngines, mesh_over

OTHER = "other"
NOT_TEXT = (0, 1, *range(98, tiny_gguf.TOKENS))  # tokens of the tiny model
SWAP_CLIENTS = 6
pytestmark = pytest.mark.asyncio(loop_scope="module")


class EmbeddingLlamaCpp(LlamaCpp):
    options = (llamacpp_server.EMBEDDINGS,)


class RerankingLlamaCpp(LlamaCpp):
    options = (llamacpp_server.RERANKING,)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    directory = tmp_path_factory.mktemp("llamacpp")
    tiny_gguf.write(directory / "tiny.gguf")
    async with mesh_over(LlamaCpp, directory, KEYS) as mesh:
        yield mesh


class TestLlamaCpp(KeyedEngineContract, CodingAgentContract, GoesOnContract):
    column = route_table.LLAMACPP
    said_alike = MappingProxyType({"logit_bias": [[token, False] for token in NOT_TEXT]})
    slow_chars = 1500  # each is a token: some ten heartbeats long

    async def test_the_heartbeat_knows_how_many_slots_it_has(self, mesh):
        for replica, engine in mesh.engines.items():
            assert mesh.beats[replica].batch_max == engine.batch_max

    async def test_a_probe_finds_its_speed(self, mesh):
        await probed_speed.check(mesh)

    async def test_a_replica_that_comes_back_with_another_model_answers_no_request_for_the_first(
        self, mesh
    ):
        engine = mesh.engines["us-0"]
        stop = asyncio.Event()
        clients = [asyncio.create_task(_asked_until(mesh, n, stop)) for n in range(SWAP_CLIENTS)]
        try:
            await mesh.until(lambda: mesh.beats["us-0"].outstanding > 0, "us-0 to have work")
            await engine.kill()
            engine.options = (f"{llamacpp_server.ALIAS}{OTHER}",)
            await engine.start()
            await mesh.until(lambda: OTHER in mesh.beats["us-0"].models, "us-0 to serve another")
            other = await mesh.ask("Who is there?", 4, model=OTHER)
            assert (other.whole, other.replica) == (True, "us-0"), other
            await engine.kill()
            engine.options = ()
            await engine.start()
            await mesh.until(lambda: mesh.beats["us-0"].models == (MODEL,), "the first model")
        finally:
            stop.set()
            answers = [asked for found in await asyncio.gather(*clients) for asked in found]
        assert {model for asked in answers for model in asked.models} == {MODEL}
        broken = [asked for asked in answers if not asked.whole]
        assert [str(asked) for asked in broken if asked.problem or not asked.begun] == []
        assert {asked.replica for asked in broken} <= {"us-0"}
        assert len(broken) <= 2 * engine.batch_max
        await mesh.until_ready()

    async def test_embeddings_go_to_the_engine_that_makes_them(self, mesh, sdk):
        with pytest.raises(openai.NotFoundError) as refused:  # the others answer 501
            await sdk.embeddings.create(model=MODEL, input="hello")
        assert refused.value.code == "path_not_served"
        other = mesh.engines["us-0"]
        engine = EmbeddingLlamaCpp(other.processes, "llamacpp-2", other.directory)
        await engine.start()
        try:
            async with mesh.another_agent("us-2", engine):
                await mesh.until(lambda: _embeds(mesh, "us-2"), "a heartbeat that names the path")
                await mesh.until(lambda: _is_embedded(sdk), "the router to know it")
                texts = ["hello", "good morning", "hello"]
                answer = await sdk.embeddings.create(model=MODEL, input=texts)
                first, other, again = (each.embedding for each in answer.data)
                assert first == pytest.approx(again, abs=1e-3)
                assert first != pytest.approx(other, abs=1e-3)
                assert answer.usage.prompt_tokens > 3
        finally:
            await engine.kill()
        await mesh.until_ready()


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (EmbeddingLlamaCpp, route_table.EMBEDDING_LLAMACPP),
        (RerankingLlamaCpp, route_table.RERANKING_LLAMACPP),
    ],
)
async def test_the_routes_with_its_other_options_are_those_of_the_table(tmp_path, kind, column):
    tiny_gguf.write(tmp_path / "tiny.gguf")
    async with mesh_over(kind, tmp_path, ("",)) as mesh:
        route_table.check(column, await routes.found(mesh))


async def _asked_until(mesh: MeshOverEngines, client: int, stop: asyncio.Event) -> list[Asked]:
    """Chats one after the other, short and long."""
    found = []
    while not stop.is_set():
        text = prompt((client, len(found)), 60)
        found.append(await mesh.ask(text, 8 if client % 2 else 96, priority=BY_TURNS))
    return found


def _embeds(mesh: MeshOverEngines, replica: str) -> bool:
    beat = mesh.beats.get(replica)
    return beat is not None and EMBEDDINGS in beat.paths


async def _is_embedded(sdk: openai.AsyncOpenAI) -> bool:
    try:
        await sdk.embeddings.create(model=MODEL, input="hello")
    except openai.NotFoundError:
        return False
    return True
