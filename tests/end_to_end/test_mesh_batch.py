"""`mesh batch` over a real mesh: a job whose router dies while somebody waits for it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from tests.mesh.batch_client.test_input_file import line
from tests.support.mesh_command import mesh_command
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.until import PATIENCE_S, until

LINES = 60


@contextlib.asynccontextmanager
async def started(
    mesh: MeshUp, folder: Path, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """`mesh batch` at the region's endpoint, and the file that it writes its stderr to."""
    errors = folder / f"{arguments[0]}.err"
    with errors.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mesh.cli.main", "batch", *arguments),
            *("--endpoint", mesh.endpoint("us") + "/v1"),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
        )
    try:
        yield process, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def output_of(mesh: MeshUp, *arguments: str) -> str:
    endpoint = mesh.endpoint("us") + "/v1"
    status, out, err = await mesh_command("batch", *arguments, "--endpoint", endpoint)
    assert status == 0, err
    return out


def input_file(folder: Path, model: str) -> str:
    body = {"model": model, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
    path = folder / "in.jsonl"
    path.write_text("".join(line(f"{n}", body=body) + "\n" for n in range(LINES)))
    return str(path)


@contextlib.contextmanager
def paused_runner(mesh: MeshUp) -> Iterator[None]:
    """No job goes on meanwhile."""
    runner = mesh.record["processes"]["batch-runner-us-batch-0"]
    os.kill(runner, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(runner, signal.SIGCONT)


async def killed_until(mesh: MeshUp, program: str, condition: Callable[[], bool]) -> None:
    """Kill it, and again when it is back: it may be sooner than its client looks once a second."""
    last = 0
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            if (pid := mesh.record["processes"].get(program, last)) != last:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            last = pid
            await asyncio.sleep(0.02)


async def test_a_job_ends_well_though_the_router_dies_that_its_client_waits_at(tmp_path):
    config = write_config(tmp_path, regions=("us",), batch_runners=("batch-0",))
    async with mesh_up(tmp_path, config=config) as mesh:
        file = input_file(tmp_path, mesh.model)
        async with contextlib.AsyncExitStack() as stack:
            with paused_runner(mesh):
                job = (await output_of(mesh, "submit", file)).strip()
                wait = started(mesh, tmp_path, "wait", job)
                waiting, errors = await stack.enter_async_context(wait)
                await until(lambda: "validating" in errors.read_text())
                await killed_until(
                    mesh, "router-us-r1", lambda: "no answer from" in errors.read_text()
                )
            async with asyncio.timeout(PATIENCE_S):
                assert await waiting.wait() == 0, errors.read_text()

        out = tmp_path / "answers.jsonl"
        await output_of(mesh, "output", job, "-o", str(out))
        answers = [json.loads(each) for each in out.read_text().splitlines()]
        assert sorted(int(each["custom_id"]) for each in answers) == list(range(LINES))
        assert {each["response"]["status_code"] for each in answers} == {200}
        assert not (tmp_path / "answers.errors.jsonl").exists()

        with paused_runner(mesh):
            second = (await output_of(mesh, "submit", file)).strip()
            assert "cancelling" in await output_of(mesh, "cancel", second)
        async with started(mesh, tmp_path, "wait", second) as (cancelled, _):
            async with asyncio.timeout(PATIENCE_S):
                assert await cancelled.wait() == 1
        listed = json.loads(await output_of(mesh, "list", "--json"))
        status = {each["id"]: each["status"] for each in listed}
        assert status == {second: "cancelled", job: "completed"}
        [done] = [each["request_counts"] for each in listed if each["id"] == job]
        assert done == {"total": LINES, "completed": LINES, "failed": 0}
        assert await mesh.stop() == 0
