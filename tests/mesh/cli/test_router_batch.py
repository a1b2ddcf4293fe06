"""`mesh router --batch-credentials` as a process: files are kept with the login that is given."""

import asyncio
import sys
from pathlib import Path

import openai
import pytest

from infra.nats import bundle
from infra.topology import parse
from mesh.demo.commands import Commands
from mesh.demo.options import DemoOptions
from mesh.demo.state_directory import StateDirectory
from tests.support.batch_regions import batch_toml
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import running_regions
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S


async def started(config: Path, port: int, *options: str, **environment: str):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "router", "--region", "us"),
        *("--config", str(config), "--http", f"127.0.0.1:{port}", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )


def test_files_are_kept_with_the_login_that_is_given(tmp_path):
    toml, config = batch_toml(), tmp_path / "mesh.toml"
    config.write_text(toml)
    [port] = free_ports(1)

    async def use(login: str, password: str, batch_file: Path) -> None:
        process = await started(
            config,
            port,
            *("--batch-credentials", str(batch_file)),
            NATS_USER=login,
            NATS_PASSWORD=password,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert b"serves http" in await process.stdout.readline()
            url = f"http://127.0.0.1:{port}/v1"
            # Its client tries again after a 503, while the second connection is made.
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=5) as api:
                made = await api.files.create(file=b"{}\n", purpose="batch")
                assert (await api.files.content(made.id)).content == b"{}\n"
        finally:
            process.terminate()
            await process.communicate()
        assert process.returncode == 0

    with running_regions(tmp_path / "nats", toml=toml) as regions:
        router = regions.address("us", "router")
        asyncio.run(use(router.user, router.password, regions.files["us"].credentials["batch"]))


@pytest.mark.parametrize(
    "text", ["NATS_USER=batch\n", "no line of a file of credentials\n", "\xff"]
)
async def test_a_file_without_a_login_is_named(tmp_path, text):
    config, file = tmp_path / "mesh.toml", tmp_path / "batch.env"
    config.write_text(batch_toml())
    file.write_bytes(text.encode("latin-1"))
    words = ("router", "--region", "us", "--config", config, "--batch-credentials", file)
    status, _, said = await mesh_command(*words)
    assert status == 2
    assert f"--batch-credentials: {file}: " in said


def test_a_demos_routers_have_the_login_where_there_are_runners(tmp_path):
    config = tmp_path / "mesh.toml"
    toml = batch_toml(("us", "eu")).replace('batch_runners = ["batch-0"]', "", 1)
    topology = parse(toml, str(config))
    files = bundle.write(topology, tmp_path / "config")
    options = DemoOptions(config=config, state=tmp_path)
    commands = Commands(topology, options, StateDirectory(tmp_path), Path("nats-server"), files)
    for region, has_runners in (("us", False), ("eu", True)):
        http = topology.regions[region].http
        words = commands.router(region, "r1", http, None).command
        assert ("--batch-credentials" in words) is has_runners
    assert str(files["eu"].credentials["batch"]) in words
