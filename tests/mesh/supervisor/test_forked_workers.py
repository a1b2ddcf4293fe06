"""`mesh router --workers 2`: real processes that share a port, die, come back and drain."""

import asyncio
import os
import re
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from click.testing import CliRunner

from infra.bus import BusAddress
from mesh.adapters import streams
from mesh.cli.router import command
from schemas.ids import RegionId
from tests.support.nats_regions import mesh_toml
from tests.support.notify_socket import notify_socket
from tests.support.ports import free_row
from tests.support.router_process import router_process, runs
from tests.support.scripted_engine import event, hang, scripted_engine
from tests.support.small_mesh import chat, small_mesh
from tests.support.until import PATIENCE_S, until

# A parent of the workers that it is told, with `work` as given, that says what it leaves open.
PARENT = """
import asyncio, errno, os, resource, signal, sys
from mesh.supervisor.forked_workers import run_workers

def opened():
    return len(os.listdir("/proc/self/fd"))

def serve(parent):
    async def until_stopped():
        stopped = asyncio.Event()
        parent.on_stop(lambda times: stopped.set())
        parent.report_ready()
        await stopped.wait()
    asyncio.run(until_stopped())
    return 0

{work}

before = opened()
status = run_workers(sys.argv[1:], work)
print(opened() - before)
sys.exit(status)
"""
NO_ROOM_LATER = """
fork, forks = os.fork, 0

def full_the_second_time():
    global forks
    forks += 1
    if forks == 2:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = full_the_second_time

def work(number, parent):
    if forks == 1:
        parent.report_ready()
        return 3
    os.kill(os.getppid(), signal.SIGTERM)
    return serve(parent)
"""
NO_DESCRIPTORS = """
def work(number, parent):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        return serve(parent)
    finally:
        resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, before)
"""
HANGS = """
from infra.service_manager import ServiceManager
from mesh.supervisor import forked_workers

def work(number, parent):
    async def until_stopped():
        stopped = asyncio.Event()
        parent.on_stop(lambda times: stopped.set())
        parent.report_ready()
        asyncio.create_task(parent.keep_reporting(lambda: f"works as {os.getpid()}"))
        await stopped.wait()
    asyncio.run(until_stopped())
    return 0

run_workers = lambda names, work: forked_workers.run_workers(names, work, ServiceManager())
"""
TRIES_MAX = 64  # that all connections of a fair coin go one way is as good as impossible
INFLIGHT = "mesh_inflight"


