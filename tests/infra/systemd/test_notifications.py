"""What the real programs report to systemd, on a real datagram socket."""

import asyncio
import contextlib
import os
import signal
import sys
import time

import aiohttp

from tests.support.nats_regions import mesh_toml
from tests.support.notify_socket import NotifySocket, notify_socket
from tests.support.ports import free_ports, free_row
from tests.support.until import PATIENCE_S


@contextlib.asynccontextmanager
async def service(systemd: NotifySocket, *words: str):
    """Run it as systemd would; when the block ends it is stopped, reports so and ends well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        env={**os.environ, **systemd.environment(watchdog_s=1.0)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        await systemd.until("STOPPING=1")
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_is_ready_when_it_answers(tmp_path, nats_server):
    config, credentials = tmp_path / "mesh.toml", tmp_path / "router.env"
    config.write_text(mesh_toml(("us",)))
    credentials.write_text(f"NATS_URL={nats_server.url}\nMESH_REGION=us\n")
    http = f"127.0.0.1:{free_ports(1)[0]}"
    words = ("--credentials", str(credentials), "--config", str(config), "--http", http)
    with notify_socket() as systemd:
        async with service(systemd, "mesh.cli.main", "router", *words):
            assert await systemd.next() == ["READY=1"]
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{http}/health") as answer,
            ):
                assert answer.status == 200
            none = "no replica of any region is ready; 0 of 0 replicas ready, 0 requests open"
            for _ in range(3):
                assert await systemd.next() == ["WATCHDOG=1", f"STATUS={none}"]


async def test_a_router_reports_its_reloads_also_with_workers(tmp_path, nats_server):
    config, credentials = tmp_path / "mesh.toml", tmp_path / "router.env"
    config.write_text(mesh_toml(("us",)))
    credentials.write_text(f"NATS_URL={nats_server.url}\nMESH_REGION=us\n")
    words = ("--credentials", str(credentials), "--config", str(config))
    pages = free_row(2)[0]
    more = ("--workers", "2", "--metrics", f"127.0.0.1:{pages}")
    for options in ((), more):
        http = f"127.0.0.1:{free_ports(1)[0]}"
        with notify_socket() as systemd:
            async with service(
                systemd, "mesh.cli.main", "router", *words, "--http", http, *options
            ) as process:
                await systemd.until("READY=1")
                before_us = time.monotonic_ns() // 1000
                process.send_signal(signal.SIGHUP)
                moment = await systemd.until("MONOTONIC_USEC=")
                assert before_us <= int(moment.split("=")[1]) <= time.monotonic_ns() // 1000
                await systemd.until("READY=1")


async def test_what_has_nothing_to_read_again_goes_on(tmp_path, nats_server):
    bus, engine = tmp_path / "bus.env", tmp_path / "engine.env"
    bus.write_text(f"NATS_URL={nats_server.url}\nMESH_REGION=us\n")
    engine.write_text(f"ENGINE_URL=http://127.0.0.1:{free_ports(1)[0]}\nENGINE_KIND=vllm\n")
    words = ("--credentials", str(bus), "--credentials", str(engine), "--replica", "us-0")
    with notify_socket() as systemd:
        async with service(systemd, "agents.cli", "run", *words) as process:
            await systemd.until("READY=1")
            process.send_signal(signal.SIGHUP)
            for _ in range(3):
                await systemd.until("WATCHDOG=1")


async def test_an_agent_is_ready_before_its_engine_and_says_what_it_waits_for(
    tmp_path, nats_server
):
    bus, engine = tmp_path / "bus.env", tmp_path / "engine.env"
    bus.write_text(f"NATS_URL={nats_server.url}\nMESH_REGION=us\n")
    engine.write_text(f"ENGINE_URL=http://127.0.0.1:{free_ports(1)[0]}\nENGINE_KIND=vllm\n")
    words = ("--credentials", str(bus), "--credentials", str(engine), "--replica", "us-0")
    with notify_socket() as systemd:
        async with service(systemd, "agents.cli", "run", *words):
            assert await systemd.next() == ["READY=1"]
            status = await systemd.until("STATUS=starting: ")
            assert "can't" in status or "refused" in status
            assert status.endswith("; 0 requests under way")
