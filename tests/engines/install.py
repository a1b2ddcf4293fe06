"""Puts the engines that `make test-engines` needs into environments of their own.

    python -m tests.engines.install [NAME...]

What is there already, made from the same requirements, is kept. vLLM and SGLang bring a torch each:
6 GB. llama.cpp is not among them: it is one of the development requirements.
"""

import asyncio
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tests.engines import ollama_install, sglang_install, tiny_llama, vllm_install
from tests.programs.bench import tiny_model
from tests.programs.bench.installs import (
    ENVIRONMENTS,
    MODEL_WITHIN_S,
    ROOT,
    installed,
    is_installed,
)
from tests.programs.bench.processes import Absent, output_of

VLLM, SGLANG, DYNAMO = "vllm", "sglang", "dynamo"
MLX_LM, TRANSFORMERS, OLLAMA = "mlx-lm", "transformers", "ollama"
SCRIPTS = {
    TRANSFORMERS: None,  # makes the model
    MLX_LM: None,
    DYNAMO: None,
    VLLM: Path(vllm_install.__file__),
    SGLANG: Path(sglang_install.__file__),
}
MODELS = ENVIRONMENTS.parent / "models"
WORDS = 256
_MADE_BY = (tiny_llama.__file__, tiny_model.__file__)


def programs(name: str) -> Path:
    """The folder of an installed engine's commands."""
    assert is_installed(name, ENVIRONMENTS, SCRIPTS[name]), f"make test-engines installs {name}"
    return ENVIRONMENTS / name / "bin"


def llama() -> Path:
    """The folder of the model for all but llama.cpp and Ollama, made or to be made."""
    made_by = "".join(Path(file).read_text() for file in _MADE_BY)
    return MODELS / f"llama-{hashlib.sha256(made_by.encode()).hexdigest()[:12]}"


async def make_llama() -> None:
    """Make it, if it isn't there whole. Raises Absent."""
    folder = llama()
    if folder.is_dir():
        return
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    texts = map(str, sorted(ROOT.glob("*.md")))
    python = str(programs(TRANSFORMERS) / "python")
    module = (python, "-m", tiny_llama.__name__, str(part), *texts)
    await output_of(("env", f"PYTHONPATH={ROOT}", *module), within_s=MODEL_WITHIN_S)
    part.rename(folder)


def words_of_llama() -> list[int]:
    """Some of its tokens that are a word with the space before it: however many of them stand in a
    row, their text is read as the same tokens."""
    known = json.loads((llama() / "tokenizer.json").read_text())["model"]["vocab"]
    words = [id_ for text, id_ in known.items() if re.fullmatch("\u0120[a-z]{4,}", text)]
    return sorted(words)[:WORDS]


async def main(names: Collection[str]) -> None:
    """Install and make all that is missing of these engines."""
    for name in names:
        if name == OLLAMA:
            ollama_install.install()
            continue
        script = SCRIPTS[name]
        if is_installed(name, ENVIRONMENTS, script):
            continue
        print(f"installing {name} into {ENVIRONMENTS / name}, which takes minutes", flush=True)
        began = time.monotonic()
        await installed(name, ENVIRONMENTS, script)
        print(f"installed {name} in {time.monotonic() - began:.0f} s", flush=True)
    if set(names) - {OLLAMA, DYNAMO}:
        await make_llama()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:] or [*SCRIPTS, OLLAMA]))
    except Absent as problem:
        sys.exit(str(problem))
