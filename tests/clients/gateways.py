"""Gateways that others wrote, as processes whose upstream is the mesh."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.clients import install
from tests.clients.commands import answers
from tests.support.ports import free_ports

MODEL, LABELLED = "tiny", "tiny-labelled"  # the second by the base URL with /labels/NAME
Entries = Sequence[tuple[str, str]]  # models and base URLs; one may have several


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a client asks a running one. `health`: answers 200 once it is ready. `of_model`:
    headers by which a request names its upstream, where the gateway has none of its own."""

    url: str
    health: str
    headers: Mapping[str, str] = field(default_factory=dict)
    of_model: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def asked(self, model: str, **more: object) -> dict[str, Any]:
        """Of a chat for that model: URL, body and headers."""
        return {
            "url": f"{self.url}/chat/completions",
            "json": {"model": _upstreams(model) if self.of_model else model, **more},
            "headers": {**self.headers, **self.of_model.get(model, {})},
        }


@asynccontextmanager
async def litellm(entries: Entries, folder: Path, *, set_up: bool) -> AsyncIterator[Gateway]:
    """LiteLLM's proxy, as it is or `set_up` as docs/gateways.md says."""
    [port], file = free_ports(1), folder / "proxy.yaml"
    models = [
        {
            "model_name": name,
            "litellm_params": {**_KEY, "model": f"openai/{_upstreams(name)}", "api_base": url},
        }
        for name, url in entries
    ]
    config: dict[str, object] = {"model_list": models}
    if set_up:
        config["general_settings"] = {
            "forward_client_headers_to_llm_api": True,
            "cancel_on_disconnect": True,
        }
        config["litellm_settings"] = {"num_retries": 0}
        config["router_settings"] = {"num_retries": 0, "disable_cooldowns": True}
    file.write_text(json.dumps(config))  # JSON is YAML
    programs = install.programs(install.LITELLM)
    command = str(programs / "litellm"), "--config", str(file), "--host", "127.0.0.1"
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    base = f"http://127.0.0.1:{port}"
    async with _runs(*command, "--port", str(port), cwd=folder, env=environment):
        yield Gateway(f"{base}/v1", f"{base}/health/liveliness")


@asynccontextmanager
async def portkey(entries: Entries, folder: Path, *, set_up: bool) -> AsyncIterator[Gateway]:
    """Portkey's gateway: each request names its upstream in headers."""
    [port] = free_ports(1)
    command = install.node(), str(install.PORTKEY), f"--port={port}", "--headless"
    environment = {**os.environ, "TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}
    headers = {"x-portkey-provider": "openai", "authorization": "Bearer unused"}
    if set_up:
        headers["x-portkey-forward-headers"] = "x-mesh-residency,x-mesh-session,x-request-id"
    base = f"http://127.0.0.1:{port}"
    async with _runs(*command, cwd=folder, env=environment):
        hosts = {name: {"x-portkey-custom-host": url} for name, url in entries}
        yield Gateway(f"{base}/v1", base, headers, hosts)


@asynccontextmanager
async def mlflow(entries: Entries, folder: Path, *, set_up: bool) -> AsyncIterator[Gateway]:
    """MLflow's server: asked in its own form of a chat, or `set_up`, in OpenAI's."""
    [port], programs = free_ports(1), install.programs(install.MLFLOW)
    base = f"http://127.0.0.1:{port}"
    command = str(programs / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(folder),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # of evaluations: seven more processes
        "MLFLOW_GATEWAY_API_BASE_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_GATEWAY_API_BASE_ALLOWED_SCHEMES": "http,https",
    }
    async with _runs(*command, "--workers", "1", cwd=folder, env=environment):
        await answers(f"{base}/health")
        for name, url in dict(entries).items():
            await _make_endpoint(f"{base}/api/3.0/mlflow/gateway", name, url)
        form = "openai" if set_up else "mlflow"
        yield Gateway(f"{base}/gateway/{form}/v1", f"{base}/health")


async def _make_endpoint(api: str, name: str, upstream: str) -> None:
    async with aiohttp.ClientSession() as http:

        async def made(what: str, **fields: object) -> dict[str, Any]:
            async with http.post(f"{api}/{what}/create", json=fields) as answer:
                assert answer.status == 200, await answer.text()
                [found] = (await answer.json()).values()
                return found

        of = {"provider": "openai"}
        where = {"auth_config": {"api_base": upstream}, "secret_value": _KEY}
        secret = await made("secrets", secret_name=name, **where, **of)
        uses = {"secret_id": secret["secret_id"], "model_name": _upstreams(name)}
        model = await made("model-definitions", name=name, **uses, **of)
        part = {"model_definition_id": model["model_definition_id"], "linkage_type": "PRIMARY"}
        await made("endpoints", name=name, model_configs=[{**part, "weight": 1.0}])


_KEY = {"api_key": "unused"}
GATEWAYS = {"LiteLLM": litellm, "Portkey": portkey, "MLflow": mlflow}


def _upstreams(model: str) -> str:
    return model.removesuffix(LABELLED.removeprefix(MODEL))


@asynccontextmanager
async def _runs(*command: str, cwd: Path, env: Mapping[str, str]) -> AsyncIterator[None]:
    """A command, for a while; it ends with all its processes."""
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=env, stdout=silent, stderr=silent, start_new_session=True
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
