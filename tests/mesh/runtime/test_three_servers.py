"""A region with three nats-servers loses the one that its router and agents are connected to, or is
cut in two."""

import asyncio
import contextlib
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import generate_latest

from infra.nats.bundle import STATE
from infra.topology import parse
from mesh.adapters import streams
from mesh.demo.wan_proxy import WanProxy
from mesh.doctor.findings import CheckResult
from mesh.runtime.control_plane import STREAM_SILENT
from schemas.ids import RegionId
from tests.support.examined_mesh import examined, looked, running
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import chat, post, set_all, small_mesh
from tests.support.stopped import stopped


class Story:
    """An answer that begins, and ends when it may."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, request, body):
        stream = await opened(request)
        await stream.write(event("begins"))
        await self.gate.wait()
        await stream.write(event("ends") + b"data: [DONE]\n\n")
        return stream


async def test_answers_go_on_when_the_server_that_carries_them_is_killed(tmp_path):
    async with running(tmp_path, rendered=None, clusters=("us",)) as (regions, mesh):
        story = Story()
        set_all(mesh, story)
        begun = asyncio.create_task(post(mesh, chat("begun", stream=True)))
        await mesh.until(
            lambda: mesh.sample("us", "mesh_request_ttft_seconds_count", served="local") == 1,
            "an answer to have begun",
        )
        urls = regions.address("us", "router").servers
        used = mesh.routers["us"]._bus.client.connected_url
        [lost] = [
            name
            for name, url in zip(regions.servers("us"), urls, strict=True)
            if used.port == int(url.rpartition(":")[2])
        ]
        regions.kill_one(lost)
        arriving = asyncio.create_task(post(mesh, chat("arriving", stream=True)))
        forwarded = asyncio.create_task(post(mesh, chat("from eu", stream=True), region="eu"))
        story.gate.set()
        whole = event("begins") + event("ends") + b"data: [DONE]\n\n"
        for answer in (begun, arriving, forwarded):
            status, body, _ = await answer
            assert (status, body) == (200, whole)

        def named(found):
            """Of us, what is not well."""
            return {
                (one.check, one.about): one
                for one in found
                if one.region == "us" and one.verdict in (CheckResult.BAD, CheckResult.WARNING)
            }

        wanted = {("bus", f"server {lost}"), ("bus", "cluster"), ("stream", "LEASES")}

        def is_told(found):
            """Until the other two have voted, the stream answers nobody."""
            ill = named(found)
            return wanted <= ill.keys() and f"test-{lost} is " in ill["stream", "LEASES"].detail

        ill = named(await looked(lambda: examined(regions, tmp_path), is_told))
        assert "nobody listens there" in ill["bus", f"server {lost}"].detail
        assert ill["bus", "cluster"].verdict is CheckResult.WARNING
        assert f"test-{lost} is " in ill["stream", "LEASES"].detail, ill
        store = tmp_path / "rendered" / "us" / STATE / lost.removeprefix("us-") / "jetstream"
        assert store.exists()
        shutil.rmtree(store)  # it fetches its copies from the other two
        await regions.start_one(lost)
        found = await looked(lambda: examined(regions, tmp_path), lambda found: not named(found))
        assert not named(found)


async def test_a_stream_from_abroad_goes_on_when_the_server_at_the_end_of_its_link_hangs(tmp_path):
    mesh_toml_text = mesh_toml(("us", "eu"), replicas=1, clusters=("eu",))
    regions = NatsRegions(parse(mesh_toml_text, "mesh.toml"), tmp_path)
    try:
        await regions.start()
        async with scripted_engine() as engine, small_mesh(regions) as mesh:
            story = engine.behaviour = Story()
            for region in ("us", "eu"):
                await mesh.router(region)
            await mesh.agent("eu", "eu-0", engine)
            await mesh.until_ready("eu", 1)
            await mesh.until_peer("us", "eu")
            abroad = asyncio.create_task(post(mesh, chat("from us", stream=True)))
            await mesh.until(
                lambda: mesh.sample("us", "mesh_request_ttft_seconds_count", served="peer") == 1,
                "an answer to have begun",
            )
            client = await regions.connect("us", "system")
            [link] = await regions.leaf_links(client)
            async with stopped(regions.pid(link["name"].removeprefix("test-"))):
                story.gate.set()
                status, body, _ = await abroad
                assert (status, body) == (
                    200,
                    event("begins") + event("ends") + b"data: [DONE]\n\n",
                )
                [other] = await regions.leaf_links(client)
                assert other["name"] != link["name"]
    finally:
        await regions.stop()


@pytest.mark.parametrize("named", [(0,), (2, 1), (0, 1, 2, None)], ids=["one", "two", "a comma"])
async def test_streams_have_as_many_copies_as_mesh_toml_has_servers(tmp_path, named):
    """However many of them an address names, to `mesh infra streams`, the doctor and a router."""
    topology = parse(mesh_toml(("us",), clusters=("us",)), "mesh.toml")
    regions = PinnedRegions(topology, tmp_path / "rendered")
    try:
        await regions.start()
        setup = regions.address("us", "setup")
        url = ",".join("" if one is None else setup.servers[one] for one in named)
        some = replace(setup, url=url)
        done = await streams.set_up_region(topology, RegionId("us"), some, None)
        assert set(done.values()) == {streams.AS_IT_SHOULD_BE}
        client = await regions.connect("us", "setup")
        await client.jetstream().delete_stream("HEARTBEATS")
        done = await streams.set_up_region(topology, RegionId("us"), some, None)
        as_made = dict.fromkeys(("CONTROL", "KEYS", "USAGE"), streams.AS_IT_SHOULD_BE)
        assert done == {"HEARTBEATS": streams.MADE, **as_made}
        async with small_mesh(regions) as mesh:
            await mesh.router("us")
            page = partial(generate_latest, mesh.routers["us"]._metrics.registry)
            await mesh.until(lambda: b'altered{stream="CONTROL"}' in page(), "a look at them")
            for name in (b"HEARTBEATS", b"CONTROL"):
                assert b'mesh_stream_altered{stream="%s"} 0.0' % name in page()
        for file in (tmp_path / "rendered").rglob("*.env"):
            file.write_text(file.read_text().replace(setup.url, url))
        found = await examined(regions, tmp_path)
        told = {one.about: one.verdict for one in found if one.check in ("stream", "bus")}
        assert {told[about] for about in ("HEARTBEATS", "CONTROL", "cluster")} == {CheckResult.OK}
    finally:
        await regions.stop()


class PinnedRegions(NatsRegions):
    """Routers and agents of us connect to one of its three servers alone: that of `number`."""

    number = 0

    def address(self, region, user):
        known = super().address(region, user)
        is_pinned = region == "us" and user.startswith(("router", "agent"))
        return replace(known, url=known.servers[self.number]) if is_pinned else known


@contextlib.asynccontextmanager
async def cut_off(directory):
    """us, and the ways of its third server to the other two, which can be cut."""
    mesh = parse(mesh_toml(("us", "eu"), replicas=2, clusters=("us",)), "mesh.toml")
    servers = mesh.regions["us"].servers
    async with contextlib.AsyncExitStack() as stack:
        ways = {}
        for one, other in ((0, 2), (1, 2), (2, 0), (2, 1)):
            proxy = WanProxy(servers[other].cluster, one_way_s=0.0)
            ways[one, other] = await stack.enter_async_context(proxy)

        def through_ways(region, tree):
            if region != "us":
                return
            number = int(tree["server_name"].rpartition("-")[2]) - 1
            tree["cluster"]["advertise"] = "127.0.0.1:1"  # nor is another way found
            for (one, other), way in ways.items():
                if one == number:
                    routes, target = tree["cluster"]["routes"], str(servers[other].cluster)
                    tree["cluster"]["routes"] = [
                        route.replace(target, str(way.address)) for route in routes
                    ]

        regions = PinnedRegions(mesh, directory, edit=through_ways)
        try:
            await regions.start()
            yield regions, list(ways.values())
        finally:
            await regions.stop()


class Told:
    """Whole answers; how often each was asked for."""

    def __init__(self) -> None:
        self.tries = Counter()

    async def __call__(self, request, body):
        self.tries[body["messages"][0]["content"]] += 1
        stream = await opened(request)
        await stream.write(event("whole") + b"data: [DONE]\n\n")
        return stream


@pytest.mark.drill
async def test_a_cluster_that_is_cut_serves_nobody_twice(tmp_path):
    """Each side goes on with the agent that it reaches; the smaller one's lease is not renewed."""
    told = Told()

    async with (
        cut_off(tmp_path) as (regions, ways),
        scripted_engine() as engine,
        small_mesh(regions) as mesh,
    ):
        mesh.engines = (engine,)
        set_all(mesh, told)
        await mesh.router("eu")
        for regions.number, router, agent in ((0, "r1", "us-0"), (2, "r2", "us-1")):
            await mesh.router("us", router)
            await mesh.agent("us", agent, engine)
        sides = {"us": "us-0", "us/r2": "us-1"}
        for router in sides:
            await mesh.until_ready(router, 2)
        for way in ways:
            way.cut()
        for router in sides:
            await mesh.until_ready(router, 1)

        async def ask(router, number):
            return await post(mesh, chat(f"{router} {number}", stream=True), region=router)

        for number in range(10):
            for router in sides:
                status, body, _ = await ask(router, number)
                assert (status, body) == (200, event("whole") + b"data: [DONE]\n\n")
        smaller = mesh.routers["us/r2"].requests.leases
        await mesh.until(lambda: smaller.problem == STREAM_SILENT, "its writes to fail")
        assert not mesh.routers["eu"].core.ownership.adopted
        for way in ways:
            await way.heal()
        for router in sides:
            await mesh.until_ready(router, 2)
        await mesh.until(lambda: smaller.problem is None, "its writes to be taken")
        assert {*told.tries.values()} == {1} and len(told.tries) == 20
