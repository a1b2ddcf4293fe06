"""A server process is ready when it says so, ends when told, and names what went wrong."""

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from infra.nats import server
from tests.support.ports import free_ports
from tests.support.server_process import READY_TIMEOUT_S, ServerNotStarted, ServerProcess
from tests.support.until import PATIENCE_S, until


def process(folder: Path, port: int) -> ServerProcess:
    folder.mkdir(exist_ok=True)
    config = folder / "nats.conf"
    config.write_text(f'server_name: "t"\nlisten: "127.0.0.1:{port}"\n')
    return ServerProcess(server.find(), config, log=folder / "nats.log")


def program(folder: Path, script: str) -> Path:
    path = folder / "program"
    path.write_text(script)
    path.chmod(0o755)
    return path


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_reachable_once_started_and_gone_once_stopped(tmp_path):
    (port,) = free_ports(1)
    nats_server = process(tmp_path, port)
    await nats_server.start()
    pid = nats_server.pid
    assert pid is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await reader.readline()).startswith(b"INFO ")
    writer.close()
    await writer.wait_closed()
    await nats_server.stop()
    assert nats_server.pid is None
    assert not runs(pid)


async def test_it_can_be_started_again_and_stopped_twice(tmp_path):
    nats_server = process(tmp_path, *free_ports(1))
    for _ in range(2):
        await nats_server.start()
        await nats_server.stop()
    await nats_server.stop()


async def test_a_second_start_is_refused(tmp_path):
    nats_server = process(tmp_path, *free_ports(1))
    await nats_server.start()
    with pytest.raises(RuntimeError, match="runs already, as process"):
        await nats_server.start()
    await nats_server.stop()


async def test_a_taken_port_is_named_and_nothing_is_left(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        nats_server = process(tmp_path, port)
        with pytest.raises(ServerNotStarted, match=f"127.0.0.1:{port} is taken by another process"):
            await nats_server.start()
    assert nats_server.pid is None


async def test_another_server_of_the_same_name_is_not_taken_for_it(tmp_path):
    (port,) = free_ports(1)
    first = process(tmp_path / "first", port)
    await first.start()
    with pytest.raises(ServerNotStarted, match=f"{port} is taken"):
        await process(tmp_path / "second", port).start()
    await first.stop()


async def test_a_bad_configuration_quotes_the_server(tmp_path):
    nats_server = process(tmp_path, *free_ports(1))
    (tmp_path / "nats.conf").write_text("nonsense: [\n")
    with pytest.raises(ServerNotStarted, match="did not start; its log"):
        await nats_server.start()


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path):
    started = tmp_path / "started"
    os.mkfifo(started)
    silent = program(tmp_path, f"#!/bin/sh\necho $$ > {started}\nexec sleep 60\n")
    server_process = ServerProcess(silent, tmp_path / "nats.conf", log=tmp_path / "log")
    starting = asyncio.create_task(server_process.start())
    async with asyncio.timeout(PATIENCE_S):
        pid = int(await asyncio.to_thread(started.read_text))
    assert runs(pid)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not runs(pid)


async def test_a_server_that_stays_silent_is_given_up(tmp_path, monkeypatch):
    loop, log, ahead_s = asyncio.get_running_loop(), tmp_path / "log", 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + ahead_s)
    silent = program(tmp_path, "#!/bin/sh\necho thinking\nexec sleep 60\n")
    starting = asyncio.create_task(ServerProcess(silent, tmp_path / "nats.conf", log=log).start())
    await until(lambda: log.exists() and log.read_text())
    ahead_s = READY_TIMEOUT_S
    with pytest.raises(ServerNotStarted, match="thinking"):
        await starting


async def test_a_server_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.server_process.STOP_TIMEOUT_S", 0.2)
    stubborn = program(
        tmp_path,
        "#!/usr/bin/env python3\nimport os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[4], f'x_{os.getpid()}.ports').write_text('{}')\n"
        "time.sleep(60)\n",
    )
    nats_server = ServerProcess(stubborn, tmp_path / "nats.conf", log=tmp_path / "log")
    await nats_server.start()
    pid = nats_server.pid
    await nats_server.stop()
    assert pid is not None
    assert not runs(pid)
