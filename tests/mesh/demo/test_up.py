"""`mesh up` as its users meet it: a process with arguments, endpoints, signals and mistakes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner

from infra import bus
from infra.bus import BusAddress
from mesh.adapters.streams import AS_IT_SHOULD_BE
from mesh.cli.main import main
from mesh.demo.engine_profile import simulated_profile
from schemas import subjects
from schemas.replies import PING_PREFIX
from tests.support.mesh_command import mesh_command, said_by
from tests.support.mesh_up import REGIONS, RTT_MS, MeshUp, mesh_up, write_config
from tests.support.until import PATIENCE_S, until

QUICKSTART = Path(__file__).parents[3] / "docs/quickstart.md"
# New enough by its own words, and unable to serve.
FAILING_SERVER = """#!/bin/sh
[ "$1" = --version ] && exec echo "nats-server: v2.99.0"
echo "cannot allocate memory" && exit 3
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def streaming(endpoint: str, model: str, *, tokens: int) -> AsyncIterator[str]:
    """The parts of one streamed answer by the official client."""
    async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say something short."}],
            max_tokens=tokens,
            stream=True,
        )
        async for chunk in stream:
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""


async def streamed(endpoint: str, model: str) -> str:
    """One streamed answer."""
    return "".join([part async for part in streaming(endpoint, model, tokens=12)])


async def quickest_s(mesh: MeshUp, here: str, there: str, at_most_s: float) -> float:
    """The quickest of pings over the bus from one region to another's router.

    A busy machine makes some longer, none shorter: there are more until one is quick enough.
    """
    user = mesh.credentials(here, "router")
    address = BusAddress(user["NATS_URL"], user["NATS_USER"], user["NATS_PASSWORD"])
    inboxes = subjects.inbox_prefix(here, "test")
    client = await bus.connect(address, name="test", inbox_prefix=inboxes)
    inbox = subjects.inbox(here, "test", f"{PING_PREFIX}{there}")
    try:
        echoes = await client.subscribe(inbox)
        took_s: list[float] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(took_s) < 8 or min(took_s) > at_most_s:
                started = time.monotonic()
                await client.publish(subjects.ping(there), b"12345678", reply=inbox)
                while (await echoes.next_msg(timeout=PATIENCE_S)).data != b"12345678":
                    pass  # nobody listened yet, the server says
                took_s.append(time.monotonic() - started)
        return min(took_s)
    finally:
        await client.close()


async def until_streamed(endpoint: str, model: str) -> str:
    """Ask until the parts have found each other again; the client repeats what got no answer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(openai.APIStatusError):
                if text := await streamed(endpoint, model):
                    return text


async def killed_and_back(mesh: MeshUp, name: str) -> None:
    """Kill one process and wait until the supervisor has replaced it."""
    killed = mesh.record["processes"][name]
    os.kill(killed, signal.SIGKILL)
    await until(lambda: f"{name} is back" in mesh.output)
    assert f"{name} was ended by SIGKILL" in mesh.output
    assert mesh.record["processes"][name] not in (None, killed)


@contextlib.asynccontextmanager
async def simulated_engine(directory: Path):
    """An engine that `mesh up` did not start; its URL."""
    ready = directory / "engine.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents.cli", "engine-sim", "--port", "0"),
        *("--time-scale", "50", "--ready-file", str(ready)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        await until(ready.exists)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        await process.wait()


async def refused(*arguments: str) -> str:
    """What `mesh up` prints when it does not start."""
    status, said = await said_by("up", *arguments)
    assert status == 2, said
    return said


async def examined(credentials: Path) -> str:
    """What `mesh doctor` says of a mesh, by its credentials alone."""
    return (await mesh_command("doctor", "--credentials", credentials))[1]


async def quickstart_kills_the_routers_of_us_alone(mesh: MeshUp, directory: Path) -> None:
    """Run the page's pkill beside a router of another mesh."""
    [kill] = re.findall(r"^for n in .*; do (pkill .*); sleep", QUICKSTART.read_text(), re.MULTILINE)
    named = "from mesh.supervisor.parent_death import die_with; import os;"
    named += "die_with(os.getppid(), 'router-us-r1'); print(flush=True); input()"
    stranger = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", named), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert stranger.stdout is not None
    await stranger.stdout.readline()
    try:
        processes = mesh.record["processes"]
        killing = await asyncio.create_subprocess_shell(kill, cwd=directory)
        assert await killing.wait() == 0
        await until(lambda: "router-us-r1 is back" in mesh.output)
        again = mesh.record["processes"]
        assert again.keys() == processes.keys()
        assert {name for name in again if again[name] != processes[name]} == {"router-us-r1"}
        assert stranger.returncode is None, "another mesh's router"
    finally:
        stranger.kill()
        await stranger.wait()


