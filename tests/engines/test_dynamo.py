"""The mesh over Dynamo's mocker behind its own frontend: `make test-engines`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.engines import install, route_table
from tests.engines.contract import EngineContract
from tests.engines.engine import LOOPBACK, RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.programs.bench.systems.dynamo import LONE_FRONTEND, dynamo_group
from tests.programs.bench.systems.system import Place
from tests.programs.bench.tiny_model import CONTEXT_TOKENS
from tests.support.ports import free_ports

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(180),
]


class Dynamo(RealEngine):
    """A frontend with an API, over a mocker with the metrics."""

    kind = "vllm"
    running = "vllm:num_requests_running"
    waiting = "vllm:num_requests_waiting"
    kv_used_ratio = "vllm:kv_cache_usage_perc"
    batch_max = 4
    context_tokens = CONTEXT_TOKENS

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.metrics_port}/metrics"

    async def _start(self, log: str) -> list[int]:
        [self.metrics_port] = free_ports(1) if not self.pids else [self.metrics_port]
        place = Place(self.processes, (), self.directory)
        group = await dynamo_group(place, install.programs(install.DYNAMO), log)
        mocker = await group.mocker(
            self.metrics_port,
            (
                *("--num-gpu-blocks-override", "1024", "--block-size", "16"),
                *("--max-model-len", str(self.context_tokens)),
                *("--max-num-seqs", str(self.batch_max), "--max-num-batched-tokens", "512"),
            ),
        )
        frontend, _ = await group.frontend(*LONE_FRONTEND, port=self.port)
        return [mocker, frontend]

    @asynccontextmanager
    async def hung(self) -> AsyncIterator[None]:
        """Started anew: its frontend forgets a mocker that stood still for some ten seconds."""
        async with super().hung():
            yield
        await self.kill()
        await self.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Dynamo, tmp_path_factory.mktemp("dynamo")) as mesh:
        yield mesh


class TestDynamo(EngineContract):
    column = route_table.DYNAMO
    too_long_says = "Internal server error"  # all that it says
