"""When parts fail: the region goes on with what is left. Real servers, routers and agents.

Each of these is a drill of docs/operate.md, "When parts fail". More of them, marked alike, are
where what fails is at home: a server that restarts under load in
`tests/end_to_end/test_rolling_restarts.py`, a link between containers in
`tests/containers/test_cut_link.py`.
"""

import ast
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors
import nats.js.errors
import orjson
import pytest

from infra.address import Address
from infra.bus import BusAddress, connect
from mesh.demo.wan_proxy import WanProxy
from schemas import subjects
from schemas.exchange import Refusal
from schemas.state import Health
from tests.support.nats_pair import nats_pair
from tests.support.nats_server import running_nats_server
from tests.support.ports import free_ports
from tests.support.scripted_engine import hang, scripted_engine
from tests.support.small_mesh import (
    PATIENT,
    chat,
    one_region,
    one_replica,
    post,
    small_mesh,
)
from tests.support.until import PATIENCE_S

pytestmark = pytest.mark.drill

ROOT = Path(__file__).parents[3]
MINUTES_MS = 10 * 60 * 1000
ACCOUNT = "accounts { A { users: [ { user: a, password: a } ] %s } }\nno_auth_user: a"


@asynccontextmanager
async def two_regions(servers, **epochs):
    """us and eu, with a replica each; `epochs`: how far their hosts' clocks are off."""
    async with (
        scripted_engine() as near,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        for name, engine in (("us", near), ("eu", far)):
            await mesh.router(name, policy="skywalker", skew_ms=epochs.get(name, 0))
            skew_ms = epochs.get(f"{name}_agent", 0)
            await mesh.agent(name, f"{name}-0", engine, skew_ms=skew_ms)
            await mesh.until_ready(name, 1)
        await mesh.until_peer("us", "eu")
        await mesh.until_peer("eu", "us")
        mesh.engines = (near, far)
        yield mesh


async def answered(mesh, count, region="us"):
    """So many requests, one after another, are all answered."""
    for number in range(count):
        status, body, _ = await post(mesh, chat(str(number)), region)
        assert (status, b"hello" in body) == (200, True), body


async def deafen(mesh):
    """No heartbeat reaches the router any more, as if all were dropped on their way."""
    heartbeats = subjects.heartbeat("us", subjects.ANY)
    subscriptions = mesh.routers["us"]._bus.client._subs.values()
    [subscription] = [each for each in subscriptions if each.subject == heartbeats]
    await subscription.unsubscribe()
    replicas, clock = mesh.routers["us"].core.replicas, asyncio.get_running_loop().time
    overdue_s = mesh.routers["us"].core.state.settings.heartbeat_lost_s
    await mesh.until(
        lambda: all(clock() - each.seen_at > overdue_s for each in replicas), "both to be overdue"
    )


# Heartbeats are lost.


async def test_without_heartbeats_work_goes_on(nats_server):
    async with one_region(nats_server) as mesh:
        await deafen(mesh)
        await answered(mesh, 8)
        assert all(engine.seen for engine in mesh.engines)


async def test_without_heartbeats_an_agents_refusal_is_the_guard(nats_server):
    async with one_region(nats_server) as mesh:
        await deafen(mesh)
        first, second = mesh.engines
        first.waiting = 9  # its agent sees it, and the router can't
        for _ in range(100):
            await answered(mesh, 1)
            if mesh.sample("us", "mesh_refusals_total", reason=Refusal.FULL):
                break
        else:
            raise AssertionError("the agent of the full engine refused nothing")
        assert second.seen


async def test_without_heartbeats_a_dead_agent_is_passed_by(nats_server):
    async with one_region(nats_server) as mesh:
        await deafen(mesh)
        await mesh.kill_agent("us-0")
        await answered(mesh, 4)
        assert len(mesh.engines[1].seen) == 4


async def test_what_a_dead_replica_said_of_its_next_heartbeat_counts_for_nothing(nats_server):
    """A router that starts reads its last one from the stream, however old it is."""
    async with one_replica(nats_server) as mesh:
        [replica] = mesh.routers["us"].core.replicas
        await mesh.until(lambda: replica.heartbeat.next_within_s is not None, "it to rest")
        await mesh.kill_agent("us-0")
        await mesh.router("us", "r2", **PATIENT)
        core = mesh.routers["us/r2"].core
        await mesh.until(lambda: len(core.replicas) == 1, "it to be read")
        [dead] = core.replicas
        assert (dead.heartbeat.next_within_s, dead.silent_from) == (None, dead.seen_at)


# JetStream is down, or its store is full.


async def test_without_jetstream_core_nats_serves(tmp_path):
    async with running_nats_server(tmp_path / "nats", config=ACCOUNT % "") as server:
        bus = await connect(BusAddress(server.url), name="look", inbox_prefix="_INBOX.look")
        with pytest.raises((nats.js.errors.Error, nats.errors.Error)):
            await bus.jetstream().account_info()
        await bus.close()
        async with one_region(server) as mesh:
            await answered(mesh, 4)
            status, body, _ = await post(mesh, chat(stream=True))
            assert (status, b"hello" in body) == (200, True)


async def test_with_jetstreams_store_full_core_nats_serves(tmp_path):
    """There is room for a kilobyte, which is less than two replicas' last heartbeats."""
    limits = ", jetstream: { max_memory: 1024, max_file: 1024, max_streams: 10 }"
    async with (
        running_nats_server(tmp_path / "nats", config=ACCOUNT % limits) as server,
        one_region(server) as mesh,
    ):
        replicas = mesh.routers["us"].core.replicas
        seqs = {each.heartbeat.replica: each.heartbeat.seq for each in replicas}
        await mesh.until(
            lambda: all(r.heartbeat.seq > seqs[r.heartbeat.replica] + 5 for r in replicas),
            "heartbeats to go on",
        )
        bus = await connect(BusAddress(server.url), name="look", inbox_prefix="_INBOX.look")
        stream = await bus.jetstream().stream_info(subjects.STREAM_HEARTBEATS)
        await bus.close()
        assert stream.state.bytes <= 1024
        assert stream.state.messages < 2
        await answered(mesh, 4)


# A leaf link is down.


async def test_with_the_link_down_a_region_serves_its_own_at_once(tmp_path):
    port, dialled = free_ports(2)
    listen = Address("127.0.0.1", dialled)
    async with (
        WanProxy(Address("127.0.0.1", port), one_way_s=0.01, listen=listen) as wan,
        nats_pair(tmp_path, "us", "eu", port=port, dialled=dialled) as servers,
        two_regions(servers) as mesh,
    ):
        near, far = mesh.engines
        near.waiting = 9
        await mesh.until_ready("us", 0)
        far.behaviour = hang()
        abroad = asyncio.create_task(post(mesh, chat("placed again", stream=True)))
        await mesh.until(lambda: bool(far.seen), "eu to have the request")
        wan.cut()
        near.waiting = 0
        await mesh.until_ready("us", 1)
        decision = await local_decision(mesh)
        assert (decision["placement"], decision["hops"]) == ("local", 0)
        status, body, _ = await abroad
        assert (status, b"hello" in body) == (200, True)
        peers, clock = mesh.routers["us"].core.peers, asyncio.get_running_loop().time
        await mesh.until(
            lambda: peers.health(peers.get("eu"), clock()) is Health.RED, "eu to look lost"
        )
        await answered(mesh, 2)
        await wan.heal()
        await mesh.until_peer("us", "eu")


async def local_decision(mesh):
    status, _, headers = await post(mesh, chat("at home"), **{"x-mesh-debug": "1"})
    assert status == 200
    return orjson.loads(headers["x-mesh-decision"])


# A nats-server restarts.


async def test_after_a_restart_of_the_bus_everything_is_made_again(nats_server):
    """Subscriptions by the client, the stream in the server's memory by the router."""
    async with one_region(nats_server) as mesh:
        requests = mesh.routers["us"].requests
        await nats_server.stop()
        await mesh.until(lambda: requests.not_ready_because() is not None, "the bus to be missed")
        await nats_server.start()
        await mesh.until(lambda: requests.not_ready_because() is None, "the bus to be back")
        await answered(mesh, 4)
        bus = await connect(BusAddress(nats_server.url), name="look", inbox_prefix="_INBOX.look")
        async with asyncio.timeout(PATIENCE_S):
            while await stored(bus) < 2:
                await asyncio.sleep(0.02)
        await bus.close()


async def stored(bus):
    """How many replicas' last heartbeats the stream has; none while there is no stream."""
    try:
        return (await bus.jetstream().stream_info(subjects.STREAM_HEARTBEATS)).state.messages
    except nats.js.errors.NotFoundError:
        return 0


# Clocks of hosts are minutes apart.


async def test_hosts_clocks_that_are_minutes_apart_change_nothing(tmp_path):
    skews = {"us": MINUTES_MS, "us_agent": -MINUTES_MS, "eu": -MINUTES_MS, "eu_agent": MINUTES_MS}
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        two_regions(servers, **skews) as mesh,
    ):
        for home, away, engine in (("us", "eu", 0), ("eu", "us", 1)):
            await answered(mesh, 2, home)
            mesh.engines[engine].waiting = 9
            await mesh.until_ready(home, 0)
            status, _, headers = await post(mesh, chat("abroad"), home)
            assert (status, headers["x-mesh-region"]) == (200, away)
            mesh.engines[engine].waiting = 0
            await mesh.until_ready(home, 1)