async def test_every_region_answers_and_a_signal_leaves_nothing_behind(tmp_path):
    config = write_config(tmp_path)
    async with mesh_up(tmp_path, config=config, installed=True) as mesh:
        texts = [await streamed(mesh.endpoint(region), mesh.model) for region in REGIONS]
        assert all(texts)
        assert "curl -N http://127.0.0.1:" in mesh.output
        processes = mesh.record["processes"]
        assert sorted(processes) == sorted(
            name
            for r in REGIONS
            for name in (f"nats-{r}", f"router-{r}-r1", f"engine-{r}-0", f"agent-{r}-0")
        )
        for (here, there), rtt_ms in RTT_MS.items():
            rtt_s, more_s = rtt_ms / 1000, 0.015
            quickest = await quickest_s(mesh, here, there, rtt_s + more_s)
            assert quickest == pytest.approx(rtt_s, abs=more_s)
        assert await mesh.stop() == 0
    assert not any(map(alive, processes.values()))
    assert not (tmp_path / "ready.json").exists()

    # What the first one left is no obstacle, and its secrets are kept.
    secrets = {path: path.read_bytes() for path in tmp_path.rglob("*.env")}
    async with mesh_up(tmp_path, config=config, installed=True) as mesh:
        again = str(config), "--state", str(tmp_path / ".mesh")
        assert "is in use by a running mesh" in await refused("--config", *again)
        stopped = mesh.record["processes"]["nats-eu"]
        os.kill(stopped, signal.SIGSTOP)
        assert f"  kill -KILL {stopped}\n" in await examined(tmp_path / ".mesh" / "config")
        await quickstart_kills_the_routers_of_us_alone(mesh, tmp_path)
        await killed_and_back(mesh, "engine-eu-0")
        await killed_and_back(mesh, "nats-eu")
        await until_streamed(mesh.endpoint("eu"), mesh.model)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.env")} == secrets


async def test_given_engines_replace_the_simulated_ones_and_what_dies_comes_back(tmp_path):
    """An engine of one's own serves every region; a killed part is reported and replaced."""
    config, given = write_config(tmp_path, regions=("us", "ap")), ("--engine", "us={0},{0}/metrics")
    async with (
        simulated_engine(tmp_path) as url,
        mesh_up(
            tmp_path, *(word.format(url) for word in given), config=config, time_scale=None
        ) as mesh,
    ):
        processes = mesh.record["processes"]
        assert [name for name in processes if name.startswith(("engine", "agent"))] == [
            "agent-us-0"
        ]
        assert await streamed(mesh.endpoint("ap"), mesh.model)

        await killed_and_back(mesh, "agent-us-0")
        await until_streamed(mesh.endpoint("us"), mesh.model)

        pids = mesh.record["processes"].values()
        mesh.process.kill()  # no time to end its children
        await until(lambda: not any(map(alive, pids)))


