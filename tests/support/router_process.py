"""`mesh router` with several workers as a real process, and how to look at one of them."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nats_regions import mesh_toml
from tests.support.ports import free_ports, free_row
from tests.support.until import PATIENCE_S


class RouterProcess:
    """One `mesh router` of region us."""

    def __init__(
        self, process: asyncio.subprocess.Process, http: int, pages: int, scheme: str = "http"
    ) -> None:
        self.process = process
        self.url = f"{scheme}://127.0.0.1:{http}"
        self.http_port, self._pages = http, pages

    @property
    def pid(self) -> int:
        return self.process.pid

    def workers(self) -> list[int]:
        """The processes of its workers, oldest first."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def page(self, worker: int) -> str:
        return f"http://127.0.0.1:{self._pages + worker}"

    async def sample(self, session: aiohttp.ClientSession, worker: int, name: str) -> float | None:
        """The sum of a series on a worker's page; None while it has none."""
        try:
            async with session.get(self.page(worker) + "/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientConnectionError:
            return None
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        return sum(found) if found else None

    async def until_serves(self, worker: int) -> None:
        """Wait until that worker would place requests, and the endpoint listens, which is later."""
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while True:
                assert self.process.returncode is None, await self.end()
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(self.page(worker) + "/ready") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.02)
        await self.until_answers("/health")

    async def until_answers(self, path: str) -> None:
        """Wait until the endpoint answers 200 there, with whichever certificate."""
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while True:
                assert self.process.returncode is None, await self.end()
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(self.url + path, ssl=False) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.02)

    async def end(self) -> tuple[int, str, str]:
        """Its status and all that it said, once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def router_process(
    directory: Path,
    nats_url: str,
    *options: str,
    workers: int,
    http: int | None = None,
    pages: int | None = None,
    table: str = "",
    routing: str = "",
) -> AsyncIterator[RouterProcess]:
    """Started, and ended at the end, its workers too. `table`, `routing`: lines of
    the region's table, and of its routing."""
    pages = pages or free_row(workers)[0]
    http = http or free_ports(1)[0]
    lines = f'workers = {workers}\nmetrics = "127.0.0.1:{pages}"\n{table}'
    more = f"{lines}\n[regions.us.routing]\n{routing}"
    config = directory / "mesh.toml"
    config.write_text(mesh_toml(("us",), more={"us": more}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "router", "--region", "us"),
        *("--config", str(config), "--http", f"127.0.0.1:{http}", "--nats-url", nats_url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    router = RouterProcess(process, http, pages, "https" if "tls =" in table else "http")
    try:
        yield router
    finally:
        if process.returncode is None:
            left = router.workers()
            for pid in (process.pid, *left):
                os.kill(pid, signal.SIGKILL)
        await process.communicate()  # ends with the last process that could say something


def runs(pid: int) -> bool:
    """Whether the process is there, and not a mere entry in its parent's books."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between the open and the read
        return False
    return state != "Z"
