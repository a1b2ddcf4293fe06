"""The mesh over transformers serve: `make test-engines`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import route_table
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.without_page import TransformersServe
from tests.engines.without_page_contract import WithoutPageContract

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(300),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(TransformersServe, tmp_path_factory.mktemp("transformers")) as mesh:
        yield mesh


class TestTransformersServe(WithoutPageContract):
    column = route_table.TRANSFORMERS
