"""Every command and program in README and docs/ is run, or listed here with the reason why not.

Blocks run as they stand, but for ports, the place of the installation, and sizes that would take
minutes. A page that gains a block fails a test until the block runs or is listed.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.page_commands import command_folder
from tests.support.pages import ROOT, Block, blocks
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S

PORTS = {"8101": "us", "8102": "eu", "8103": "ap"}
# Not run, by the beginning of the first line, and why.
NATS = "needs the `nats` command: tests/tools"
SYSTEM = "needs root and a booted systemd: tests/booted"
NOT_RUN = {
    "make up ": "`mesh up` runs below; what `make` does: tests/test_makefile.py",
    "make bench-workers ": "minutes; `make test-benchmarks` runs the programs",
    "ANTHROPIC_BASE_URL=": "needs Claude Code, which has an account",
    "docker compose ": "tests/containers/test_composed.py runs the stack",
    "docker run ": "needs an image of Jaeger; tests/tools asks one without",
    "for n in $(seq 8); do pkill ": "tests/mesh/demo/test_up.py runs it",
    ".venv/bin/mesh up --engine us=": "needs engines: tests/engines",
    ".venv/bin/mesh-agent profile ": "minutes; tests/agents/profiler runs it",
    "set -a; . .mesh/config/us/credentials/observer.env": NATS,
    "set -a; . rendered/us/credentials/observer.env": NATS,
    "set -a; . rendered/us/credentials/setup.env": NATS,
    "set -a; . .mesh/config/us/credentials/batch-observer.env": NATS,
    "mesh-agent profile ": "needs an idle engine for ten minutes",
    "vllm serve MODEL --kv-events-config ": "needs vLLM: tests/engines/test_vllm_kv_events.py",
    "mesh-agent run … --adapter sql=": "needs engines: tests/end_to_end/test_adapters.py",
    "mesh-agent run … --role prefill ": "needs engines: tests/end_to_end/test_pairs.py",
    "nats sub mesh.us.gossip.lease": NATS,
    "nats server list": NATS,
    "python3 -m venv /opt/mesh": SYSTEM,
    "mesh router --credentials rendered/us/credentials/router.env": SYSTEM,
    "install -D -o mesh": SYSTEM,
    "mesh infra nats --config infra/k8s/mesh.toml": "needs a cluster: tests/infra/k8s",
    "aws cloudformation ": "needs an account; tests/infra/entry/test_examples.py",
}
# Servers: started on free ports, and ended when they serve.
SERVES = (".venv/bin/mesh up --replicas 1", ".venv/bin/mesh up --time-scale 8")
# Run in their order by the tests of processes that are started one by one.
BY_HAND = (
    ".venv/bin/mesh infra nats --config mesh.toml --out rendered  #",
    ".venv/bin/mesh router --region us --router r1 --config mesh.toml --record us-r1.jsonl",
    ".venv/bin/mesh sim --replay us-r1.jsonl",
    ".venv/bin/mesh-agent engine-sim --port 8000 --role prefill",
)
ENDS_THE_MESH = "kill $("
SHORTER = {
    "--clients us=40,eu=30,ap=30": "--clients us=2,eu=1,ap=1",
    "--regions us=4,eu=4,ap=4": "--regions us=1,eu=1,ap=1",
    "--duration-s 120": "--duration-s 4",
    "--clients us=10,eu=10": "--clients us=1,eu=1",
    "--duration-s 60": "--duration-s 4",
    "us=200,prompt": "us=20,prompt",
    "--policy mesh,skywalker,llm-d": "--policy mesh",
    "--limit 2000": "--limit 5",
    "--limit 1000": "--limit 3",
    "--trace conv.csv": "--trace conv.csv --replicas-max 2 --simulations-max 20",
    " | jq -r '.findings[] | .remedy.command // empty'": "",  # jq may be missing
    "--credentials rendered": "--credentials .mesh/config",
}
MODELS = ("mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct")


def is_listed(block: Block, starts: tuple[str, ...]) -> bool:
    return block.title.startswith(starts)


SHELL = list(blocks("sh"))
ELSEWHERE = (*SERVES, *BY_HAND, ENDS_THE_MESH)
RUN = [block for block in SHELL if not is_listed(block, (*NOT_RUN, *ELSEWHERE))]
PROGRAMS = list(blocks("python"))


def name(block: Block) -> str:
    return f"{Path(block.page).stem}:{block.title[:60]}"


def adapted(text: str, mesh: MeshUp | None = None) -> str:
    """The block for a mesh on other ports, and of a size for tests."""
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    if mesh is not None:
        for port, region in PORTS.items():
            text = text.replace(port, mesh.endpoint(region).rpartition(":")[2])
        for model in MODELS:
            text = text.replace(model, mesh.model)
    return text


def environment(folder: Path) -> dict[str, str]:
    """Commands are found as after an installation, and nothing reaches another mesh."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("MESH_")},
        "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """What a checkout has beside a running mesh."""
    (folder / "infra").symlink_to(ROOT / "infra")
    rows = [
        {"timestamp": n, "input_length": 600, "output_length": 4, "hash_ids": [1, n]}
        for n in range(1, 9)
    ]
    trace = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "conversation_trace.jsonl").write_text(trace)
    lines = [f"2023-11-16 18:15:{n}.00,400,8" for n in range(10, 20)]
    (folder / "conv.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n"
    )
    with command_folder(folder / ".venv" / "bin"):
        yield


async def output_of(folder: Path, *command: str) -> str:
    """What the command printed. Fails if it fails or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            printed = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with prepared(tmp_path):
        yield tmp_path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[MeshUp, Path]]:
    """Three regions whose state is where a reader would have it."""
    folder = tmp_path_factory.mktemp("pages")
    config = write_config(folder, batch_runners=("batch-0",))
    with prepared(folder):
        async with mesh_up(folder, config=config) as running:
            yield running, folder


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("block", RUN, ids=name)
async def test_a_command_of_a_page_runs(mesh, block):
    running, folder = mesh
    text = adapted(block.text, running)
    assert await output_of(folder, "bash", "-euo", "pipefail", "-c", text)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("block", PROGRAMS, ids=name)
