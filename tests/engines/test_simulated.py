"""The mesh over the simulated engine's own process: the routes that it answers."""

import sys

import pytest

from tests.engines import coding_agent, route_table, routes
from tests.engines.engine import MODEL, RealEngine
from tests.engines.mesh_over_engines import mesh_over

pytestmark = pytest.mark.timeout(120)


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


async def test_its_routes_are_those_of_the_table(tmp_path):
    async with mesh_over(Simulated, tmp_path, ("",)) as mesh:
        route_table.check(route_table.SIMULATED, await routes.found(mesh))


async def test_what_is_cached_of_a_coding_agents_prompts_is_expected(tmp_path):
    async with mesh_over(Simulated, tmp_path, ("",)) as mesh:
        _, *later = await coding_agent.asked(mesh, "simulated")
    coding_agent.check(later)
    assert all(found.cached > coding_agent.WITHIN for found in later)