async def test_an_agent_whose_clock_was_set_back_is_heard_again(nats_server):
    """Its new life has a lower epoch than the one before: no more than a lost one's wait."""
    async with one_replica(nats_server) as mesh:
        [engine] = mesh.engines
        await mesh.kill_agent("us-0")
        await mesh.agent("us", "us-0", engine, skew_ms=-MINUTES_MS)
        replicas = mesh.routers["us"].core.replicas
        before = {each.heartbeat.epoch for each in replicas}
        await mesh.until(
            lambda: any(each.heartbeat.epoch < min(before) for each in replicas), "its new life"
        )
        await mesh.until_ready("us", 1)
        await answered(mesh, 2)


WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
# Epochs, which are compared with earlier ones of the same process only, and what a simulated
# engine shows people of itself.
EPOCHS = {
    "mesh/cli/router.py",
    "mesh/cli/batch_runner.py",
    "agents/runtime/command.py",
    "agents/simserver/server.py",
}
# Files and jobs have times of day, as in OpenAI's API; so have lines of the access log, what
# operators order, and a process's start, which is computed from its age. Each is for people.
TIMES_OF_DAY = {
    "agents/profiler/command.py",
    "agents/profiler/run.py",
    "agents/simserver/kv_events.py",
    "infra/metrics_page.py",
    "mesh/adapters/access_log.py",
    "mesh/adapters/ended_requests.py",
    "mesh/batch_client/watch.py",
    "mesh/cli/batch.py",
    "mesh/cli/drain.py",
    "mesh/cli/keys.py",
    "mesh/cli/top.py",
    "mesh/cli/usage.py",
    "mesh/console/orders.py",
    "mesh/console/viewing.py",
    "mesh/demo/engine_profile.py",
    "mesh/http/callers.py",
    "mesh/runtime/batch_runner.py",
    "mesh/runtime/keys_in_force.py",
    "mesh/runtime/limits.py",
    "mesh/runtime/usage_writer.py",
}


def test_the_hosts_clock_is_read_for_epochs_and_times_of_day_alone():
    """What travels between hosts is durations, counted by clocks that never go back."""
    found = {
        str(path.relative_to(ROOT))
        for package in ("mesh", "agents", "infra", "schemas")
        for path in (ROOT / package).rglob("*.py")
        if any(".".join(clock) in (text := path.read_text()) for clock in WALL_CLOCKS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (node.value.id, node.attr) in WALL_CLOCKS
    }
    assert found == EPOCHS | TIMES_OF_DAY
