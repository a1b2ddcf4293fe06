"""Engines that show nothing of their load: mlx-lm's server, transformers serve, Ollama."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from tests.engines import install, ollama_install, tiny_gguf
from tests.engines.engine import LOOPBACK, MODEL, RealEngine
from tests.programs.bench.processes import output_of

LOOK_S, LOOK_EVERY_S, LOOK_S_MAX = 0.5, 0.05, 10.0
BUSY_TICKS = 3  # of the CPU, a hundredth of a second each; idle ones use none in so short a time
MODEL_WITHIN_S = 60.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class WithoutPage(RealEngine):
    kind = "openai"
    start_within_s = 600.0  # it imports torch, on a busy machine for minutes
    exact: Mapping[str, object] = {}  # their models never end an answer
    running = waiting = ""
    computes_what_is_left = True  # a plain answer whose client is gone, to its end

    async def computes(self) -> bool:
        """Whether its processes use the CPU. On a busy machine one that would may wait for it: what
        has no thread that could run for a while does not."""
        clock = asyncio.get_running_loop().time
        before, until = sum(map(_ticks, self.members())), clock() + LOOK_S_MAX
        calm_at = clock() + LOOK_S
        while clock() < min(until, calm_at):
            await asyncio.sleep(LOOK_EVERY_S)
            members = self.members()
            if sum(map(_ticks, members)) - before >= BUSY_TICKS:
                return True
            if any(map(_could_run, members)):
                calm_at = clock() + LOOK_S
        return False

    def models(self) -> Path:
        """The folder that it runs in, with the tiny Llama."""
        link = self.directory / MODEL
        if not link.is_symlink():
            link.symlink_to(install.llama())
        return self.directory


class MlxLm(WithoutPage):
    # It lists a model by its path, and none where there is no folder of downloaded ones.
    agent_options = ("--model", MODEL, "--ask-usage", "--batch-max", "2")
    batch_max = 2
    context_tokens = 4096

    async def _start(self, log: str) -> list[int]:
        (self.directory / "hub").mkdir(exist_ok=True)
        command = (str(install.programs(install.MLX_LM) / "mlx_lm.server"), "--model", MODEL)
        pid = await self.processes.start(
            log,
            (*command, "--host", LOOPBACK, "--port", str(self.port)),
            ready=self.processes.answers(f"{self.url}/health"),
            environment={**ENVIRONMENT, "HF_HOME": str(self.directory)},
            directory=self.models(),
        )
        return [pid]


class TransformersServe(WithoutPage):
    ends_done = False
    batch_max = 1
    context_tokens = 4096

    async def _start(self, log: str) -> list[int]:
        command = (str(install.programs(install.TRANSFORMERS) / "transformers"), "serve", MODEL)
        pid = await self.processes.start(
            log,
            (*command, "--device", "cpu", "--host", LOOPBACK, "--port", str(self.port)),
            ready=self.processes.answers(f"{self.url}/health"),
            environment={**ENVIRONMENT, "HF_HOME": str(self.directory)},
            directory=self.models(),
        )
        return [pid]


class Ollama(WithoutPage):
    """One thread: several wait for each other on a machine that does other work."""

    agent_options = ("--ask-usage",)
    batch_max = 1
    context_tokens = 4096
    computes_what_is_left = False
    further_names = (f"{MODEL}:latest",)
    served: tuple[str, ...] = (MODEL,)
    layers = 1  # of the first; each other model has one more: those of the same weights are one

    async def _start(self, log: str) -> list[int]:
        home = self.directory / self.name
        environment = {
            "HOME": str(home),
            "OLLAMA_HOST": f"{LOOPBACK}:{self.port}",
            "OLLAMA_MAX_LOADED_MODELS": "1",
        }
        is_new = not home.is_dir()
        home.mkdir(exist_ok=True)
        program = str(ollama_install.OLLAMA.binary)
        pid = await self.processes.start(
            log,
            (program, "serve"),
            ready=self.processes.answers(f"{self.url}/api/version"),
            environment=environment,
        )
        if is_new:
            await self._make(home, program, environment)
        return [pid]

    async def _make(self, home: Path, program: str, environment: Mapping[str, str]) -> None:
        settings = f"PARAMETER num_thread 1\nPARAMETER num_ctx {self.context_tokens}\n"
        given = ("env", *(f"{key}={value}" for key, value in environment.items()))
        for layers, name in enumerate(self.served, self.layers):
            weights, file = home / f"{name}.gguf", home / name
            tiny_gguf.write(weights, layers=layers, ends=False)
            file.write_text(f"FROM {weights}\n{settings}")
            create = (program, "create", name, "-f", str(file))
            await output_of((*given, *create), within_s=MODEL_WITHIN_S)


def _ticks(pid: int) -> int:
    """That it has used of the CPU; none if it has ended."""
    fields = _stat(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) * 100 // os.sysconf("SC_CLK_TCK") if fields else 0


def _could_run(pid: int) -> bool:
    """Whether one of its threads runs, or waits for a core."""
    states = (_stat(thread)[:1] for thread in Path(f"/proc/{pid}/task").glob("*"))
    return any(state == ["R"] for state in states)


def _stat(of: Path) -> list[str]:
    """The fields behind the name; none if it has ended."""
    try:
        return (of / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
