"""A region with three nats-servers loses the one that its router and agents are connected to."""

import asyncio

import pytest

from mesh.doctor.findings import CheckResult
from tests.support.examined_mesh import examined, looked, running
from tests.support.scripted_engine import event, opened
from tests.support.small_mesh import chat, post, set_all

pytestmark = pytest.mark.timeout(120)


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
        found = await looked(
            lambda: examined(regions, tmp_path), lambda found: wanted <= named(found).keys()
        )
        ill = named(found)
        assert "nobody listens there" in ill["bus", f"server {lost}"].detail
        assert ill["bus", "cluster"].verdict is CheckResult.WARNING
        assert f"test-{lost} is " in ill["stream", "LEASES"].detail
        await regions.start_one(lost)
        found = await looked(lambda: examined(regions, tmp_path), lambda found: not named(found))
        assert not named(found)
