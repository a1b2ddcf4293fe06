"""The mesh over the simulated engine's own process: the routes that it answers, and what it has
cached of a coding agent's prompts."""

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import route_table, routes
from tests.engines.contract import CodingAgentContract
from tests.engines.engine import MODEL, RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


class Simulated(RealEngine):
    kind = "vllm"
    running = "vllm:num_requests_running"
    waiting = "vllm:num_requests_waiting"
    batch_max = 256
    context_tokens = 100_000
    listed_route = "/echo"

    async def _start(self, log: str) -> list[int]:
        command = (sys.executable, "-m", "agents.cli", "engine-sim", "--port", str(self.port))
        ready = self.processes.answers(f"{self.url}/health")
        return [await self.processes.start(log, (*command, "--model", MODEL), ready=ready)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Simulated, tmp_path_factory.mktemp("simulated"), ("",)) as mesh:
        yield mesh


class TestSimulated(CodingAgentContract):
    begin_alike = (True, True, True, True)

    async def test_its_routes_are_those_of_the_table(self, mesh):
        route_table.check(route_table.SIMULATED, await routes.found(mesh))
