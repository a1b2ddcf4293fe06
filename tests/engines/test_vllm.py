"""The mesh over vLLM on the CPU: `make test-engines`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.contract import KEYS, KeyedEngineContract
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.tiny_llama import KV_BYTES_PER_TOKEN
from tests.engines.vllm_server import KV_GIB, START_WITHIN_S, Vllm

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(2 * START_WITHIN_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Vllm, tmp_path_factory.mktemp("vllm"), KEYS) as mesh:
        yield mesh


class TestVllm(KeyedEngineContract):
    async def test_the_heartbeat_knows_how_much_its_cache_holds(self, mesh):
        assert mesh.beats["us-0"].kv_capacity_tokens == KV_GIB * 1024**3 // KV_BYTES_PER_TOKEN
