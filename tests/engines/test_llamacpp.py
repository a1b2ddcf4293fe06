"""The mesh over llama.cpp's own server, in every run of the tests."""

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import llamacpp_server, tiny_gguf
from tests.engines.contract import KEYS, KeyedEngineContract
from tests.engines.engine import RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over

pytestmark = pytest.mark.asyncio(loop_scope="module")


class LlamaCpp(RealEngine):
    kind = "llamacpp"
    running = "llamacpp:requests_processing"
    waiting = "llamacpp:requests_deferred"
    batch_max = 2
    context_tokens = 8192

    async def _start(self, log: str) -> list[int]:
        pid = await self.processes.start(
            log,
            (
                *(sys.executable, llamacpp_server.__file__, str(self.directory / "tiny.gguf")),
                *(str(self.port), str(self.batch_max), str(self.context_tokens)),
                *([self.api_key] if self.api_key else []),
            ),
            ready=self.processes.answers(f"{self.url}/health"),
        )
        return [pid]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    directory = tmp_path_factory.mktemp("llamacpp")
    tiny_gguf.write(directory / "tiny.gguf")
    async with mesh_over(LlamaCpp, directory, KEYS) as mesh:
        yield mesh


class TestLlamaCpp(KeyedEngineContract):
    slow_chars = 1500  # each is a token: some ten heartbeats long

    async def test_the_heartbeat_knows_how_many_slots_it_has(self, mesh):
        for replica, engine in mesh.engines.items():
            assert mesh.beats[replica].batch_max == engine.batch_max
