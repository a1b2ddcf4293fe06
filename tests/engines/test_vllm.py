"""The mesh over vLLM on the CPU: `make test-engines`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines import install
from tests.engines.contract import KEYS, KeyedEngineContract
from tests.engines.engine import LOOPBACK, MODEL, RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.tiny_llama import CONTEXT_TOKENS, KV_BYTES_PER_TOKEN

START_WITHIN_S = 400.0  # it imports torch in three processes
KV_GIB = 1
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(2 * START_WITHIN_S),
]


class Vllm(RealEngine):
    kind = "vllm"
    running = "vllm:num_requests_running"
    waiting = "vllm:num_requests_waiting"
    kv_used_ratio = "vllm:kv_cache_usage_perc"
    batch_max = 4
    context_tokens = CONTEXT_TOKENS
    start_within_s = START_WITHIN_S

    async def _start(self, log: str) -> list[int]:
        key = ("--api-key", self.api_key) if self.api_key else ()
        pid = await self.processes.start(
            log,
            (
                *(str(install.programs(install.VLLM) / "vllm"), "serve", str(install.llama())),
                *("--served-model-name", MODEL, "--host", LOOPBACK, "--port", str(self.port)),
                *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
                *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(self.batch_max)),
                *("--enable-prompt-tokens-details", *key),
            ),
            ready=self.processes.answers(f"{self.url}/health"),
            environment={
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_HOST_IP": LOOPBACK,
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
        return [pid]

    def hanging_pid(self) -> int:
        """The core, which schedules; the process that speaks HTTP goes on."""
        [core] = (pid for pid in self.members() if _name(pid).startswith("VLLM::EngineCor"))
        return core


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Vllm, tmp_path_factory.mktemp("vllm"), KEYS) as mesh:
        yield mesh


class TestVllm(KeyedEngineContract):
    async def test_the_heartbeat_knows_how_much_its_cache_holds(self, mesh):
        assert mesh.beats["us-0"].kv_capacity_tokens == KV_GIB * 1024**3 // KV_BYTES_PER_TOKEN
