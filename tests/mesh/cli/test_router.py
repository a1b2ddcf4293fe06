"""`mesh router` as a process: what it records can be replayed when it has left."""

import asyncio
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from infra.bus import BusAddress
from mesh.adapters import streams
from mesh.cli.router import command as router_command
from mesh.cli.router_config import NO_PREFIX_KEY
from mesh.sim.recording_replay import replay
from schemas.ids import RegionId
from tests.support.nats_regions import mesh_toml
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S


async def router(
    directory: Path,
    nats_url: str,
    *options: str,
    regions: tuple[str, ...] = ("us",),
    more: str = "",
) -> asyncio.subprocess.Process:
    config = directory / "mesh.toml"
    config.write_text(mesh_toml(regions, more={"us": more}))
    await streams.set_up(BusAddress(nats_url), RegionId("us"), has_peers=len(regions) > 1)
    [port] = free_ports(1)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "router", "--region", "us"),
        *("--config", str(config), "--http", f"127.0.0.1:{port}", "--nats-url", nats_url),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("style", ["logfmt", "json", "off"])
def test_an_access_log_is_asked_for_as_documented(style):
    [option] = [one for one in router_command.params if one.name == "access_log"]
    assert option.type.convert(style, option, None) == style


async def test_what_a_router_recorded_can_be_replayed(tmp_path, nats_server):
    file = tmp_path / "us.jsonl"
    process = await router(
        tmp_path, nats_server.url, "--record", str(file), "--policy", "least-load"
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert b"serves http" in await process.stdout.readline()
            while len(file.read_bytes().splitlines()) < 10:
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, said) == (0, b"")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    verdict = replay(file)
    assert verdict.agrees, str(verdict)
    assert verdict.events > 5
    assert verdict.ended == "the router left"
    assert verdict.header.settings.policy == "least-load"


async def test_a_file_that_cannot_be_had_is_said_before_anything_is_served(tmp_path, nats_server):
    file = tmp_path / "absent" / "us.jsonl"
    process = await router(tmp_path, nats_server.url, "--record", str(file))
    try:
        async with asyncio.timeout(PATIENCE_S):
            said, why = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, said) == (2, b"")
    assert why == f"mesh router: can't record to {file}: No such file or directory\n".encode()


@pytest.mark.parametrize(
    ("in_file", "remedy"),
    [
        (True, "change metrics of [regions.us] in mesh.toml"),
        (False, "choose another for --metrics"),
    ],
)
async def test_a_page_that_cannot_be_had_is_named_where_it_was_given(
    tmp_path, nats_server, in_file, remedy
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page = f"127.0.0.1:{taken.getsockname()[1]}"
        more, options = (f'metrics = "{page}"', ()) if in_file else ("", ("--metrics", page))
        process = await router(tmp_path, nats_server.url, *options, more=more)
        try:
            async with asyncio.timeout(PATIENCE_S):
                said, why = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert (process.returncode, said) == (1, b"")
    assert why.decode() == (
        f"mesh router: can't listen on {page} (Address already in use); free it, or {remedy}\n"
    )


@pytest.mark.parametrize("key", ["", "a secret"])
async def test_without_a_secret_key_peers_are_told_of_no_prefixes(tmp_path, nats_server, key):
    file = tmp_path / "us.jsonl"
    options = ("--record", str(file), *(("--prefix-key", key) if key else ()))
    process = await router(tmp_path, nats_server.url, *options, regions=("us", "eu"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert b"serves http" in await process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said.count(NO_PREFIX_KEY.encode()) == (not key)
    assert bool(replay(file).header.settings.trie_bytes_per_s) == bool(key)
