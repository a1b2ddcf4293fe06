"""A region whose server does not answer: one row, one look, and nobody else waits for it."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest

from infra.bus import BusAddress, connect
from infra.process import end_all
from infra.topology import parse
from mesh.doctor.connectivity import NoServerRuns
from mesh.doctor.examination import ExaminationSettings, TimeLimits, examine
from mesh.doctor.findings import CheckResult
from mesh.doctor.logins import Logins, read_logins
from mesh.doctor.manual_commands import SystemdCommands
from schemas import subjects
from tests.support.examined_mesh import command, examined, ill, looked, running
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.stopped import stopped
from tests.support.taps import TAP, add_tap


def on_machines(topology):
    return SystemdCommands(topology, Path("mesh.toml"), Path("rendered"))


PATIENT = TimeLimits(greeting_s=60, answer_s=60, login_s=60, all_s=100)
THE_SERVER_OF_EU = {("eu", "bus", "server")}
OF_LINKS = {
    ("link", "eu"),
    ("round trip", "eu"),
    ("lease", "write for eu"),
    ("server link", "eu"),
}


def of_eu(findings):
    [row] = [one for one in findings if (one.region, one.check) == ("eu", "bus")]
    return row


def following(findings):
    return {(one.check, one.about) for one in findings if one.because == "eu"}


async def test_a_dead_region_is_one_row_with_a_remedy(tmp_path):
    async with running(tmp_path) as (regions, mesh):
        await mesh.kill_agent("eu-0")
        await mesh.routers["eu"].close()
        await regions.stop_one("eu")

        async def report():
            _, out, _ = await command(tmp_path, "--json")
            return orjson.loads(out)

        told = await looked(report, lambda it: len(of_cause(it, None)) == 1)
        assert not told["healthy"] and told["regions"] == ["us", "eu"]
        [row] = of_cause(told, None)
        assert (row["region"], row["check"], row["about"]) == ("eu", "bus", "server")
        assert "nobody listens there; nor is it reached from us" in row["detail"]
        assert "systemctl restart mesh-nats@eu" in row["remedy"]["command"]
        assert {(one["check"], one["about"]) for one in of_cause(told, "eu")} == OF_LINKS
        alive = {one["check"] for one in told["findings"] if one["verdict"] == "ok"}
        assert alive >= {"bus", "stream", "heartbeat", "router", "lease", "permissions"}

        status, out, _ = await looked(lambda: command(tmp_path), lambda it: " 1 bad" in it[1])
        assert status == 1
        assert out.splitlines()[-1].endswith("1 bad, 4 that follow from these")
        assert not [line for line in out.splitlines() if line.startswith("│ us ")]
        at = next(n for n, line in enumerate(out.splitlines()) if line.startswith("eu, by hand: "))
        assert out.splitlines()[at + 1] == f"  {row['remedy']['command']}"
        _, whole, _ = await command(tmp_path, "--verbose")
        assert "because of eu" in whole


def of_cause(report, region):
    """What is not well, and follows from that region's trouble; None: from nobody else's."""
    ill = [one for one in report["findings"] if one["verdict"] != "ok"]
    return [one for one in ill if one["because"] == region]


async def test_a_stopped_server_is_given_up_after_the_reported_limit(tmp_path):
    """And when its routers alone are stopped, that is the trouble, not the links."""
    async with running(tmp_path) as (regions, mesh):
        async with stopped(regions.pid("eu")):
            found = await looked(
                lambda: examined(regions, tmp_path, limits=TimeLimits(greeting_s=1.5)),
                lambda it: ill(it) == THE_SERVER_OF_EU and len(following(it)) >= 3,
            )
        assert ill(found) == THE_SERVER_OF_EU
        assert "sends nothing for 1.5 s; nor is it reached from us" in of_eu(found).detail
        assert following(found) >= OF_LINKS - {("server link", "eu")}  # that one lingers

        await mesh.routers["eu"].close()
        only = {("eu", "router", "r1")}
        found = await looked(lambda: examined(regions, tmp_path), lambda it: ill(it) == only)
        assert ill(found) == only
        assert following(found) == {("link", "eu"), ("round trip", "eu")}


@asynccontextmanager
async def silent(answer):
    """Takes connections and says nothing until `answer()` has come back, then that."""
    asked = []

    async def greet(reader, writer):
        asked.append(asyncio.current_task())
        try:
            writer.write(await answer())
        finally:
            writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        url = f"nats://{host}:{port}"
        yield Logins(*(BusAddress(url, user, user) for user in "abc")), asked
        await end_all(asked)


def three():
    return parse(mesh_toml(replicas=1), "mesh.toml")


def manner(limits):
    return ExaminationSettings(0.2, asyncio.get_running_loop().time, limits)


async def test_all_regions_are_examined_at_once_and_each_dead_one_once():
    """No server speaks before all have been asked: one after the other, each would time out."""
    topology, all_asked = three(), asyncio.Barrier(3)

    async def answer():
        await all_asked.wait()
        return b"HELLO"

    async with AsyncExitStack() as stack:
        servers = {r: await stack.enter_async_context(silent(answer)) for r in topology.regions}
        logins = {region: login for region, (login, _) in servers.items()}
        found = await examine(
            topology,
            logins,
            manner(PATIENT),
            on_machines(topology),
        )
        assert [one.region for one in found] == list(topology.regions)
        assert all("it is not a nats-server" in one.detail for one in found)
        assert [len(asked) for _, asked in servers.values()] == [1, 1, 1]


async def test_an_examination_ends_at_its_limit():
    topology = three()
    limits = TimeLimits(greeting_s=60, all_s=0.5)
    async with silent(asyncio.Event().wait) as (login, _):
        found = await examine(
            topology,
            {"eu": login},
            manner(limits),
            on_machines(topology),
        )
    [row] = found
    assert (row.check, row.about, row.verdict) == ("bus", "examination", CheckResult.BAD)
    assert "longer than 0.7 s" in row.detail


async def test_where_no_server_accepts_connections_nothing_runs(tmp_path):
    topology = three()
    regions = NatsRegions(topology, tmp_path / "rendered")
    logins = read_logins(topology, tmp_path / "rendered")
    with pytest.raises(NoServerRuns, match=str(regions.address("ap", "router").url)):
        await examine(
            topology,
            logins,
            manner(PATIENT),
            on_machines(topology),
        )


@asynccontextmanager
async def one_alive(directory):
    """Of three regions, us has a server; yields its topology, credentials, and a tap in us."""
    topology = three()
    regions = NatsRegions(topology, directory, edit=lambda _, tree: add_tap(tree))
    try:
        await regions.start()
        for region in ("eu", "ap"):
            await regions.stop_one(region)
        tap = await connect(
            BusAddress(regions.address("us", "router").url, TAP, TAP),
            name=TAP,
            inbox_prefix=subjects.inboxes("us")[:-2],
        )
        yield topology, read_logins(topology, directory), tap
        await tap.close()
    finally:
        await regions.stop()


async def test_peers_are_pinged_at_once_and_none_waits_for_another_regions_server(tmp_path):
    """eu's ping is answered after ap's was heard; eu's server speaks after both were."""
    heard, both = {"eu": asyncio.Event(), "ap": asyncio.Event()}, asyncio.Event()
    answers = set()

    async def pong(region, other, msg):
        heard[region].set()
        await heard[other].wait()
        both.set()
        await tap.publish(msg.reply, msg.data)

    async def answer():
        await both.wait()
        return b"HELLO"

    def answering(region, other):
        async def on_ping(msg):
            answers.add(task := asyncio.create_task(pong(region, other, msg)))
            task.add_done_callback(answers.discard)

        return on_ping

    async with one_alive(tmp_path) as (topology, logins, tap), silent(answer) as (eu, _):
        await tap.subscribe(subjects.ping("eu"), cb=answering("eu", "ap"))
        await tap.subscribe(subjects.ping("ap"), cb=answering("ap", "eu"))
        await flushed(tap)
        logins = {**logins, "eu": eu}
        limits = TimeLimits(greeting_s=60, answer_s=30, login_s=60, all_s=100)
        found = await examine(
            topology,
            logins,
            manner(limits),
            on_machines(topology),
        )
    trips = {one.about: one.verdict for one in found if one.check == "round trip"}
    assert trips == {"eu": CheckResult.OK, "ap": CheckResult.OK}
    assert "it is not a nats-server" in of_eu(found).detail


async def test_a_login_that_reaches_its_time_limit_is_reported(tmp_path):
    """Pings that the tap swallows are waited for beyond what a login may take."""

    async def swallow(msg):
        pass

    async with one_alive(tmp_path) as (topology, logins, tap):
        await tap.subscribe(subjects.ping("eu"), cb=swallow)
        await flushed(tap)
        limits = TimeLimits(answer_s=60, login_s=1, all_s=60)
        found = await examine(
            topology,
            logins,
            manner(limits),
            on_machines(topology),
        )
    ends = {(one.region, one.about): one.detail for one in found if one.check == "login"}
    assert ends["us", "router"] == "not done within 1.2 s: the bus answers too slowly"
