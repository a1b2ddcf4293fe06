"""`mesh-agent run` as a process of its own, and what it says to bad input."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest
from click.testing import CliRunner

from agents.adapters.name_guard import ReplicaNameTaken
from agents.core.offline_profile import encode_profile
from agents.runtime.command import command, expected_cause
from infra.bus import BusUnreachable
from infra.nats import permissions
from schemas.exchange import Outcome
from schemas.state import ReplicaState
from tests.agents.core.test_offline_admission import LINEAR
from tests.agents.fake_router import fake_router
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk, plain, running
from tests.support.mesh_up import NO_SPEED_PROBE
from tests.support.until import PATIENCE_S

GOOD = ("--region", "us", "--replica", "g0", "--engine-url", "http://127.0.0.1:8000")
BUS = ("--nats-url", "nats://127.0.0.1:4222")
NATS = {"NATS_URL": "nats://127.0.0.1:4222", "NATS_PASSWORD": None}


@contextlib.asynccontextmanager
async def process(*arguments: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agents.cli",
        *arguments,
        env={**os.environ, **NO_SPEED_PROBE, **environ},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.communicate()


async def appeared(path: Path, made: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists():
            assert made.returncode is None, (await made.communicate())[1].decode()
            await asyncio.sleep(0.02)


async def test_sigterm_drains_the_process(nats_server, tmp_path) -> None:
    finish = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b"data: 1\n\n"))
        await finish.wait()
        await talk.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    ready = tmp_path / "ready"
    arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
    async with (
        running(script) as engine,
        fake_router(nats_server.url) as router,
        process(*arguments, "--engine-url", engine.url, NATS_URL=nats_server.url) as agent,
    ):
        await appeared(ready, agent)
        inbox = await router.send_work(1)
        await router.until(lambda: router.text(inbox))
        agent.send_signal(signal.SIGTERM)
        await router.state(state=ReplicaState.DRAINING)
        finish.set()
        assert (await router.answer(inbox)).outcome == Outcome.DONE
        assert await asyncio.wait_for(agent.wait(), 30) == 0
        await router.until(lambda: router.beats[-1].state is ReplicaState.GONE)


async def test_a_new_start_has_a_later_epoch(nats_server, tmp_path) -> None:
    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    epochs = []
    async with running(script) as engine, fake_router(nats_server.url) as router:
        for number in range(2):
            ready = tmp_path / f"ready{number}"
            arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
            async with process(
                *arguments, "--engine-url", engine.url, "--nats-url", nats_server.url
            ) as agent:
                await appeared(ready, agent)
                agent.send_signal(signal.SIGTERM)
                epochs.append((await router.state(state=ReplicaState.GONE)).epoch)
                assert await asyncio.wait_for(agent.wait(), 30) == 0
    assert epochs[0] < epochs[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--region"),
        (GOOD, "--nats-url"),
        ((*GOOD, *BUS, "--region", "US West"), "--region: "),
        ((*GOOD, *BUS, "--engine-url", "localhost:8000"), "--engine-url: give it as http://"),
        ((*GOOD, *BUS, "--engine-url", "http://h:99999"), "--engine-url: give it as http://"),
        ((*GOOD, *BUS, "--engine-url", "http://h:1/v1/"), "--engine-url: give it without /v1"),
        ((*GOOD, *BUS, "--metrics-url", "ftp://h"), "--metrics-url: give it as http://"),
        ((*GOOD, *BUS, "--nats-url", "localhost"), "--nats-url: give it as nats://"),
        ((*GOOD, *BUS, "--engine-kind", "tgi"), "--engine-kind"),
        ((*GOOD, *BUS, "--max-outstanding", "0"), "--max-outstanding: "),
        ((*GOOD, *BUS, "--read-interval-ms", "1"), "--read-interval-ms: "),
        ((*GOOD, *BUS, "--drain-timeout", "-1"), "--drain-timeout: "),
        ((*GOOD, *BUS, "--nats-user", "agent"), "NATS_PASSWORD"),
        ((*GOOD, *BUS, "--nats-password-file", "/nowhere"), "--nats-password-file"),
        ((*GOOD, *BUS, "--engine-key-file", "/nowhere"), "--engine-key-file"),
        ((*GOOD, *BUS, "--engine-key-file", "/dev/null"), "/dev/null"),
        ((*GOOD, *BUS, "--model", ""), "--model: give a name"),
        ((*GOOD, *BUS, "--batch-max", "0"), "--batch-max: "),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, complaint) -> None:
    result = CliRunner().invoke(command, arguments, env={"NATS_URL": "", "NATS_PASSWORD": None})
    assert result.exit_code == 2
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert complaint in result.output.split("Error: ", 1)[1]


@pytest.mark.parametrize(
    ("data", "arguments", "complaint"),
    [
        (b"", (), "--profile: FILE is no profile: "),
        (b"{}", (), "--profile: FILE is no profile: engine: "),
        (b"\xff\x00", (), "--profile: FILE is no profile: "),
        (encode_profile(LINEAR).replace(b'"v": 1', b'"v": 2'), (), "is no profile: v: "),
        (
            encode_profile(LINEAR),
            ("--engine-kind", "sglang"),
            "the profile is of an engine of kind",
        ),
        (encode_profile(LINEAR), ("--offline-priority", "x"), "--offline-priority"),
        (encode_profile(LINEAR), ("--offline-priority", str(2**31)), "--offline-priority: "),
        (None, ("--offline-priority", "5"), "give --profile too"),
    ],
)
def test_a_bad_profile_gets_one_clear_line(tmp_path, data, arguments, complaint) -> None:
    file = tmp_path / "profile.json"
    if data is not None:
        file.write_bytes(data)
        arguments = (*arguments, "--profile", str(file))
    result = CliRunner().invoke(command, (*GOOD, *arguments), env=NATS)
    assert result.exit_code == 2
    assert complaint.replace("FILE", str(file)) in result.output.replace("\n", " ")


def test_an_engine_without_priorities_is_named(tmp_path) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(encode_profile(replace(LINEAR, engine="llamacpp")))
    more = ("--engine-kind", "llamacpp", "--profile", str(file), "--offline-priority", "5")
    result = CliRunner().invoke(command, (*GOOD, *more), env=NATS)
    assert result.exit_code == 2
    assert "engines of kind vllm and sglang have a priority" in result.output


async def test_a_password_from_a_file_opens_a_guarded_bus(tmp_path) -> None:
    from tests.support.nats_server import running_nats_server

    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    ready = tmp_path / "ready"
    guarded = 'authorization { user: "agent", password: "s3cret" }'
    async with (
        running_nats_server(tmp_path / "guarded", config=guarded) as server,
        running(script) as engine,
        process(
            *("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready)),
            *("--engine-url", engine.url, "--nats-url", server.url),
            *("--nats-user", "agent", "--nats-password-file", str(secret)),
        ) as agent,
    ):
        await appeared(ready, agent)


async def test_another_replicas_credentials_are_named_and_it_ends(tmp_path) -> None:
    from tests.support.nats_server import running_nats_server

    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    theirs = permissions.agent("us", "us-0")
    user = {
        "user": "agent-us-0",
        "password": "s3cret",
        "permissions": {"publish": theirs.publish, "subscribe": theirs.subscribe},
    }
    async with (
        running_nats_server(
            tmp_path / "guarded", config=f"authorization: {json.dumps({'users': [user]})}"
        ) as server,
        running(script) as engine,
        process(
            *("run", "--region", "us", "--replica", "us-1", "--engine-url", engine.url),
            *("--nats-url", server.url, "--nats-user", "agent-us-0"),
            NATS_PASSWORD="s3cret",
        ) as agent,
    ):
        _, output = await asyncio.wait_for(agent.communicate(), 30)
    lines = output.decode().splitlines()
    assert agent.returncode == 1
    assert lines[-1] == (
        "Error: the bus forbids this user the subjects of us/us-1: are these its credentials?"
    ), output.decode()
    assert len(lines) < 12
    assert " is ready" not in output.decode()
    assert "another agent may hold" not in output.decode()


async def test_without_its_bus_it_still_ends_in_order(nats_server, tmp_path) -> None:
    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    ready = tmp_path / "ready"
    arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
    async with (
        running(script) as engine,
        process(*arguments, "--engine-url", engine.url, NATS_URL=nats_server.url) as agent,
    ):
        await appeared(ready, agent)
        await nats_server.stop()
        output = b""
        while b"lost the bus" not in output:
            output += await asyncio.wait_for(agent.stderr.readline(), 30)
        agent.send_signal(signal.SIGTERM)
        _, rest = await asyncio.wait_for(agent.communicate(), 30)
    output += rest
    assert agent.returncode == 0, output.decode()
    assert b"Traceback" not in output
    assert output.count(b" is ready") == 1
    assert output.count(b"unsent messages are lost") == 1


KEY = "sk-s3cret"


@pytest.mark.parametrize("by_file", [True, False])
async def test_an_engine_with_a_key_is_served_and_its_key_is_shown_nowhere(
    nats_server, tmp_path, by_file
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(plain(200, b'{"choices": []}'))

    secret, ready = tmp_path / "key", tmp_path / "ready"
    secret.write_text(KEY + "\n")
    secret.chmod(0o600)
    arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
    given = ("--engine-key-file", str(secret)) if by_file else ()
    environ = {"NATS_URL": nats_server.url} | ({} if by_file else {"MESH_ENGINE_KEY": KEY})
    async with running(script) as engine, fake_router(nats_server.url) as router:
        engine.key = KEY
        async with process(*arguments, "--engine-url", engine.url, *given, **environ) as agent:
            await appeared(ready, agent)
            inbox = await router.send_work(1, Authorization="Bearer of-the-client")
            assert (await router.answer(inbox)).outcome == Outcome.DONE
            sent = engine.requests[0].headers
            assert sent["authorization"] == f"Bearer {KEY}"
            assert "of-the-client" not in str(sent)
            if by_file:
                await a_key_that_is_no_longer_taken_is_named(router, engine)
            agent.send_signal(signal.SIGTERM)
            _, output = await asyncio.wait_for(agent.communicate(), 30)
    assert KEY.encode() not in output
    why = f" is down: {engine.url}/v1/models answers HTTP 401: it requires an API key"
    assert output.count(why.encode()) == by_file, output.decode()


async def a_key_that_is_no_longer_taken_is_named(router, engine) -> None:
    """At the next request and, once the engine counts as down, by the agent."""
    engine.key = "another"
    end = await router.answer(await router.send_work(2))
    assert end.outcome == Outcome.ENGINE_BROKEN and "--engine-key-file" in end.detail
    await router.state(state=ReplicaState.DOWN)


async def test_a_reason_that_changes_is_logged_again(nats_server, tmp_path) -> None:
    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    arguments = ("run", "--region", "us", "--replica", "g0", "--nats-url", nats_server.url)
    async with running(script) as engine:
        engine.scrape_response = lambda: plain(503, b"loading")
        async with process(*arguments, "--engine-url", engine.url) as agent:
            output = await said_until(agent, b"HTTP 503")
            engine.scrape_response = lambda: plain(401, b"{}")
            output += await said_until(agent, b"HTTP 401")
            engine.scrape_response = None
            output += await said_until(agent, b" is ready")
    assert output.count(b" is starting: ") == 2, output.decode()


async def said_until(agent: asyncio.subprocess.Process, word: bytes) -> bytes:
    output = b""
    while word not in output:
        line = await asyncio.wait_for(agent.stderr.readline(), 30)
        assert line, output.decode()
        output += line
    return output


@pytest.mark.parametrize(
    ("problem", "status"),
    [(ReplicaNameTaken("taken"), 2), (BusUnreachable("no bus"), 1), (OSError("closed"), 1)],
)
def test_its_status_says_whether_another_start_may_help(monkeypatch, problem, status) -> None:
    """Its unit does not start it again after 2."""

    async def end(config: object) -> None:
        raise problem

    monkeypatch.setattr("agents.runtime.command._main", end)
    result = CliRunner().invoke(command, [*GOOD, "--nats-url", "nats://127.0.0.1:4222"])
    assert result.exit_code == status, result.output


REFUSED, TAKEN, CLOSED = BusUnreachable("refused"), ReplicaNameTaken("taken"), OSError("closed")
FAULT, BUS = RuntimeError("a bug of ours"), nats.errors.ConnectionClosedError()


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (REFUSED, REFUSED),
        (ExceptionGroup("", [REFUSED]), REFUSED),
        (ExceptionGroup("", [FAULT, CLOSED, ExceptionGroup("", [FAULT, TAKEN])]), TAKEN),
        (ExceptionGroup("", [FAULT, CLOSED]), CLOSED),
        (ExceptionGroup("", [BUS, CLOSED, REFUSED]), REFUSED),
        (BUS, BUS),
        (ExceptionGroup("", [FAULT]), None),
        (FAULT, None),
    ],
)
def test_the_cause_is_found_among_its_consequences(problem, cause) -> None:
    assert expected_cause(problem) is cause
