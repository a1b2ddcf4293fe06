"""The real `nats` command against a running mesh: what the documents tell people to type, what it
shows them, and that it shows no prompt. The last line printed counts the commands."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.pages import Block, blocks
from tests.tools.go_tools import NATS

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

DEADLINE_S = 60.0
REQUESTS = 7
SECRET = "a-secret-of-a-client"
# Documents' blocks that don't name their credentials, by a beginning, and whose they need.
ALSO = {"nats sub mesh.us.gossip.lease": "observer", "nats server list": "system"}
NATS_BLOCKS = [block for block in blocks("sh") if re.search(r"^nats ", block.text, re.MULTILINE)]


class Command(NamedTuple):
    """One line of a page, and the user whose it is."""

    page: str
    user: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.page).stem}:{self.user}:{shlex.join(self.words)}"


def commands_of(block: Block) -> Iterator[Command]:
    [user] = re.findall(r"credentials/([a-z-]+)\.env", block.text) or [
        user for start, user in ALSO.items() if block.title.startswith(start)
    ]
    for line in block.text.splitlines():
        for part in line.partition(" #")[0].split(";"):
            if (words := shlex.split(part)) and words[0] == "nats":
                yield Command(block.page, user, tuple(words[1:]))


COMMANDS = [command for block in NATS_BLOCKS for command in commands_of(block)]


class Running(NamedTuple):
    """A mesh, and the folder for the command's own files."""

    mesh: MeshUp
    folder: Path

    def environment(self, user: str, region: str = "us") -> dict[str, str]:
        told = self.mesh.credentials(region, user)
        alone = {name: value for name, value in os.environ.items() if not name.startswith("NATS")}
        return {**alone, **told, "XDG_CONFIG_HOME": str(self.folder), "NO_COLOR": "1"}

    async def nats(self, user: str, *words: str) -> subprocess.CompletedProcess[str]:
        """What the command printed, as that user of us. Fails if it does not end in time."""
        process = await asyncio.create_subprocess_exec(
            NATS.binary,
            *words,
            env=self.environment(user),
            cwd=self.folder,  # where backups are put
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                printed = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()
        return subprocess.CompletedProcess(words, process.returncode or 0, printed)

    async def shown(self, user: str, *words: str) -> str:
        """The same of a command that must succeed."""
        done = await self.nats(user, *words)
        assert done.returncode == 0, done.stdout
        return str(done.stdout)

    async def ask(self, prompt: str, count: int = 1) -> None:
        """Have that prompt answered by us."""
        body = {"model": self.mesh.model, "prompt": prompt, "max_tokens": 3}
        url = f"{self.mesh.endpoint('us')}/v1/completions"
        async with aiohttp.ClientSession() as session:
            for _ in range(count):
                async with session.post(url, json=body) as answer:
                    assert answer.status == 200, await answer.text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("mesh")
    regions, runners = ("us", "eu"), ("batch-0",)
    replicas = {"us": 2, "eu": 1}
    config = write_config(folder, regions=regions, replicas=replicas, batch_runners=runners)
    async with mesh_up(folder, config=config) as mesh:
        ran = Running(mesh, folder)
        await ran.ask(SECRET, REQUESTS)
        yield ran


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
async def test_a_command_of_a_page_shows_something_and_no_prompt(running: Running, command):
    words = command.words
    if words[0] == "sub":  # which would run on
        words = (*words, "--count=1")
    printed = await running.shown(command.user, *words)
    assert printed.strip()
    said = re.sub(r'"error"\s*:', "", printed)  # a field of heartbeats
    assert "error" not in said.lower().replace("errors", "")
    assert SECRET not in printed


async def test_every_page_that_names_the_command_is_tried():
    pages = {command.page for command in COMMANDS}
    assert pages == {"docs/operate.md", "docs/install.md", "docs/batch.md"}
    print(f"{len(COMMANDS)} commands of {len(pages)} pages run")


async def test_services_are_listed_by_the_names_in_the_configuration(running: Running):
    listed = await running.shown("observer", "micro", "ls")
    rows = [[cell.strip() for cell in line.split("│")] for line in listed.splitlines()]
    assert {row[3] for row in rows if len(row) > 5} >= {"us-0", "us-1", "r1"}


async def test_one_agents_engine_and_models(running: Running):
    shown = await running.shown("observer", "micro", "info", "mesh-agent", "us-1")
    for part in (
        "mesh-agent (us-1)",
        "engine: vllm",
        "engine_version: simulated",
        f"models: {running.mesh.model}",
        "Subject: mesh.us.replica.us-1.work",
    ):
        assert part in shown, shown
    shown = await running.shown("observer", "micro", "info", "mesh-router", "r1")
    assert "router: r1" in shown


async def test_the_statistics_of_work_are_those_of_the_requests(running: Running):
    figures = []
    for replica in ("us-0", "us-1"):
        request = f"$SRV.STATS.mesh-agent.{replica}"
        printed = await running.shown("observer", "request", request, "", "--raw")
        [endpoint] = json.loads(printed)["endpoints"]
        assert endpoint["subject"] == f"mesh.us.replica.{replica}.work"
        assert endpoint["num_errors"] == 0
        assert endpoint["data"]["outstanding"] == 0
        figures.append(endpoint)
    taken = sum(one["num_requests"] for one in figures)
    assert taken >= REQUESTS, figures
    busy = [one for one in figures if one["num_requests"]]
    for one in busy:
        average_ns = one["processing_time"] // one["num_requests"]
        assert one["average_processing_time"] == average_ns > 10_000
    table = await running.shown("observer", "micro", "stats", "mesh-agent")
    for one in figures:
        assert re.search(rf"│ +work +│ +{one['num_requests']} +│ agent +│ +0 +│", table), table


async def test_streams_say_what_they_hold(running: Running):
    listed = await running.shown("observer", "stream", "ls")
    assert "The last heartbeat of every" in listed
    assert "The lease of us" in listed
    listed = await running.shown("batch-observer", "stream", "ls", "--all")
    for text in ("Lines without a result", "Results of lines", "Batch jobs", "Contents of files"):
        assert text in listed


async def test_numbers_at_the_terminal_are_short(running: Running):
    last = ("stream", "get", "HEARTBEATS", "--last-for", "mesh.us.heartbeat.us-0")
    beat = await running.shown("observer", *last)
    digest = await running.shown("observer", "sub", "mesh.us.gossip.digest", "--count=1", "--raw")
    for text in (beat[beat.index("{") :], digest):
        found = re.findall(r"[:\[,](-?[0-9]+\.[0-9]+(?:[eE]-?[0-9]+)?)", text)
        assert found
        assert all(float(number) == float(f"{float(number):.4g}") for number in found), found
        assert not any("e-1" in number for number in found), found


async def test_who_looks_on_sees_no_prompt_and_publishes_nothing(running: Running):
    for user in ("observer", "operator", "batch-observer"):
        for subject in ("mesh.us.>", "mesh.>", ">", "mesh.us.replica.*.work", "mesh.us.ingress"):
            refused = await running.nats(user, "sub", subject, "--count=1")
            assert refused.returncode != 0
            assert f'Permissions Violation for Subscription to "{subject}"' in refused.stdout
        for subject in ("mesh.us.replica.us-0.work", "mesh.us.heartbeat.us-0", "$JS.ACK.x"):
            refused = await running.nats(user, "pub", subject, "{}")
            assert f'Permissions Violation for Publish to "{subject}"' in refused.stdout, subject
    state = ("mesh.us.heartbeat.*", "mesh.*.gossip.digest", "mesh.*.gossip.offline", "_INBOX.>")
    watching = await asyncio.create_subprocess_exec(
        *(NATS.binary, "sub", *state, "--count=60"),
        env=running.environment("observer"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        asking = asyncio.create_task(running.ask(SECRET, 20))
        async with asyncio.timeout(DEADLINE_S):
            printed = (await watching.communicate())[0].decode()
        await asking
    finally:
        if watching.returncode is None:
            watching.kill()
            await watching.wait()
    assert "mesh.us.heartbeat.us-0" in printed
    assert SECRET not in printed
