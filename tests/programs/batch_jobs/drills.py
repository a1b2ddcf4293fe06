"""Kills parts of a running mesh in the middle of batch jobs; every line is answered exactly once.

    make drills                     # with the other drills
    python -m tests.programs.batch_jobs.drills --lines 10000 --only router

One mesh of three regions. For each drill a job is submitted in us; when a fifth of its lines is
answered the fault is done; when the job has ended every `custom_id` must be in its output exactly
once. Killed is SIGKILL: `mesh up` starts what was killed again, as systemd does.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import click
import openai

from infra import topology
from mesh.demo.options import DemoOptions
from mesh.demo.session import served_models
from mesh.demo.state_directory import StateDirectory
from schemas.ids import RegionId, RouterId
from tests.programs.batch_jobs.job import Answers, JobClient, input_file
from tests.programs.fault_run.breaking import Breakable
from tests.programs.fault_run.schedule import KILL, Fault, Kind
from tests.support.mesh_up import RTT_MS, write_config
from tests.support.result_page import result_page

HOME = RegionId("us")
FIRST = RouterId("r1")
ROUTERS = (FIRST, "r2")
RUNNERS = ("batch-0", "batch-1")
WITHIN_S = 900.0
FILLER_BYTES = 4 * 1024 * 1024
STORE_MIB = 256


class Drills:
    """Those of one mesh."""

    def __init__(self, broken: Breakable, endpoint: str, model: str, lines: int) -> None:
        self._broken = broken
        self._endpoint = endpoint
        self.client = JobClient(endpoint)
        self._model = model
        self._lines = lines

    def all(self) -> dict[str, Callable[[], Awaitable[list[str]]]]:
        """Each returns what went wrong."""
        return {
            "none": self._quiet,
            "agent": self._kill(f"agent-{HOME}-0"),
            "engine": self._kill(f"engine-{HOME}-0"),
            "router": self._kill(f"router-{HOME}-r1"),
            "runner": self._kill(f"batch-runner-{HOME}-batch-0"),
            "nats-server": self._kill(f"nats-{HOME}"),
            "all routers": self._kill(*(f"router-{HOME}-{name}" for name in ROUTERS)),
            "all runners": self._kill(*(f"batch-runner-{HOME}-{name}" for name in RUNNERS)),
            "peer's nats-server": self._kill("nats-eu"),
            "full store": self._full_store,
            "upload cut": self._cut_upload,
        }

    async def _quiet(self) -> list[str]:
        return (await self._job(None)).problems(self._lines)

    def _kill(self, *programs: str) -> Callable[[], Awaitable[list[str]]]:
        fault = Fault(Kind.ROUTER_KILLED, programs, None, KILL, 0.0)

        async def drill() -> list[str]:
            async def kill() -> None:
                await self._broken.do(fault, lambda name: None)

            return (await self._job(kill)).problems(self._lines)

        return drill

    async def _job(self, fault: Callable[[], Awaitable[None]] | None) -> Answers:
        began = time.monotonic()
        batch = await self.client.submit(input_file(self._model, self._lines))
        if fault is not None:
            await self.client.until(
                batch.id,
                lambda batch: (
                    batch.request_counts is not None
                    and batch.request_counts.completed >= self._lines // 5
                ),
                WITHIN_S,
            )
            await fault()
        found = await self.client.answers(batch.id, began, WITHIN_S)
        click.echo(f"  {found.seconds:.0f} s, {found.answered} answered", err=True)
        await self.client.delete_files(await self.client.get(batch.id))
        return found

    async def _full_store(self) -> list[str]:
        """Fill the store with uploads; the job's output has room left, and nothing is lost."""
        fillers: list[str] = []
        problems: list[str] = []

        async def fill() -> None:
            for size in (FILLER_BYTES, FILLER_BYTES // 16, FILLER_BYTES // 256):
                while True:
                    try:
                        file = await self.client.openai.files.create(
                            file=("filler.jsonl", b"x" * size), purpose="batch"
                        )
                    except openai.APIStatusError as error:
                        if error.status_code != 507:
                            problems.append(f"a full store answers {error.status_code}, not 507")
                        break
                    fillers.append(file.id)

        async def make_room() -> None:
            await self.client.until(
                batch.id, lambda batch: batch.status in ("finalizing", "completed"), WITHIN_S
            )
            for file in fillers:
                await self.client.openai.files.delete(file)

        began = time.monotonic()
        batch = await self.client.submit(input_file(self._model, self._lines))
        await fill()
        await make_room()
        found = await self.client.answers(batch.id, began, WITHIN_S)
        click.echo(f"  {found.seconds:.0f} s, {found.answered} answered", err=True)
        await self.client.delete_files(await self.client.get(batch.id))
        return problems + found.problems(self._lines)

    async def _cut_upload(self) -> list[str]:
        """An upload whose connection is cut in the middle leaves no file."""
        before = [file.id async for file in self.client.openai.files.list()]
        data = input_file(self._model, self._lines)

        async def half() -> AsyncIterator[bytes]:
            head = (
                b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
                b'Content-Disposition: form-data; name="file"; filename="job.jsonl"\r\n\r\n'
            )
            yield head + data[: len(data) // 2]
            raise ConnectionAbortedError("the client is gone")

        headers = {
            "content-type": "multipart/form-data; boundary=b",
            "content-length": str(len(data) + 200),
        }
        async with aiohttp.ClientSession() as session:
            try:
                await session.post(f"{self._endpoint}/v1/files", data=half(), headers=headers)
            except (aiohttp.ClientError, ConnectionAbortedError):
                pass
            else:
                return ["the upload that was cut was answered"]
        after = [file.id async for file in self.client.openai.files.list()]
        return (
            [] if after == before else [f"an upload that was cut left {set(after) - set(before)}"]
        )


def configured(directory: Path) -> Path:
    """A mesh.toml with two routers and two batch runners a region."""
    config = write_config(
        directory, replicas=2, routers=ROUTERS, batch_runners=RUNNERS, rtt_ms=RTT_MS
    )
    limits = f"[batch]\nfiles_mib = {STORE_MIB}\nfile_mib_max = {STORE_MIB // 4}\n"
    config.write_text(f"{config.read_text()}\n{limits}")
    return config


async def play(directory: Path, lines: int, only: tuple[str, ...]) -> dict[str, list[str]]:
    """What went wrong in each drill."""
    config = configured(directory)
    state = StateDirectory(directory / ".mesh")
    options = DemoOptions(config=config, state=state.path, time_scale=50.0)
    with state.held():
        broken = Breakable(topology.load(config), options, state)
        async with broken.mesh as mesh:
            await mesh.start()
            [model] = await served_models(topology.load(config))
            endpoint = f"http://{mesh.endpoints[HOME][FIRST]}"
            drills = Drills(broken, endpoint, model, lines)
            results = {}
            for name, drill in drills.all().items():
                if only and name not in only:
                    continue
                click.echo(f"{name}:", err=True)
                try:
                    results[name] = await drill()
                except TimeoutError as error:
                    results[name] = [str(error)]
                results[name] += broken.ended_by_themselves
                broken.ended_by_themselves.clear()
            return results


@result_page("batch-drills", "Batch jobs while parts of the mesh are killed")
@click.command()
@click.option("--lines", type=click.IntRange(10), default=10_000, show_default=True)
@click.option("--only", multiple=True, help="A drill's name; more than one may be given.")
def main(lines: int, only: tuple[str, ...]) -> None:
    """Kill parts of a mesh in the middle of a batch job."""
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(play(Path(name), lines, only))
    click.echo(f"{lines:,} lines a job; a part is killed when a fifth is answered.\n")
    click.echo("| killed | every custom_id exactly once |\n|---|---|")
    for name, problems in results.items():
        click.echo(f"| {name} | {'; '.join(problems) or 'yes'} |")
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
