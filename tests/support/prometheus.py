"""A real Prometheus on a free port, which scrapes the pages of a running mesh."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.support.mesh_up import MeshUp
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S


class Prometheus:
    """A running one; `ask` calls its HTTP API."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of `/api/v1/…`."""
        async with self._http.get(f"{self.url}/api/v1/{path}", params=parameters) as answer:
            reply = await answer.json()
            assert reply["status"] == "success", reply
            return reply["data"]

    async def values(self, expression: str) -> list[float]:
        """What an instant query gives, but for NaN: no answer."""
        found = await self.ask("query", query=expression)
        values = [float(sample["value"][1]) for sample in found["result"]]
        return [value for value in values if value == value]

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.get(f"{self.url}/-/ready") as answer:
                return answer.status == 200
        return False


def scrape_config(mesh: MeshUp, rules: Path) -> dict[str, Any]:
    """As infra/compose/prometheus.yml: a job for each kind of process, the label `region`."""
    jobs = {"mesh-router": "metrics", "mesh-batch-runner": "batch_runners"}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {
                        "targets": [page.split("/")[2] for page in region[pages].values()],
                        "labels": {"region": name},
                    }
                    for name, region in mesh.record["regions"].items()
                ],
            }
            for job, pages in jobs.items()
        ],
    }


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path, config: dict[str, Any]) -> AsyncIterator[Prometheus]:
    """Started with that configuration, ready, and ended."""
    [port] = free_ports(1)
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config))
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            *(f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
            stdout=out,
            stderr=out,
        )
    try:
        async with aiohttp.ClientSession() as http:
            prometheus = Prometheus(f"http://127.0.0.1:{port}", http)
            async with asyncio.timeout(PATIENCE_S):
                while not await prometheus.is_ready():
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
