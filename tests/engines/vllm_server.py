"""vLLM on the CPU, as its makers ship it, each on one core.

Its scheduler and its worker wait for each other in loops. With a core each they keep its HTTP
server from answering for seconds; on one core the three take turns.
"""

import itertools
import os
from pathlib import Path

import orjson

from tests.engines import install
from tests.engines.engine import LOOPBACK, MODEL, RealEngine
from tests.engines.tiny_llama import CONTEXT_TOKENS
from tests.programs.bench.processes import Processes
from tests.support.ports import free_ports

START_WITHIN_S = 900.0  # it imports torch in three processes, on a busy machine for minutes
KV_GIB = 1
BLOCK_TOKENS = 32
_NUMBERS = itertools.count()  # of engines: each has the next core
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm(RealEngine):
    kind = "vllm"
    running = "vllm:num_requests_running"
    waiting = "vllm:num_requests_waiting"
    kv_used_ratio = "vllm:kv_cache_usage_perc"
    batch_max = 4
    context_tokens = CONTEXT_TOKENS
    start_within_s = START_WITHIN_S
    device_options: tuple[str, ...] = (
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)),
    )
    environment = ENVIRONMENT
    more: tuple[str, ...] = ()  # options
    publishes_kv_events = False
    listed_route = "/invocations"

    def __init__(self, processes: Processes, name: str, directory: Path, api_key: str = "") -> None:
        super().__init__(processes, name, directory, api_key)
        self.number = next(_NUMBERS)
        events, replay = free_ports(2)
        self.kv_events, self.kv_events_replay = (f"tcp://{LOOPBACK}:{p}" for p in (events, replay))

    async def _start(self, log: str) -> list[int]:
        key = ("--api-key", self.api_key) if self.api_key else ()
        pid = await self.processes.start(
            log,
            (
                *(*self._serve(), str(self._model()), *self.device_options),
                *("--served-model-name", MODEL, "--host", LOOPBACK, "--port", str(self.port)),
                *("--max-model-len", str(self.context_tokens)),
                *("--max-num-seqs", str(self.batch_max)),
                *("--enable-prompt-tokens-details", *key, *self._kv_options(), *self.more),
            ),
            ready=self.processes.answers(f"{self.url}/health"),
            environment=self.environment,
        )
        return [pid]

    def _serve(self) -> tuple[str, ...]:
        cores = sorted(os.sched_getaffinity(0))
        core = ("taskset", "--cpu-list", str(cores[self.number % len(cores)]))
        return (*core, str(install.programs(install.VLLM) / "vllm"), "serve")

    def _model(self) -> Path:
        """The folder of the model that it serves."""
        return install.llama()

    def _kv_options(self) -> tuple[str, ...]:
        if not self.publishes_kv_events:
            return ()
        events, replay = (
            address.replace(LOOPBACK, "*") for address in (self.kv_events, self.kv_events_replay)
        )
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
        }
        return ("--kv-events-config", orjson.dumps(config).decode())

    def hanging_pid(self) -> int:
        """The core, which schedules; the process that speaks HTTP goes on."""
        [core] = (pid for pid in self.members() if _name(pid).startswith("VLLM::EngineCor"))
        return core


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
