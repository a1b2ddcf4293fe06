"""The mesh over SGLang on the CPU: `make test-engines`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import route_table
from tests.engines.contract import (
    KEYS,
    CodingAgentContract,
    GoesOnContract,
    KeyedEngineContract,
)
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.sglang_server import CACHE_TOKENS, START_WITHIN_S, Sglang

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(2 * START_WITHIN_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Sglang, tmp_path_factory.mktemp("sglang"), KEYS) as mesh:
        yield mesh


class TestSglang(KeyedEngineContract, CodingAgentContract, GoesOnContract):
    column = route_table.SGLANG
    begin_alike = (False, False, False, False)

    async def test_the_heartbeat_knows_how_much_its_cache_holds(self, mesh):
        assert mesh.beats["us-0"].kv_capacity_tokens == CACHE_TOKENS
