"""What the logins of the account BATCH can do, asked of real servers; and what crosses a link."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import RePublish

from infra.nats import bundle, permissions, server
from infra.nats.region_config import BATCH_USERS
from infra.topology import parse
from mesh.adapters import streams
from mesh.batch import streams as batch_streams
from schemas.batch import (
    STREAM_FILE_RECORDS,
    STREAM_FILES,
    STREAM_JOBS,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
)
from schemas.subjects import INBOX_BATCH_SETUP, STREAM_HEARTBEATS, STREAM_LEASES
from tests.infra.nats.test_roles import logged_in
from tests.support.batch_regions import batch_toml
from tests.support.link_speech import overlaps
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.taps import Taps, add_tap
from tests.support.until import PATIENCE_S

ALL = (STREAM_FILES, STREAM_FILE_RECORDS, STREAM_JOBS, STREAM_TASKS, STREAM_LINES, STREAM_RESULTS)
LINE = "batch.line.batch_0.1"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[NatsRegions]:
    """As rendered, but for the tap."""
    directory, toml = tmp_path_factory.mktemp("mesh"), batch_toml(("us", "eu"))
    with running_regions(directory, toml=toml, edit=lambda _, tree: add_tap(tree)) as regions:
        yield regions


def test_without_batch_runners_nothing_of_it_is_rendered(tmp_path):
    for files in bundle.write(parse(mesh_toml(), "t"), tmp_path).values():
        assert not set(BATCH_USERS) & set(files.credentials)
        assert '"BATCH' not in files.config.read_text()


def test_where_runners_are_gone_their_credentials_go(tmp_path):
    toml = batch_toml(("us", "eu"))
    written = bundle.write(parse(toml, "t"), tmp_path)
    assert set(BATCH_USERS) <= set(written["us"].credentials)
    server.check_config(server.find(), written["us"].config)
    fewer = toml.replace('batch_runners = ["batch-0"]', "batch_runners = []", 1)
    bundle.write(parse(fewer, "t"), tmp_path)
    left = {
        name: sorted(path.stem for path in (tmp_path / name / "credentials").glob("batch*"))
        for name in ("us", "eu")
    }
    assert left == {"us": [], "eu": sorted(BATCH_USERS)}


async def test_its_streams_are_made_with_its_limits_and_repaired(mesh: NatsRegions):
    configs = {str(one.name): one for one in batch_streams.kept(mesh.topology.batch)}
    assert set(configs) == set(ALL)
    assert {(await mesh.set_up("us"))[name] for name in ALL} == {streams.AS_IT_SHOULD_BE}
    inbox = INBOX_BATCH_SETUP
    async with (
        logged_in(mesh, "batch-setup", inbox) as setup,
        logged_in(mesh, "batch-observer") as seen,
    ):
        lines = configs[STREAM_LINES]
        tapped = RePublish(src=">", dest="tapped.>")
        context = setup.client.jetstream()
        await context.update_stream(replace(lines, republish=tapped, max_bytes=1 << 20))
        found = await streams.altered(seen.client, lines)
        assert [one.split()[0] for one in found] == ["max_bytes", "republish"]
        assert (await mesh.set_up("us"))[STREAM_LINES] == streams.PUT_RIGHT
        assert await streams.altered(seen.client, lines) == []
        await context.delete_stream(STREAM_TASKS)
        assert (await mesh.set_up("us"))[STREAM_TASKS] == streams.MADE


async def test_who_makes_the_streams_has_nothing_told_out_of_them(mesh: NatsRegions):
    """A stream may republish what it takes to any subject of its account."""
    [lines] = [one for one in batch_streams.kept(mesh.topology.batch) if one.name == STREAM_LINES]
    heard: list[bytes] = []

    async def note(msg: Msg) -> None:
        heard.append(msg.data)

    inbox = INBOX_BATCH_SETUP
    async with (
        logged_in(mesh, "batch-setup", inbox) as setup,
        logged_in(mesh, "batch") as batch,
    ):
        await setup.client.subscribe(f"{inbox}.>", cb=note)
        told = RePublish(src=">", dest=f"{inbox}.told.>")
        await setup.client.jetstream().update_stream(replace(lines, republish=told))
        answer = await batch.client.request(LINE, b"secret", timeout=PATIENCE_S)
        assert b"error" not in answer.data
        await setup.client.publish("$JS.API.INFO", reply=f"{inbox}.later")
        async with asyncio.timeout(PATIENCE_S):
            while not any(b"account_info_response" in one for one in heard):
                await asyncio.sleep(0.01)
        assert b"secret" not in heard
        assert (await mesh.set_up("us"))[STREAM_LINES] == streams.PUT_RIGHT
        await batch.client.jsm().purge_stream(STREAM_LINES)


async def test_runners_and_routers_make_and_alter_no_stream(mesh: NatsRegions):
    async with logged_in(mesh, "batch") as batch:
        for stream in ALL:
            await batch.client.jsm().stream_info(stream)
        await batch.allowed()
        calls = [f"{verb}.{name}" for verb in ("CREATE", "UPDATE", "DELETE") for name in ALL]
        for call in (*calls, "CREATE.MINE", "MSG.DELETE.BATCH_LINES", "RESTORE.BATCH_LINES"):
            await batch.refuses_publish(f"$JS.API.STREAM.{call}")
        for subject in ("$KV.other.x", "batch.line.x", "mesh.us.ingress", "$SYS.x"):
            await batch.refuses_publish(subject)
        await batch.refuses_subscribe("batch.>")
        await batch.refuses_subscribe("$O.files.C.>")


async def test_the_accounts_do_not_see_each_other(mesh: NatsRegions):
    inbox = "_INBOX.us.r1"
    async with logged_in(mesh, "batch") as batch, logged_in(mesh, "router", inbox) as router:
        for stream in (STREAM_HEARTBEATS, STREAM_LEASES):
            await batch.refuses_publish(f"$JS.API.STREAM.INFO.{stream}")
            await batch.refuses_publish(f"$JS.API.DIRECT.GET.{stream}")
        for stream in ALL:
            await router.refuses_publish(f"$JS.API.STREAM.INFO.{stream}")
            await router.refuses_publish(f"$JS.API.DIRECT.GET.{stream}")
        await router.refuses_publish(LINE)
        # Allowed or not, the name is of another account: nothing there has its streams.
        async with logged_in(mesh, "operator") as operator:
            names = await operator.client.request("$JS.API.STREAM.NAMES", timeout=PATIENCE_S)
            found = sorted(json.loads(names.data)["streams"])
            assert found == ["CONTROL", "HEARTBEATS", "KEYS", "LEASES", "USAGE"]


async def test_a_watcher_sees_counts_and_no_content_and_writes_nothing(mesh: NatsRegions):
    async with logged_in(mesh, "batch") as batch, logged_in(mesh, "batch-observer") as seen:
        answer = await batch.client.request(LINE, b"secret", timeout=PATIENCE_S)
        assert b"error" not in answer.data
        manager = seen.client.jsm()
        assert (await manager.stream_info(STREAM_LINES)).state.messages == 1
        assert {one.config.name for one in await manager.streams_info()} == set(ALL)
        assert await manager.consumers_info(STREAM_LINES) == []
        await seen.allowed()
        for call in ("STREAM.MSG.GET", "DIRECT.GET", "STREAM.PURGE", "STREAM.SNAPSHOT"):
            await seen.refuses_publish(f"$JS.API.{call}.{STREAM_LINES}")
        await seen.refuses_publish(f"$JS.API.CONSUMER.CREATE.{STREAM_LINES}.mine.{LINE}")
        await seen.refuses_publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM_LINES}.mine")
        await seen.refuses_publish(LINE)
        for subject in ("batch.>", ">", "$JS.>"):
            await seen.refuses_subscribe(subject)
        # JetStream answers to any reply subject of its account: this one is another.
        for aimed_at in ("batch.result.batch_0.1", "batch.line.batch_0.2"):
            for call in ("INFO", f"STREAM.INFO.{STREAM_LINES}"):
                await seen.client.publish(f"$JS.API.{call}", b"", reply=aimed_at)
        await manager.stream_info(STREAM_LINES)
        assert (await manager.stream_info(STREAM_RESULTS)).state.messages == 0
        assert (await manager.stream_info(STREAM_LINES)).state.messages == 1
        await batch.client.jsm().purge_stream(STREAM_LINES)


def test_no_pattern_of_a_link_meets_what_is_in_the_account():
    inside = [*permissions.batch().publish, *permissions.batch_setup().publish]
    inside = [pattern for pattern in inside if not pattern.startswith("$JS.API.STREAM.")]
    for here, there in (("us", "eu"), ("eu", "us")):
        for spoken in permissions.allowed_across(here, there):
            assert not any(overlaps(spoken, pattern) for pattern in inside)


async def test_a_peer_reaches_nothing_of_it_over_the_link(mesh: NatsRegions):
    """Nor does a process of the same region whom nothing is forbidden in its own account."""
    said = (
        "batch.result.batch_0.1",
        "batch.line.batch_0.2",
        f"$JS.API.STREAM.PURGE.{STREAM_LINES}",
        f"$JS.API.DIRECT.GET.{STREAM_LINES}.{LINE}",
        "$KV.batches.batch_0",
    )
    async with Taps(mesh) as taps, logged_in(mesh, "batch") as batch:
        for region in ("us", "eu"):
            await taps.listen(region, ">")
        stored = await batch.client.request(LINE, b"secret", timeout=PATIENCE_S)
        assert b"error" not in stored.data
        for region in ("us", "eu"):
            await taps.say(region, said)
        await taps.fence("eu", "us")
        await taps.fence("us", "eu")
        assert taps.heard_of("eu", [LINE]) | taps.heard_of("us", [LINE]) == set()
        states = {one: (await batch.client.jsm().stream_info(one)).state for one in ALL}
        assert {one: state.messages for one, state in states.items()} == {
            **dict.fromkeys(ALL, 0),
            STREAM_LINES: 1,
        }
        await batch.client.jsm().purge_stream(STREAM_LINES)


async def test_no_other_login_of_the_region_gets_into_the_account(mesh: NatsRegions):
    for user in ("router", "agent-us-0", "observer", "operator", "setup"):
        prefix = "_INBOX.us.r1" if user == "router" else "_INBOX"
        async with logged_in(mesh, user, prefix) as other:
            await other.client.publish(LINE, b"forged")
            with pytest.raises((nats.errors.TimeoutError, nats.errors.NoRespondersError)):
                await other.client.request(f"$JS.API.STREAM.INFO.{STREAM_LINES}", b"", timeout=0.2)
    async with logged_in(mesh, "batch") as batch:
        assert (await batch.client.jsm().stream_info(STREAM_LINES)).state.messages == 0