async def test_a_program_of_a_page_runs(mesh, block):
    running, folder = mesh
    assert await output_of(folder, sys.executable, "-c", adapted(block.text, running))


@pytest.mark.parametrize("block", [b for b in SHELL if is_listed(b, SERVES)], ids=name)
async def test_a_server_of_a_page_comes_up_and_the_command_that_ends_it_does(folder, block):
    [end] = [block for block in SHELL if is_listed(block, (ENDS_THE_MESH,))]
    [command] = [line for line in block.text.splitlines() if line.startswith(".venv/bin/mesh up")]
    arguments = command.split()[2:]
    time_scale = None if "--time-scale" in arguments else 50.0
    config = write_config(folder, regions=("us",))
    async with mesh_up(folder, *arguments, config=config, time_scale=time_scale) as running:
        assert running.model
        await output_of(folder, "bash", "-c", end.text)
        async with asyncio.timeout(PATIENCE_S):
            assert await running.process.wait() == 0


def one(start: str) -> Block:
    return next(block for block in SHELL if block.title.startswith(start))


@contextlib.asynccontextmanager
async def started(folder: Path, command: str) -> AsyncIterator[None]:
    """A command that runs on, in a session of its own that ends with the block."""
    alive, held = os.pipe()
    with (folder / "by-hand.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(held,),
            start_new_session=True,
        )
    os.close(held)
    try:
        yield
        assert process.returncode is None, (folder / "by-hand.log").read_text()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        await process.wait()
        # A shell ends before the program that it waits for; the pipe ends with the last of both.
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.to_thread(os.read, alive, 1)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(alive)


def separate(text: str) -> Iterator[str]:
    """The commands of a block whose lines go into terminals of their own."""
    for command in re.findall(r"^\((?:.|\n)*?\)$|^.+$", text, re.MULTILINE):
        yield str(command)


