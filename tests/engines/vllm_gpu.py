"""vLLM on a GPU: the `vllm` on PATH, with a Llama of 2.8 billion parameters without weights.

vLLM makes the weights up at its start (`--load-format dummy`); their values change no time. It
compiles no kernels (mode 0), which would take most of its start, and has CUDA graphs for decoding.
"""

import json
import shutil
from pathlib import Path

from tests.engines.engine import LOOPBACK
from tests.engines.vllm_server import Vllm
from tests.programs.bench import tiny_model
from tests.programs.bench.installs import MODEL_WITHIN_S, ROOT
from tests.programs.bench.processes import Absent, output_of

PROGRAM = "vllm"
SHAPE = {  # of Llama 3.2 3B, but for its vocabulary
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": LOOPBACK, "VLLM_NO_USAGE_STATS": "1"}
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


class VllmOnGpu(Vllm):
    context_tokens = tiny_model.CONTEXT_TOKENS
    device_options = (
        *("--load-format", "dummy", "--dtype", "bfloat16"),
        *("--compilation-config", json.dumps(COMPILATION)),
    )
    environment = ENVIRONMENT

    async def _start(self, log: str) -> list[int]:
        if not self._model().is_dir():
            await make_llama(self._model())
        return await super()._start(log)

    def _serve(self) -> tuple[str, ...]:
        return (str(program()), "serve")

    def _model(self) -> Path:
        return self.directory / "llama"


def program() -> Path:
    """Raises Absent."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise Absent(f"no {PROGRAM} on PATH: install it on a machine with a GPU")
    return Path(found)


async def make_llama(folder: Path) -> None:
    """The model's configuration and tokenizer, by the Python beside vLLM. Raises Absent."""
    python = str(program().with_name("python"))
    texts = map(str, sorted(ROOT.glob("*.md")))
    await output_of((python, tiny_model.__file__, str(folder), *texts), within_s=MODEL_WITHIN_S)
    config = {**tiny_model.CONFIG, **SHAPE}
    (folder / "config.json").write_text(json.dumps(config))