async def test_an_engine_without_metrics_is_named_and_keeps_nobody_away(tmp_path):
    config = write_config(tmp_path, regions=("us",), replicas=2)
    async with simulated_engine(tmp_path) as url:
        given = ("--engine", f"us={url}", "--engine", f"us={url},{url}/nothing/here")
        async with mesh_up(tmp_path, *given, config=config, time_scale=None) as mesh:
            assert await streamed(mesh.endpoint("us"), mesh.model)
            said = " ".join(mesh.output.split())
            assert f"agent-us-1: {url} does not serve yet: {url}/nothing/here" in said
            assert "HTTP 404; if that server has no metrics, use --engine-kind openai" in said
            assert mesh.record["engines_given"]
            assert await mesh.stop() == 0


def with_profile(directory: Path) -> Path:
    """A mesh.toml of one region that names a profile of its engines."""
    config = write_config(directory, regions=("us",))
    text = config.read_text()
    config.write_text(text.replace("[regions.us]", '[regions.us]\nprofile = "us.json"'))
    return config


async def test_a_signal_that_comes_twice_at_once_is_one_and_answers_are_finished(tmp_path):
    """As of `make up` when its whole group is sent one. The agent has its region's profile."""
    config = with_profile(tmp_path)
    of_another = json.loads(simulated_profile(None, 1.0)) | {"model": "of/another-engine"}
    (tmp_path / "us.json").write_text(json.dumps(of_another))
    async with mesh_up(tmp_path, config=config, time_scale=1) as mesh:
        [log] = (tmp_path / ".mesh").rglob("agent-us-0.log")
        await until(lambda: "the profile is of model of/another-engine" in log.read_text())
        parts = streaming(mesh.endpoint("us"), mesh.model, tokens=100)
        await anext(parts)
        mesh.process.send_signal(signal.SIGTERM)
        mesh.process.send_signal(signal.SIGINT)
        assert len([part async for part in parts]) > 90
        assert await mesh.process.wait() == 0
        assert "killed" not in mesh.output


async def test_a_signal_during_the_start_ends_it_as_after_it(tmp_path):
    config, output = write_config(tmp_path, regions=("us",)), tmp_path / "up.out"
    with output.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(Path(sys.executable).with_name("mesh"), "up", "--config", str(config)),
            *("--state", str(tmp_path / ".mesh")),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        logs = tmp_path / ".mesh" / "logs"
        await until(lambda: (logs / "router-us-r1.log").exists())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = output.read_text()
    assert said.splitlines()[-1].startswith("ending: ") and "killed" not in said
    assert not (tmp_path / ".mesh" / "mesh.json").exists()
    assert children and not any(map(alive, map(int, children)))


async def test_a_region_may_have_more_routers_and_each_several_processes(tmp_path):
    config = write_config(tmp_path, regions=("us",), routers=("r1", "r2"))
    options = ("--log-level", "INFO", "--profile", "l4-llama3.1-8b", "--workers", "2")
    async with mesh_up(tmp_path, *options, "--replicas", "2", config=config) as mesh:
        assert mesh.model == "meta-llama/Llama-3.1-8B-Instruct"
        assert mesh.endpoint("us", "r1") != mesh.endpoint("us", "r2")
        assert await streamed(mesh.endpoint("us", "r1"), mesh.model)
        assert await streamed(mesh.endpoint("us", "r2"), mesh.model)
        log = tmp_path / ".mesh" / "logs" / "router-us-r2.log"
        await until(lambda: " INFO " in log.read_text())
        pages = mesh.record["regions"]["us"]["metrics"]
        assert list(pages) == ["r1-0", "r1-1", "r2-0", "r2-1"]
        for router, url in pages.items():
            page = await asyncio.to_thread(urllib.request.urlopen, url)
            with page:
                assert f'mesh_router{{router="{router}"}} 1.0'.encode() in page.read()
        for _ in range(3):  # what stands still while it is listened to seems ill
            said = await examined(tmp_path / ".mesh" / "config")
            if "warning" not in said and "bad" not in said:
                break
        assert f"of {config} as `mesh up` runs it" in said
        assert "heartbeat 2" in said and "warning" not in said and "bad" not in said
        assert await mesh.stop(signal.SIGINT) == 0


