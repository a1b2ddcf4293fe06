"""The command as its own process: it says where it serves, and ends when it must."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agents.simserver.server import CRASH_EXIT_CODE
from infra.process import end_all
from tests.agents.simserver.support import MODEL, Engine, chat
from tests.support.until import PATIENCE_S


@contextlib.asynccontextmanager
async def engine_process(
    tmp_path: Path, *options: str, model: tuple[str, ...] = ("--model", MODEL)
) -> AsyncIterator[tuple[Process, str]]:
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents.cli", "engine-sim"),
        *(*model, "--time-scale", "20", "--ready-file", str(ready), *options),
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            said = await process.stdout.readline()
        ready_fields = json.loads(ready.read_text())
        assert ready_fields["pid"] == process.pid
        assert ready_fields["url"] in said.decode()
        yield process, ready_fields["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_serves_on_a_free_port_and_ends_at_sigterm_even_with_open_streams(tmp_path):
    async with (
        engine_process(tmp_path, "--metrics", "sglang") as (process, url),
        aiohttp.ClientSession() as http,
        http.post(
            f"{url}/v1/chat/completions",
            json=chat(max_tokens=30_000, ignore_eos=True, stream=True),
        ) as response,
    ):
        assert url.startswith("http://127.0.0.1:")
        assert await response.content.readany()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_the_middle_of_an_answer_is_one_line(tmp_path, stream):
    """Those that leave shortly after it are counted in the next line of its kind."""
    async with (
        engine_process(tmp_path) as (process, url),
        aiohttp.ClientSession() as http,
    ):
        engine = Engine(url, http)
        for _ in range(2):
            body = chat(max_tokens=30_000, ignore_eos=True, stream=stream)
            asking = asyncio.create_task(engine.post("/v1/chat/completions", body))
            await engine.until(lambda seen: seen["vllm:num_requests_running"] == 1)
            await end_all([asking])
            await engine.until(lambda seen: seen["vllm:num_requests_running"] == 0)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            _, said = await process.communicate()
    lines = said.decode().splitlines()
    assert 1 <= len(lines) <= 2, "two, where the second one leaves much later"
    assert all(line.endswith(": its client left before the end of the answer") for line in lines)


@pytest.mark.parametrize(
    ("profile", "model"),
    [("l4-llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"), ("chapter-23.2", "chapter-23.2")],
)
async def test_it_serves_the_model_of_its_profile(tmp_path, profile, model):
    async with (
        engine_process(tmp_path, "--profile", profile, model=()) as (_, url),
        aiohttp.ClientSession() as http,
        http.get(f"{url}/v1/models") as response,
    ):
        assert [each["id"] for each in (await response.json())["data"]] == [model]


async def test_a_crash_takes_the_process_away_after_that_many_tokens(tmp_path):
    async with (
        engine_process(tmp_path, "--fault", "crash_after_tokens=3") as (process, url),
        aiohttp.ClientSession() as http,
    ):
        received = b""
        with pytest.raises(aiohttp.ClientError):
            async with http.post(
                f"{url}/v1/chat/completions",
                json=chat(max_tokens=5000, ignore_eos=True, stream=True),
            ) as response:
                async for part in response.content.iter_any():
                    received += part
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == CRASH_EXIT_CODE
        assert received.count(b'"content":') >= 3


async def test_a_crash_at_run_time(tmp_path):
    async with (
        engine_process(tmp_path) as (process, url),
        aiohttp.ClientSession() as http,
    ):
        with contextlib.suppress(aiohttp.ClientError):
            await http.post(f"{url}/sim/faults", json={"crash_after_tokens": 0})
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == CRASH_EXIT_CODE


async def test_a_taken_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agents.cli", "engine-sim", "--port", str(port)),
            stdout=PIPE,
            stderr=PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            _, complaint = await process.communicate()
    assert process.returncode == 1
    assert complaint.decode().splitlines() == [
        f"Error: can't listen on 127.0.0.1 port {port} (Address already in use): "
        "choose another --port, or 0 for a free one"
    ]
