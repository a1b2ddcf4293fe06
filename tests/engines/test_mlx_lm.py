"""The mesh over mlx-lm's server: `make test-engines`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import route_table
from tests.engines.contract import EngineContract
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.without_page import MlxLm
from tests.engines.without_page_contract import WithoutPageContract

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(300),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(MlxLm, tmp_path_factory.mktemp("mlx_lm")) as mesh:
        yield mesh


class TestMlxLm(WithoutPageContract):
    column = route_table.MLX_LM
    test_a_prompt_goes_where_it_is_cached = EngineContract.test_a_prompt_goes_where_it_is_cached
    slow_chars = 1500
