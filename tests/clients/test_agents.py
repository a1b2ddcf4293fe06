"""Coding agents, set up as docs/clients.md says: each answers one question by itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.clients import install
from tests.clients.commands import output
from tests.clients.table import WORKS, keep

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
MODEL, ASKED = "tiny", "Say hello."


@dataclass(frozen=True, slots=True)
class Agent:
    """How one is called with a mesh's base URL, and what its folder must hold."""

    words: tuple[str, ...]
    files: Callable[[str], Mapping[str, str]] = lambda url: {}
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}


def codex(url: str) -> Mapping[str, str]:
    """With one line, and so by a websocket first."""
    return {".codex/config.toml": f'model = "{MODEL}"\nopenai_base_url = "{url}"\n'}


def codex_provider(url: str) -> Mapping[str, str]:
    lines = (
        f'model = "{MODEL}"',
        'model_provider = "mesh"',
        "[model_providers.mesh]",
        'name = "mesh"',
        f'base_url = "{url}"',
        'wire_api = "responses"',
    )
    return {".codex/config.toml": "\n".join(lines)}


def opencode(url: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url},
        "models": {MODEL: {"limit": {"context": 32768, "output": 4096}}},
    }
    return {"opencode.json": json.dumps({"provider": {"mesh": provider}})}


def qwen(url: str) -> Mapping[str, str]:
    """The address is in the environment."""
    model = {"generationConfig": {"contextWindowSize": 32768}}
    return {".qwen/settings.json": json.dumps({"model": model})}


def pi(url: str) -> Mapping[str, str]:
    provider = {
        "baseUrl": url,
        "api": "openai-completions",
        "apiKey": "x",
        "models": [{"id": MODEL, "contextWindow": 32768, "maxTokens": 4096}],
    }
    return {".pi/agent/models.json": json.dumps({"providers": {"mesh": provider}})}


def continued(url: str) -> Mapping[str, str]:
    """Of Continue; JSON is YAML."""
    model = {
        "name": MODEL,
        "model": MODEL,
        "provider": "openai",
        "apiBase": url,
        "apiKey": "x",
        "defaultCompletionOptions": {"contextLength": 32768},
    }
    config = {"name": "mesh", "version": "1.0.0", "schema": "v1", "models": [model]}
    return {"config.yaml": json.dumps(config)}


def llm(url: str) -> Mapping[str, str]:
    models = [{"model_id": MODEL, "model_name": MODEL, "api_base": url}]
    return {"llm/extra-openai-models.yaml": json.dumps(models)}


def cline(url: str) -> Mapping[str, str]:
    """What `cline auth openai -k x -m MODEL -b URL` writes."""
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": "x", "model": MODEL, "baseUrl": url}
    provider = {"settings": settings, "updatedAt": "2000-01-01T00:00:00.000Z"}
    file = {"version": 1, "lastUsedProvider": name, "providers": {name: provider}}
    return {".cline/data/settings/providers.json": json.dumps(file)}


AGENTS = {
    "Codex": Agent(
        ("codex", "exec", "--skip-git-repo-check", ASKED),
        files=codex,
        environment=lambda url: {"OPENAI_API_KEY": "x"},
    ),
    "Codex, a provider of its own": Agent(
        ("codex", "exec", "--skip-git-repo-check", ASKED), files=codex_provider
    ),
    "Claude Code": Agent(
        ("claude", "-p", ASKED),
        environment=lambda url: {
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "x",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "OpenCode": Agent(("opencode", "run", "--model", f"mesh/{MODEL}", ASKED), files=opencode),
    "qwen-code": Agent(
        ("qwen", "--auth-type", "openai", "-p", ASKED),
        files=qwen,
        environment=lambda url: {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "x",
            "OPENAI_MODEL": MODEL,
        },
    ),
    "pi": Agent(("pi", "--provider", "mesh", "--model", MODEL, "-p", ASKED), files=pi),
    "Continue": Agent(("cn", "--config", "config.yaml", "-p", ASKED), files=continued),
    "llm": Agent(("llm", "-m", MODEL, ASKED), files=llm),
    "cline": Agent(
        ("cline", ASKED),
        files=cline,
        # Else cline starts a hub of its sessions, a process that goes on after the answer.
        environment=lambda url: {"CLINE_SESSION_BACKEND_MODE": "local"},
    ),
    "aider": Agent(
        ("aider", "--model", f"openai/{MODEL}", "--no-git", "--message", ASKED),
        environment=lambda url: {
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "x",
            "AIDER_ANALYTICS_DISABLE": "true",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",  # it offers to open a page about them
        },
    ),
}


@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_is_answered(url, tmp_path: Path, name: str):
    agent = AGENTS[name]
    for file, text in agent.files(url).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    command, *words = agent.words
    said = await output(
        *(str(install.agent(command)), *words),
        cwd=tmp_path,
        **agent.environment(url),
        HOME=str(tmp_path),
        LLM_USER_PATH=str(tmp_path / "llm"),
        PATH=f"{Path(install.node()).parent}:/usr/bin:/bin",
    )
    assert said.strip()
    async with aiohttp.ClientSession() as http:
        page = await (await http.get(url.removesuffix("/v1") + "/metrics")).text()
    answered = [line for line in page.splitlines() if line.startswith("mesh_requests_total{")]
    assert any('outcome="ok"' in line for line in answered), answered
    keep(name, {"one question": WORKS})
