"""`mesh doctor` on running regions: it finds nothing in healthy ones, and what is wrong in others.

Region eu is confined to `eu`, us carries `us`; a replica each, everybody with rendered credentials.
"""

import shlex
import shutil
from dataclasses import replace
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from nats.js.api import RePublish

from infra.address import parse_address
from infra.bus import close, connect
from infra.nats.region_config import ACCOUNT, OBSERVE_ACCOUNT, OPERATE_ACCOUNT
from infra.topology import parse
from mesh.adapters.streams import altered as altered_in
from mesh.adapters.streams import kept, lease
from mesh.cli.doctor import command as doctor
from mesh.doctor.findings import CheckResult, is_healthy
from mesh.doctor.logins import NoCredentials, read_logins
from schemas.ids import RegionId
from schemas.subjects import STREAM_HEARTBEATS, STREAM_LEASES, inbox_prefix
from tests.support.examined_mesh import command, examined, ill, looked, running
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import NatsRegions, mesh_toml


def is_well(ended):
    status, _, _ = ended
    return status == 0


def check_times(found):
    for way in ("round trip", "server link"):
        took_ms = found["us", way, "eu"]["value"]
        assert 0 < took_ms < 10_000 and took_ms == float(f"{took_ms:.3g}"), way


async def test_a_healthy_mesh_and_then_one_that_misses_a_replica(tmp_path):
    async with running(tmp_path) as (_, mesh):
        status, out, err = await looked(lambda: command(tmp_path, "--json"), is_well)
        report = orjson.loads(out)
        assert (status, err, report["healthy"]) == (0, "", True)
        found = {(one["region"], one["check"], one["about"]): one for one in report["findings"]}
        for region, peer in (("us", "eu"), ("eu", "us")):
            for key in (
                ("bus", "server"),
                ("stream", "HEARTBEATS"),
                ("stream", "LEASES"),
                ("stream", "CONTROL"),
                ("lease", "owner"),
                ("lease", f"write for {peer}"),
                ("permissions", f"answers for {peer}"),
                ("heartbeat", f"{region}-0"),
                ("router", "r1"),
                ("link", peer),
                ("server link", peer),
                ("labels", f"{peer}/r1"),
                ("round trip", peer),
                ("permissions", "observer"),
                ("permissions", "operator"),
                ("permissions", "router"),
                ("residency", f"prompts to {peer}"),
            ):
                assert found[(region, *key)]["verdict"] == "ok", key
        assert found["us", "residency", "prefixes of eu"]["detail"] == "not received here"
        assert "mesh.us.ingress" in found["eu", "residency", "prompts to us"]["detail"]
        assert report["regions"] == ["us", "eu"] and report["config"].endswith("mesh.toml")
        assert "its own routers, by r1" in found["us", "lease", "owner"]["detail"]
        tried = found["us", "permissions", "router"]["detail"]
        assert "mesh.eu.gossip.lease" in tried and "mesh.eu.gossip.snapshot.eu" in tried
        assert "mesh.eu.gossip.snapshot.*" in found["us", "permissions", "answers for eu"]["detail"]
        tried = found["us", "permissions", "subscriptions of the observer"]["detail"]
        assert "mesh.us.lease.owner" in tried and "mesh.us.replica.doctor.work" in tried
        for user in ("observer", "operator"):
            assert "mesh.us.control.write" in found["us", "permissions", user]["detail"]
        check_times(found)

        status, out, _ = await looked(lambda: command(tmp_path), is_well)
        assert status == 0, out
        first, well, counts = out.splitlines()
        assert first == f"Examining us, eu of {tmp_path / 'mesh.toml'}."
        assert well.startswith("passed: ") and well.endswith(" (--verbose lists them)")
        assert "stream 10" in well and "heartbeat 2" in well
        assert counts == f"{len(found)} ok"

        await mesh.kill_agent("eu-0")
        status, out, _ = await looked(lambda: command(tmp_path), lambda it: "1 bad" in it[1])
        assert status == 1
        [line] = [line for line in out.splitlines() if line.startswith("│ eu ")]
        assert {"heartbeat", "eu-0", "bad", "silent"} <= set(line.split())
        assert "heartbeat 1" in out and "1 bad" in out
        _, whole, _ = await looked(
            lambda: command(tmp_path, "--verbose"), lambda it: "1 bad" in it[1]
        )
        beats = [line for line in whole.splitlines() if "heartbeat" in line and "-0" in line]
        assert [" ok " in line for line in beats] == [True, False]
        assert "passed:" not in whole


