"""Gateways that others wrote, as processes whose upstream is the mesh."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients import install
from tests.support.ports import free_ports

MODEL, LABELLED = "tiny", "tiny-labelled"  # the second by the base URL with /labels/NAME
SILENT = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a client asks a running one. `health`: answers 200 once it is ready."""

    url: str
    health: str
    headers: Mapping[str, str] = field(default_factory=dict)
    labelled_headers: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def litellm(url: str, labelled: str, folder: Path, *, set_up: bool) -> AsyncIterator[Gateway]:
    """LiteLLM's proxy, as it is or `set_up` as docs/gateways.md says."""
    [port], file = free_ports(1), folder / "proxy.yaml"
    upstreams = {MODEL: url, LABELLED: labelled, "missing": url}
    models = [
        {"model_name": name, "litellm_params": {**_OPENAI, "model": _model(name), "api_base": base}}
        for name, base in upstreams.items()
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
    proxy = await asyncio.create_subprocess_exec(
        *(str(programs / "litellm"), "--config", str(file), "--host", "127.0.0.1"),
        *("--port", str(port)),
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        },
        **SILENT,
    )
    base = f"http://127.0.0.1:{port}"
    async with _ended(proxy):
        yield Gateway(f"{base}/v1", f"{base}/health/liveliness")


@asynccontextmanager
async def portkey(url: str, labelled: str, folder: Path, *, set_up: bool) -> AsyncIterator[Gateway]:
    """Portkey's gateway: each request names its upstream in headers."""
    [port] = free_ports(1)
    gateway = await asyncio.create_subprocess_exec(
        *(install.node(), str(install.PORTKEY), f"--port={port}", "--headless"),
        cwd=folder,
        env={**os.environ, "TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"},
        **SILENT,
    )
    headers = {"x-portkey-provider": "openai", "authorization": "Bearer unused"}
    if set_up:
        headers["x-portkey-forward-headers"] = "x-mesh-residency,x-mesh-session,x-request-id"
    base = f"http://127.0.0.1:{port}"
    async with _ended(gateway):
        yield Gateway(
            f"{base}/v1",
            base,
            {**headers, "x-portkey-custom-host": url},
            {**headers, "x-portkey-custom-host": labelled},
        )


_OPENAI = {"api_key": "unused"}
GATEWAYS = {"LiteLLM": litellm, "Portkey": portkey}


def _model(name: str) -> str:
    return f"openai/{name.removesuffix('-labelled')}"


@asynccontextmanager
async def _ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