async def until_ready(port: int, replicas: int = 1) -> None:
    """Until the router can place requests, and knows of so many replicas of one state."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/ready") as answer:
                    is_ready = answer.status == 200
                async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    counts = re.findall(r"^mesh_replicas{.*} (\d+)", await answer.text(), re.M)
                if is_ready and str(replicas) in counts:
                    return
            await asyncio.sleep(0.05)


# It fails once a batch runner has read its file; the agent takes no lines without a profile.
FAILING_JOB = """export MESH_ENDPOINT=http://127.0.0.1:{port}/v1; echo x > in.jsonl
JOB=$(.venv/bin/mesh batch submit --no-check in.jsonl) || exit 1
.venv/bin/mesh batch wait "$JOB" || .venv/bin/mesh batch status "$JOB"
"""


async def test_processes_started_one_by_one_serve_and_a_recording_is_replayed(folder):
    """engines.md, then operate.md's recording and simulate.md's replay of it."""
    write_config(folder, regions=("us",), batch_runners=("batch-0",))
    [http] = re.findall(r'http = "127.0.0.1:(\d+)"', (folder / "mesh.toml").read_text())
    [engine] = free_ports(1)
    text = one(BY_HAND[0]).text.replace("8000", str(engine))
    commands = dict(zip(("render", "nats", "streams", "router", "engine", "agent", "runner"),
                        separate(text), strict=True))  # fmt: skip
    record = one(BY_HAND[1]).text.strip()
    recorder = commands["router"].replace(
        ".venv/bin/mesh router --region us --router r1 --config mesh.toml", record
    )
    assert recorder != commands["router"]
    await output_of(folder, "bash", "-c", commands["render"])
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(started(folder, commands["nats"]))
        streams = f"until {commands['streams'].split(' #')[0]}; do sleep 0.2; done"
        await output_of(folder, "bash", "-c", streams)
        for each in ("engine", "agent"):
            await stack.enter_async_context(started(folder, commands[each]))
        async with started(folder, commands["router"]):
            await until_ready(int(http))
            async with started(folder, commands["runner"]):
                command = FAILING_JOB.format(port=http)
                assert "The line is no valid JSON" in await output_of(folder, "bash", "-c", command)
        async with started(folder, recorder):
            await until_ready(int(http))
    for command in one(BY_HAND[2]).text.splitlines():
        assert await output_of(folder, "bash", "-c", command)


async def test_a_pair_started_as_the_page_says_answers_and_is_explained(folder):
    """engines.md: its processes one by one, with the engines and agents of the pair."""
    config = write_config(folder, regions=("us",), replicas=2, batch_runners=("batch-0",))
    config.write_text(config.read_text() + '[routing]\npolicy = "round-robin"\n')
    [http] = re.findall(r'http = "127.0.0.1:(\d+)"', config.read_text())
    render, nats, streams, router, *_ = separate(one(BY_HAND[0]).text)
    pair = one(BY_HAND[3]).text
    for written, free in zip(("8000", "8001"), free_ports(2), strict=True):
        pair = pair.replace(written, str(free))
    await output_of(folder, "bash", "-c", render)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(started(folder, nats))
        await output_of(folder, "bash", "-c", f"until {streams.split(' #')[0]}; do sleep 0.2; done")
        for each in (router, *separate(pair)):
            await stack.enter_async_context(started(folder, each))
        await until_ready(int(http), replicas=2)
        body = {"model": MODELS[0], "prompt": "Why? " * 300, "max_tokens": 4}
        url, headers = f"http://127.0.0.1:{http}/v1/completions", {"x-request-id": "mine-1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
        explain = ".venv/bin/mesh explain mine-1 --config mesh.toml --credentials rendered"
        told = await output_of(folder, "bash", "-c", explain)
    assert "placed on us-0 + us-1" in told and "computing the prompt on us-0" in told


def test_every_listed_block_is_in_a_page():
    titles = [block.title for block in SHELL]
    listed = [*NOT_RUN, *ELSEWHERE]
    assert [start for start in listed if not any(t.startswith(start) for t in titles)] == []


def test_every_block_names_its_language():
    unnamed = {block.page for block in blocks("") if not block.page.startswith("docs/benchmarks/")}
    assert unnamed == set()


def test_pages_need_no_command_that_a_bare_machine_lacks():
    assert shutil.which("bash") and shutil.which("curl")