async def test_a_router_may_be_several_processes(tmp_path):
    async with running(tmp_path) as (regions, mesh):
        await mesh.router("us", "r1-0", ground=regions.topology.ground)
        changes = {"workers": 2, "metrics": parse_address("127.0.0.1:9101")}
        two = regions.topology.regions["us"].model_copy(update=changes)
        meant = {**regions.topology.regions, "us": two}
        topology = regions.topology.model_copy(update={"regions": meant})

        async def of_router():
            findings = await examined(regions, tmp_path, topology=topology)
            [found] = [one for one in findings if (one.region, one.check) == ("us", "router")]
            return found.about, found.verdict, found.detail

        async def is_said(*expected):
            assert await looked(of_router, lambda found: found == expected) == expected

        said = "2 of 2 workers send digests, 1 replicas ready"
        await is_said("r1", CheckResult.OK, said)
        await mesh.routers["us"].close()
        await is_said("r1", CheckResult.WARNING, said.replace("2 of", "1 of"))
        await mesh.routers["us/r1-0"].close()
        gone = "not heard for 1.5 s, and not connected to its nats-server: ended or cut off"
        await is_said("r1", CheckResult.BAD, gone)
        # One that says nothing any more, and whose connection stays.
        login = read_logins(topology, tmp_path / "rendered")[RegionId("us")].router
        stopped = await connect(
            login, name="router us/r1-0", inbox_prefix=inbox_prefix("us", "r1-0")
        )
        late = "not heard for 1.5 s, and connected to its nats-server: "
        await is_said("r1", CheckResult.BAD, late + "stopped, hanging or starved of CPU")
        await close(stopped)


async def test_it_finds_what_the_bus_accepts_and_must_refuse(tmp_path):
    """Rendered without labels, while the file has some: as after forgetting to render anew."""
    async with running(tmp_path, rendered={}) as (regions, _):
        meant = parse((tmp_path / "mesh.toml").read_text(), "mesh.toml")
        tables = {
            name: region.model_copy(update={"residency": (name,), "confined_to": (name,)})
            for name, region in meant.regions.items()
        }
        topology = meant.model_copy(update={"regions": tables})
        expected = {
            ("us", "residency", "prompts to eu"),
            ("eu", "residency", "prompts to us"),
            ("us", "residency", "prefixes of eu"),
            ("us", "labels", "us/r1"),
        }
        findings = await looked(
            lambda: examined(regions, tmp_path, topology=topology), lambda it: ill(it) >= expected
        )
        assert not is_healthy(findings)
        assert ill(findings) >= expected
        [leak] = [one for one in findings if (one.region, one.about) == ("eu", "prompts to us")]
        assert "the bus accepted what it must refuse: mesh.us.ingress" in leak.detail


async def test_it_finds_a_user_with_too_many_permissions(tmp_path):
    def edit(name: str, tree: dict[str, Any]) -> None:
        if name == "us":
            for account in (ACCOUNT, OBSERVE_ACCOUNT, OPERATE_ACCOUNT):
                for user in tree["accounts"][account]["users"]:
                    user.pop("permissions")

    async with running(tmp_path, edit=edit) as (regions, _):
        expected = {
            ("us", "permissions", "observer"),
            ("us", "permissions", "subscriptions of the observer"),
            ("us", "permissions", "operator"),
            ("us", "permissions", "subscriptions of the operator"),
            ("us", "permissions", "router"),
            ("us", "permissions", "answers for eu"),
            ("us", "residency", "prompts to eu"),
        }
        found = await looked(lambda: examined(regions, tmp_path), lambda it: ill(it) == expected)
        assert ill(found) == expected


async def test_it_finds_who_owns_a_region_and_when_nobody_does(tmp_path):
    async with running(tmp_path) as (regions, mesh):
        await mesh.routers["eu"].close()
        adopter = mesh.routers["us"].core.ownership
        await mesh.until(lambda: RegionId("eu") in adopter.adopted, "us to adopt eu")
        verdicts = {"us": CheckResult.OK, "eu": CheckResult.WARNING}
        owners = await looked(
            lambda: owners_examined(regions, tmp_path), lambda it: of_each(it) == verdicts
        )
        assert (
            owners["eu"].verdict is CheckResult.WARNING and "adopted by us" in owners["eu"].detail
        )
        assert owners["us"].verdict is CheckResult.OK

        await mesh.routers["us"].close()
        verdicts = {"us": CheckResult.BAD, "eu": CheckResult.BAD}
        owners = await looked(
            lambda: owners_examined(regions, tmp_path), lambda it: of_each(it) == verdicts
        )
        for region, owner in owners.items():
            assert owner.verdict is CheckResult.BAD
            assert "expired: nobody renews it; the last was us" in owner.detail, region


