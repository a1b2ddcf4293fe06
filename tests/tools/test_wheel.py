"""The wheel that `make wheel` writes, installed as a user installs it: no checkout is at hand.

It goes into a virtual environment of its own, with its dependencies from the configured index, and
every command runs in an empty folder.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import click
import pytest
from openai import OpenAI

from agents.cli import main as mesh_agent
from mesh.cli.main import main as mesh
from tests.support.mesh_up import write_config
from tests.support.pages import ROOT
from tests.support.until import PATIENCE_S

pytestmark = [pytest.mark.tools, pytest.mark.timeout(600)]

COMMANDS: dict[str, click.Group] = {"mesh": mesh, "mesh-agent": mesh_agent}
# What an installed mesh reads or an operator copies; the rest of its files are modules.
DATA = {
    "infra/mesh.toml",
    "infra/systemd/mesh-agent@.service",
    "infra/systemd/mesh-batch-runner@.service",
    "infra/systemd/mesh-nats@.service",
    "infra/systemd/mesh-router@.service",
    "infra/systemd/mesh.sysusers.conf",
    "schemas/asyncapi.yaml",
    "schemas/openapi.yaml",
}
PACKAGES = {"mesh", "agents", "schemas", "infra"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    """What `make wheel` wrote and checked."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", "wheel"], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count("PASSED") == 2  # of twine: the wheel, the source archive
    [found] = (ROOT / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel."""
    environment = tmp_path_factory.mktemp("installed")
    subprocess.run([ROOT / "infra/virtual-environment", sys.executable, environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(pip, check=True)
    return environment / "bin"


def run(programs: Path, folder: Path, *words: str | Path) -> str:
    """What a command printed, which must succeed."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [programs / words[0], *words[1:]],
        cwd=folder,
        env={**alone, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
    return ended.stdout


def test_it_holds_what_is_needed_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = (name for name in archive.namelist() if name.endswith("/METADATA"))
        about = HeaderParser().parsestr(archive.read(metadata).decode())
    assert {name.partition("/")[0] for name in names} == PACKAGES
    modules = {
        str(path.relative_to(ROOT)) for one in PACKAGES for path in (ROOT / one).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    schemas = {str(path.relative_to(ROOT)) for path in (ROOT / "schemas/json").glob("*.json")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "mesh/console/page").iterdir()}
    assert names - modules == DATA | schemas | page
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"


def commands(group: click.Group, *words: str) -> Iterator[tuple[str, ...]]:
    """A group and all commands below it."""
    yield words
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)
        else:
            yield (*words, name)


@pytest.mark.parametrize("program", COMMANDS)
def test_every_command_has_its_help(programs: Path, tmp_path: Path, program: str):
    found = list(commands(COMMANDS[program], program))
    for words in found:
        assert run(programs, tmp_path, *words, "--help").startswith(f"Usage: {' '.join(words)} ")
    print(f"{len(found)} commands of {program}")


def test_commands_that_need_no_mesh_work(programs: Path, tmp_path: Path, wheel: Path):
    number = wheel.name.split("-")[1]
    assert run(programs, tmp_path, "mesh", "--version").split() == ["mesh,", "version", number]
    site = next((programs.parent / "lib").glob("python3.*")) / "site-packages"
    packaged = site / "infra" / "mesh.toml"
    assert "no mistakes; 3 regions" in run(programs, tmp_path, "mesh", "config", "check", packaged)
    run(programs, tmp_path, "mesh", "infra", "nats", "--out", "rendered")
    assert (tmp_path / "rendered/us/nats.conf").exists()
    words = ("--workload", "chat", "--clients", "us=2,eu=2,ap=2", "--duration-s", "5")
    run(programs, tmp_path, "mesh", "sim", *words, "--out", "sim.json")
    assert json.loads((tmp_path / "sim.json").read_text())["policies"]["mesh"]["ok"] > 0


async def test_three_regions_serve_until_ctrl_c(programs: Path, tmp_path: Path):
    config, ready = write_config(tmp_path), tmp_path / "ready.json"
    words = ("up", "--config", config, "--ready-file", ready, "--time-scale", "50")
    process = await asyncio.create_subprocess_exec(
        programs / "mesh", *words, cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        record = json.loads(ready.read_text())
        for region in record["regions"].values():
            assert await asyncio.to_thread(streamed, region["endpoint"], record["models"][0])
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in record["processes"].values())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def streamed(endpoint: str, model: str) -> str:
    """The text of a streamed answer."""
    with OpenAI(base_url=f"{endpoint}/v1", api_key="unused") as client:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Where are you?"}],
            max_tokens=8,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
