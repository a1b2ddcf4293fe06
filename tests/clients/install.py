"""Puts the clients that `make test-clients` points at a mesh into environments of their own.

    python -m tests.clients.install

What is there already, made from the same requirements, is kept.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.bench.installs import (
    ENVIRONMENTS,
    ROOT,
    installed,
    is_installed,
    tiny_model,
)
from tests.programs.bench.processes import Absent, output_of

SDKS, LITELLM, MLFLOW, GUIDELLM, AIPERF = "sdks", "litellm", "mlflow", "guidellm", "aiperf"
AIDER = "aider"
NODE = ROOT / "build" / "node" / "clients"
NODE_PACKAGES = ("ai@6", "@ai-sdk/openai@3", "@portkey-ai/gateway@1.15.2")
PORTKEY = NODE / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
AGENTS = ROOT / "build" / "node" / "agents"
AGENT_PACKAGES = (
    "@openai/codex@0.171.0",
    "@anthropic-ai/claude-code@2.1.332",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.24.4",
    "@mariozechner/pi-coding-agent@0.73.1",
    "@continuedev/cli@1.5.47",
    "cline@3.0.65",
)
AGENT_COMMANDS = ("codex", "claude", "opencode", "qwen", "pi", "cn", "cline")
AGENTS_IN_PYTHON = {"llm": SDKS, "aider": AIDER}
TOKENIZER = ENVIRONMENTS.parent / "models" / "clients"
NPM_WITHIN_S = 300.0


def programs(name: str) -> Path:
    """The folder of an installed client's commands."""
    assert is_installed(name, ENVIRONMENTS), f"make test-clients installs {name}"
    return ENVIRONMENTS / name / "bin"


def node() -> str:
    """Node's command."""
    found = shutil.which("node")
    assert found is not None, "make test-clients needs node 20 or newer"
    return found


async def make_tokenizer() -> None:
    """A tokenizer for the load generators, which count tokens themselves."""
    if TOKENIZER.is_dir():
        return
    part = TOKENIZER.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    await tiny_model(programs(AIPERF), part)
    part.rename(TOKENIZER)


async def install_node() -> None:
    """Vercel's packages and Portkey's gateway, and coding agents. Raises Absent."""
    # Portkey's gateway answers each stream with 500 over a newer one.
    fixed = {"@hono/node-server": "1.13.8"}
    if not ((NODE / "node_modules" / "ai").is_dir() and PORTKEY.is_file()):
        await _npm_install(NODE, NODE_PACKAGES, fixed)
    if not all(agent(name).exists() for name in AGENT_COMMANDS):
        await _npm_install(AGENTS, AGENT_PACKAGES, {})


def agent(name: str) -> Path:
    """The command of a coding agent, of Node's packages or of a Python environment."""
    if name in AGENTS_IN_PYTHON:
        return programs(AGENTS_IN_PYTHON[name]) / name
    return AGENTS / "node_modules" / ".bin" / name


async def _npm_install(folder: Path, packages: Sequence[str], overrides: Mapping[str, str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Absent("some clients run with Node: install node 20 or newer, and npm")
    folder.mkdir(parents=True, exist_ok=True)
    project = {"private": True, "overrides": overrides}
    (folder / "package.json").write_text(json.dumps(project))
    words = ("install", "--silent", "--no-audit", "--no-fund", *packages)
    await output_of((npm, "--prefix", str(folder), *words), within_s=NPM_WITHIN_S)


async def main() -> None:
    """Install all that is missing."""
    for name in (SDKS, AIDER, LITELLM, MLFLOW, GUIDELLM, AIPERF):
        if is_installed(name, ENVIRONMENTS):
            continue
        print(f"installing {name}, which takes minutes", flush=True)
        began = time.monotonic()
        await installed(name, ENVIRONMENTS)
        print(f"installed {name} in {time.monotonic() - began:.0f} s", flush=True)
    await install_node()
    await make_tokenizer()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except Absent as problem:
        sys.exit(str(problem))