async def owners_examined(regions, directory):
    return of_owners(await examined(regions, directory))


def of_each(owners):
    return {region: owner.verdict for region, owner in owners.items()}


def of_owners(findings):
    return {one.region: one for one in findings if (one.check, one.about) == ("lease", "owner")}


async def test_it_finds_an_altered_or_missing_stream_and_how_to_repair_it(tmp_path):
    async with running(tmp_path) as (regions, mesh):
        for router in mesh.routers.values():
            await router.close()
        client = await regions.connect("us", "setup")
        streams = client.jetstream()
        loose = replace(lease("us"), republish=RePublish(src=">", dest="x.>"))
        await streams.update_stream(replace(loose, max_msgs_per_subject=9))
        await streams.delete_stream(STREAM_HEARTBEATS)
        findings = await examined(regions, tmp_path)
        found = {(one.region, one.about): one for one in findings if one.check == "stream"}
        altered, gone = found["us", STREAM_LEASES], found["us", STREAM_HEARTBEATS]
        assert "max_msgs_per_subject is 9, republish is" in altered.detail
        assert "not found" in gone.detail
        assert {altered.verdict, gone.verdict} == {CheckResult.BAD}
        assert found["eu", STREAM_LEASES].verdict is CheckResult.OK
        options = shlex.split(gone.remedy.command)
        assert options[:3] == ["mesh", "infra", "streams"]
        status, out, err = await mesh_command(*options[1:])
        assert (status, err) == (0, "")
        assert out.splitlines() == [
            "us: stream HEARTBEATS made",
            "us: stream LEASES put right",
            "us: stream CONTROL is as it should be",
            "us: stream KEYS is as it should be",
            "us: stream USAGE is as it should be",
        ]
        assert await altered_streams(client, "us") == []
        await client.close()


async def altered_streams(client, region):
    wanted = kept(region, has_peers=True)
    return [one for config in wanted for one in await altered_in(client, config)]


async def test_it_prints_what_it_examines_and_that_nothing_runs_there(tmp_path):
    text = mesh_toml(("us", "eu"))
    (tmp_path / "mesh.toml").write_text(text)
    NatsRegions(parse(text, "mesh.toml"), tmp_path / "rendered")
    status, out, err = await command(tmp_path)
    assert (status, out) == (2, f"Examining us, eu of {tmp_path / 'mesh.toml'}.\n")
    assert "no nats-server listens at nats://" in err and "start it" in err

    status, out, err = await command(tmp_path, config=None)
    assert status == 2 and "Examining us, eu of the demo's mesh.toml; --config names anoth" in out
    assert "`mesh up` starts the demo" in err


async def test_it_finds_a_dead_region_from_the_remaining_one(tmp_path):
    async with running(tmp_path) as (regions, mesh):
        await mesh.kill_agent("eu-0")
        await mesh.routers["eu"].close()
        await regions.stop_one("eu")
        shutil.rmtree(tmp_path / "rendered" / "eu")
        (tmp_path / "rendered" / "us" / "credentials" / "system.env").unlink()
        expected = {("us", "link", "eu"), ("us", "round trip", "eu")}
        findings = await looked(lambda: examined(regions, tmp_path), lambda it: ill(it) == expected)
        assert ill(findings) == expected
        unknown = {one.about for one in findings if one.verdict is CheckResult.UNKNOWN}
        assert unknown == {"system", "write for eu"}


def test_without_credentials_it_does_not_begin(tmp_path):
    mesh = parse(mesh_toml(("us",), replicas=1), "mesh.toml")
    with pytest.raises(NoCredentials, match="mesh infra nats --out"):
        read_logins(mesh, tmp_path)
    folder = tmp_path / "us" / "credentials"
    folder.mkdir(parents=True)
    (folder / "operator.env").write_text("NATS_URL=nats://127.0.0.1:1\n")
    with pytest.raises(NoCredentials, match="render it again"):
        read_logins(mesh, tmp_path)


async def test_the_command_exits_with_2_without_credentials(tmp_path):
    (tmp_path / "mesh.toml").write_text(mesh_toml(("us",)))
    status, out, err = await command(tmp_path)
    assert (status, out) == (2, "")
    assert "no credentials of us" in err


def test_without_the_option_it_looks_where_mesh_up_keeps_credentials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(doctor, [])
    assert ended.exit_code == 2
    said = " ".join(ended.output.split())
    assert "no credentials of us, eu, ap below .mesh/config; give as --credentials" in said
    assert "a plain `mesh up` keeps them in .mesh/config" in said