@asynccontextmanager
async def two_workers(tmp_path, nats_server, *options, **tables):
    """A router of two workers that both see the replicas of an engine, the engine, and a client.

    Two replicas: when this process stands still, routers know that it is not they who are lost.
    """
    await streams.set_up(BusAddress(nats_server.url), RegionId("us"), has_peers=False)
    async with (
        scripted_engine() as engine,
        small_mesh({"us": nats_server}) as mesh,
        router_process(tmp_path, nats_server.url, *options, workers=2, **tables) as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        for replica in ("us-0", "us-1"):
            await mesh.agent("us", replica, engine)
        for worker in (0, 1):
            await router.until_serves(worker)
        yield router, engine, session


async def sampled(router, session, name):
    return [await router.sample(session, worker, name) or 0.0 for worker in (0, 1)]


async def streams_in_both(router, session, stack):
    """Begun streams, at least one in each worker, every one over a connection of its own."""
    begun = []
    for _ in range(TRIES_MAX):
        url = router.url + "/v1/chat/completions"
        answer = await stack.enter_async_context(session.post(url, json=chat(stream=True)))
        assert answer.status == 200
        assert await answer.content.readany() == event("first")
        begun.append(answer)
        if all(await sampled(router, session, INFLIGHT)):
            return begun
    raise AssertionError(f"{TRIES_MAX} connections went to one worker")


async def both_drain(router, session):
    """Return once both have heard of the stop, and refuse what is new."""
    for worker in (0, 1):
        status = None
        while status != 503:
            async with session.get(router.page(worker) + "/ready") as answer:
                status = answer.status


async def both_receive_connections_and_each_has_its_page(router, session):
    asked = 0
    while not all(await sampled(router, session, "mesh_requests_total")):
        assert asked < TRIES_MAX
        async with session.post(router.url + "/v1/chat/completions", json=chat()) as answer:
            assert answer.status == 200
        asked += 1
    while sum(await sampled(router, session, "mesh_requests_total")) != asked:
        await asyncio.sleep(0.02)  # an answer counts when its end has come, behind its bytes
    for worker in (0, 1):
        async with session.get(router.page(worker) + "/metrics") as answer:
            assert f'mesh_router{{router="r1-{worker}"}} 1.0' in await answer.text()
        async with session.post(router.page(worker) + "/v1/completions") as answer:
            assert answer.status == 404
    async with session.get(router.url + "/metrics") as answer:
        assert answer.status == 404
        assert b"each worker has a page of its own, this one's is " in await answer.read()
    async with session.get(router.url + "/health") as answer:
        assert answer.status == 200


@pytest.mark.drill
async def test_both_workers_serve_and_one_that_is_killed_breaks_its_answers_off_and_is_restarted(
    tmp_path, nats_server
):
    async with two_workers(tmp_path, nats_server) as (router, engine, session):
        async with asyncio.timeout(PATIENCE_S):
            await both_receive_connections_and_each_has_its_page(router, session)
        gate = asyncio.Event()
        engine.behaviour = hang(event("first"), gate)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            begun = await streams_in_both(router, session, stack)
            before = await sampled(router, session, INFLIGHT)
            victim, survivor = router.workers()
            os.kill(victim, signal.SIGKILL)
            await engine.hung_up.wait()  # its agent cancels what nobody hears any more
            gate.set()
            ends = await asyncio.gather(*(one.read() for one in begun), return_exceptions=True)
            broken = [end for end in ends if isinstance(end, aiohttp.ClientPayloadError)]
            whole = [end for end in ends if isinstance(end, bytes)]
            assert (len(broken), len(whole)) == tuple(before)
            assert all(end.endswith(b"data: [DONE]\n\n") for end in whole)
            await router.until_serves(0)
            assert len(router.workers()) == 2 and survivor in router.workers()
            os.kill(router.pid, signal.SIGTERM)
            status, _, said = await router.end()
        assert (status, said.count("worker r1-0 ended by SIGKILL")) == (0, 1)


@pytest.mark.parametrize("whom", ["the parent", "everybody"])
async def test_a_stop_lets_both_finish_their_streams(tmp_path, nats_server, whom):
    async with two_workers(tmp_path, nats_server) as (router, engine, session):
        gate = asyncio.Event()
        engine.behaviour = hang(event("first"), gate)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            begun = await streams_in_both(router, session, stack)
            workers = router.workers()
            for pid in (router.pid, *(workers if whom == "everybody" else ())):
                os.kill(pid, signal.SIGTERM)
            await both_drain(router, session)
            gate.set()
            for one in begun:
                assert (await one.read()).endswith(b"data: [DONE]\n\n")
            status, _, said = await router.end()
        assert (status, said) == (0, "")
        assert not any(map(runs, workers))


async def test_a_second_stop_ends_at_once(tmp_path, nats_server):
    async with two_workers(tmp_path, nats_server) as (router, engine, session):
        engine.behaviour = hang(event("first"))
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            await streams_in_both(router, session, stack)
            os.kill(router.pid, signal.SIGTERM)
            await both_drain(router, session)
            os.kill(router.pid, signal.SIGTERM)
            status, _, _ = await router.end()
        assert status == 0


async def test_two_routers_never_share_a_port_and_workers_do_not_outlive_their_parent(
    tmp_path, nats_server
):
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    async with router_process(first, nats_server.url, workers=2) as router:
        for _ in (0, 1):
            await router.process.stdout.readline()
        door = router.http_port
        async with router_process(second, nats_server.url, workers=2, http=door) as other:
            status, out, said = await other.end()
        workers = router.workers()
        os.kill(router.pid, signal.SIGKILL)
        await until(lambda: not any(map(runs, workers)))
    assert (status, out, len(workers)) == (1, "", 2)
    assert said == (
        f"mesh router: can't listen on 127.0.0.1:{door} (Address already in use); "
        "free it, or choose another for --http\n"
    )


async def test_an_error_of_one_worker_is_reported_once_and_ends_the_router(tmp_path, nats_server):
    pages = free_row(2)[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", pages + 1))
        taken.listen()
        async with router_process(tmp_path, nats_server.url, workers=2, pages=pages) as router:
            status, out, said = await router.end()
    assert (status, out.count("serves http://")) == (1, 1)
    assert said.count("mesh router:") == said.count(f"can't listen on 127.0.0.1:{pages + 1}") == 1


async def test_an_error_of_all_workers_is_reported_by_the_first_alone(tmp_path, nats_server):
    options = ("--record", str(tmp_path / "absent" / "us.jsonl"))
    async with router_process(tmp_path, nats_server.url, *options, workers=2) as router:
        status, out, said = await router.end()
    file = tmp_path / "absent" / "us.r1-0.jsonl"
    assert (status, out) == (2, "")
    assert said == f"mesh router: can't record to {file}: No such file or directory\n"


async def parent(work, *names):
    """Its status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT.format(work=work), *names),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


async def test_a_worker_that_can_not_be_forked_is_started_later():
    status, out, said = await parent(NO_ROOM_LATER, "r1-0")
    assert (status, out) == (0, "0\n"), said
    assert said.splitlines() == [
        "worker r1-0 ended with status 3; it starts again in 0.25 s",
        "can't start worker r1-0 (Resource temporarily unavailable); trying again in 0.5 s",
    ]


async def test_a_worker_that_can_not_be_forked_at_first_ends_the_router():
    status, out, said = await parent(NO_DESCRIPTORS, "r1-0", "r1-1")
    assert (status, out, said) == (1, "0\n", "can't start worker r1-1 (Too many open files)\n")


@pytest.mark.parametrize(
    ("routers", "options", "problem"),
    [
        (["r1"], ("--workers", "2"), "--metrics: 2 workers need a page each"),
        (
            ["r1"],
            ("--workers", "2", "--metrics", "127.0.0.1:65535"),
            "--metrics: 2 ports from 65535 on",
        ),
        (
            ["r1"],
            ("--metrics", "here"),
            '--metrics: write an address as "host:port", got "here"',
        ),
        (
            ["r1", "r1-0"],
            ("--workers", "2", "--metrics", "127.0.0.1:9101"),
            'routers in mesh.toml: "r1-0" is also the name of a worker of another router; rename',
        ),
        (
            ["r1", "r2"],
            ("--workers", "16", "--metrics", "127.0.0.1:9101"),
            "--workers: 17 processes of all routers; at most 16",
        ),
    ],
)
def test_wrong_options_are_reported_before_anything_starts(tmp_path, routers, options, problem):
    config = tmp_path / "mesh.toml"
    config.write_text(mesh_toml(("us",), more={"us": f"routers = {routers}"}))
    arguments = ["--region", "us", "--config", str(config), "--router", "r1", *options]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mesh router: {problem}")


async def test_systemd_learns_what_workers_do_and_one_that_hangs_is_restarted():
    with notify_socket() as systemd:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PARENT.format(work=HANGS), "r1-0", "r1-1"),
            env={**os.environ, **systemd.environment(watchdog_s=2.0)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        both = re.compile(r"STATUS=r1-0: works as (\d+); r1-1: works as (\d+)")
        try:
            assert await systemd.until("READY=1") == "READY=1"
            while (found := both.fullmatch(await systemd.until("STATUS="))) is None:
                pass
            first, second = map(int, found.groups())
            os.kill(second, signal.SIGSTOP)
            while (found := both.fullmatch(await systemd.until("STATUS="))) is None or int(
                found[2]
            ) == second:
                pass
            assert int(found[1]) == first
            process.send_signal(signal.SIGTERM)
            assert await systemd.until("STOPPING=1") == "STOPPING=1"
            async with asyncio.timeout(PATIENCE_S):
                _, said = await process.communicate()
            assert process.returncode == 0
            assert b"worker r1-1 hangs: it reported nothing for " in said
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