async def test_three_nats_servers_that_the_file_does_not_have_are_known_to_commands(tmp_path):
    config = write_config(tmp_path, regions=("us",), rtt_ms={})
    async with mesh_up(tmp_path, "--bus-servers", "3", config=config):
        options = ("--config", str(config), "--credentials", str(tmp_path / ".mesh" / "config"))
        status, out, err = await mesh_command("infra", "streams", *options)
        assert (status, err) == (0, "")
        assert {line.partition(" is ")[2] for line in out.splitlines()} == {AS_IT_SHOULD_BE}, out
        for _ in range(3):  # what stands still while it is listened to seems ill
            status, out, _ = await mesh_command("doctor", "--verbose", *options)
            if not status:
                break
        assert status == 0 and "us-1, us-2, us-3 are joined" in out, out


async def test_a_taken_port_is_named_with_its_key_before_anything_starts(tmp_path):
    config = write_config(tmp_path)
    text = config.read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        at = text.index("nats = ")
        config.write_text(f'{text[:at]}nats = "127.0.0.1:{port}"{text[text.index(chr(10), at) :]}')
        output = await refused("--config", str(config), "--state", str(tmp_path / ".mesh"))
    assert f"regions.us.nats: 127.0.0.1:{port} is taken" in output
    assert "copy that file" not in output  # it is the user's own already
    assert not (tmp_path / ".mesh").exists()


def test_a_program_that_can_not_start_is_shown_with_its_log_and_ends_the_mesh(
    tmp_path, monkeypatch
):
    failing = tmp_path / "bin" / "nats-server"
    failing.parent.mkdir()
    failing.write_text(FAILING_SERVER)
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{failing.parent}:{os.environ['PATH']}")
    config = write_config(tmp_path, regions=("us",))
    words = ["up", "--config", str(config), "--state", str(tmp_path / ".mesh")]
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 1
    assert "ended with status 3, so nothing runs" in ended.output
    assert "cannot allocate memory" in ended.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "mars=http://127.0.0.1:1"), "there are us, eu, ap"),
        (("--engine", "us"), "write REGION=URL"),
        (("--engine", "us=,http://127.0.0.1:1"), "write REGION=URL"),
        (("--engine", "us=http://,http://127.0.0.1:1"), "give it as http://host:port"),
        (("--engine", "us=ftp://127.0.0.1:1"), "give it as http://host:port"),
        (("--engine", "mars=http://127.0.0.1:1/v1"), "give it without /v1: the agent adds"),
        (("--engine", "mars=http://127.0.0.1:1/prefix"), "there are us, eu, ap"),
        (("--engine", "us=http://127.0.0.1:1,"), "write REGION=URL"),
        (("--engine", "us=1.2.3.4:8000"), "http:// is missing before 1.2.3.4:8000"),
        (("--engine", "us=http://127.0.0.1:1,localhost:9"), "http:// is missing before localhost"),
        (
            ("--engine", "mars=http://127.0.0.1:1", "--replicas", "2", "--time-scale", "2"),
            "note: simulated engines only, without effect here: --replicas, --time-scale",
        ),
        (
            ("--engine", "mars=http://127.0.0.1:1", "--replicas", "2"),
            "note: simulated engines only, without effect here: --replicas",
        ),
        (("--replicas", "-1"), "-1"),
        (("--time-scale", "0"), "0"),
        (("--engine-kind", "abacus"), "vllm"),
        (("--engine-key-file", "/dev/null"), "write the engine's API key into it"),
        (("--config", "/nonexistent/mesh.toml"), "can't be read"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(tmp_path, arguments, said):
    result = CliRunner().invoke(main, ["up", "--state", str(tmp_path), *arguments])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_a_profile_that_is_none_starts_nothing(tmp_path):
    options = ["up", "--config", str(with_profile(tmp_path)), "--state", str(tmp_path)]
    ended = CliRunner().invoke(main, options)
    assert ended.exit_code != 0
    assert "regions.us.profile: " in ended.stderr and "can't be read" in ended.stderr
