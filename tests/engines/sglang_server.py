"""SGLang on the CPU, as its makers ship it, but for the kernels that it has for CPUs with AMX.

Without those it computes with torch alone, a page of its cache being one token. Its scheduler
looks for work without a pause; it sleeps here instead, as several share a core.
"""

from collections.abc import Mapping
from pathlib import Path

import orjson

from schemas.kv_transfer import KvRole
from tests.engines import install
from tests.engines.engine import LOOPBACK, MODEL, RealEngine
from tests.engines.tiny_llama import CONTEXT_TOKENS
from tests.programs.bench.installs import ROOT
from tests.programs.bench.processes import Processes
from tests.support.ports import free_ports

START_WITHIN_S = 900.0  # it imports torch in three processes, on a busy machine for minutes
CACHE_TOKENS = 16_384
STAND_IN = ROOT / "tests" / "engines" / "on_cpu"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(STAND_IN),
    "SGLANG_USE_CPU_ENGINE": "1",
}


class Sglang(RealEngine):
    kind = "sglang"
    running = "sglang:num_running_reqs"
    waiting = "sglang:num_queue_reqs"
    kv_used_ratio = "sglang:token_usage"
    batch_max = 4
    context_tokens = CONTEXT_TOKENS
    start_within_s = START_WITHIN_S
    cache_tokens = CACHE_TOKENS
    more: tuple[str, ...] = ("--enable-response-store",)  # options
    environment: Mapping[str, str] = ENVIRONMENT

    async def _start(self, log: str) -> list[int]:
        key = ("--api-key", self.api_key) if self.api_key else ()
        [rendezvous] = free_ports(1)  # of its processes; one that it picks may be taken meanwhile
        pid = await self.processes.start(
            log,
            (
                *(str(install.programs(install.SGLANG) / "python"), "-m", "sglang.launch_server"),
                *("--model-path", str(install.llama()), "--served-model-name", MODEL),
                *("--host", LOOPBACK, "--port", str(self.port), "--device", "cpu"),
                *("--nccl-port", str(rendezvous)),
                *("--dtype", "float32", "--attention-backend", "torch_native"),
                *("--context-length", str(CONTEXT_TOKENS), "--sleep-on-idle"),
                *("--max-total-tokens", str(self.cache_tokens)),
                *("--max-running-requests", str(self.batch_max)),
                *("--enable-metrics", "--enable-cache-report", "--decode-log-interval", "1"),
                *key,
                *self.more,
            ),
            ready=self.processes.answers(f"{self.url}/health"),
            environment=self.environment,
        )
        return [pid]

    def hanging_pid(self) -> int:
        """The scheduler; the process that speaks HTTP goes on."""
        [scheduler] = (pid for pid in self.members() if _name(pid).startswith("sglang::schedul"))
        return scheduler


class PublishingSglang(Sglang):
    """With KV events, of pages of 16 tokens."""

    def __init__(self, processes: Processes, name: str, directory: Path, api_key: str = "") -> None:
        super().__init__(processes, name, directory, api_key)
        events, replay = free_ports(2)
        self.kv_events, self.kv_events_replay = (f"tcp://{LOOPBACK}:{p}" for p in (events, replay))
        config = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        options = ("--page-size", "16", "--kv-events-config", orjson.dumps(config).decode())
        self.more = (*self.more, *options)


class PairedSglang(Sglang):
    """One of a pair; its KV caches travel over TCP by Mooncake, which is made for RDMA."""

    environment: Mapping[str, str] = {**ENVIRONMENT, "MC_FORCE_TCP": "1"}
    role: KvRole

    def __init__(self, processes: Processes, name: str, directory: Path, api_key: str = "") -> None:
        super().__init__(processes, name, directory, api_key)
        [bootstrap] = free_ports(1)
        self.kv_address = f"{LOOPBACK}:{bootstrap}"
        self.more = (
            *("--disaggregation-mode", self.role.value),
            *("--disaggregation-transfer-backend", "mooncake"),
            *("--disaggregation-bootstrap-port", str(bootstrap)),
        )


class PrefillSglang(PairedSglang):
    role = KvRole.PREFILL


class DecodeSglang(PairedSglang):
    role = KvRole.DECODE


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
