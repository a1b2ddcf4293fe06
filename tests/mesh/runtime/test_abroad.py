"""Answers from another region, while the way to it breaks and is mended."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from infra.address import Address
from mesh.demo.wan_proxy import WanProxy
from tests.support.nats_pair import nats_pair
from tests.support.ports import free_ports
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import chat, post, small_mesh

pytestmark = pytest.mark.drill

ASKED = 8


class Counting:
    """Each answer counts aloud until `enough`, and says where it ended."""

    def __init__(self) -> None:
        self.enough = asyncio.Event()
        self.said: dict[str, int] = {}

    async def __call__(self, request, body):
        name = body["messages"][0]["content"]
        self.said[name] = 0
        stream = await opened(request)
        while not self.enough.is_set():
            await stream.write(event(f"{name} {self.said[name]}"))
            self.said[name] += 1
            await asyncio.sleep(0.005)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def whole(self, name: str) -> bytes:
        """All of that answer."""
        words = [event(f"{name} {number}") for number in range(self.said[name])]
        return b"".join(words) + b"data: [DONE]\n\n"


@asynccontextmanager
async def asked_abroad(tmp_path, monkeypatch):
    """Clients of us with answers under way in eu; the link between, and everybody."""
    # However slowly a busy machine mends the way: none of them is given up or forgotten meanwhile.
    monkeypatch.setattr("agents.core.routers.SILENCE_ABROAD_S", 300.0)
    monkeypatch.setattr("agents.adapters.outbox.SILENCE_ABROAD_S", 300.0)
    monkeypatch.setattr("agents.adapters.outbox.KEPT_S", 400.0)
    monkeypatch.setattr("mesh.session.bus_receiver.REQUESTS_MAX", 6)
    [port] = free_ports(1)
    async with (
        WanProxy(Address("127.0.0.1", port), one_way_s=0.01) as wan,
        nats_pair(tmp_path, "us", "eu", port=port, dialled=wan.address.port) as servers,
        scripted_engine() as engine,
        small_mesh(servers) as mesh,
    ):
        for region in ("us", "eu"):
            await mesh.router(region, heartbeat_lost_s=200.0)
        await mesh.agent("eu", "eu-0", engine)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("us", "eu")
        story = engine.behaviour = Counting()
        names = [f"answer {number}" for number in range(ASKED)]
        asks = {name: asyncio.create_task(post(mesh, chat(name, stream=True))) for name in names}
        await mesh.until(lambda: len(story.said) == ASKED, "all to be under way")
        await mesh.until(lambda: begun(mesh) == ASKED, "all to have begun")
        yield mesh, wan, servers, story
        story.enough.set()
        for name, asked in asks.items():
            status, body, headers = await asked
            assert (status, headers["x-mesh-region"]) == (200, "eu")
            assert body == story.whole(name)


def begun(mesh) -> float:
    return mesh.sample("us", "mesh_request_ttft_seconds_count", served="peer")


async def went_on(mesh, story) -> None:
    """Wait until everyone has said some more."""
    before = min(story.said.values())
    await mesh.until(lambda: min(story.said.values()) > before + 50, "the engine to go on")


async def test_answers_outlive_a_short_cut_of_their_link(tmp_path, monkeypatch):
    async with asked_abroad(tmp_path, monkeypatch) as (mesh, wan, _, story):
        for _ in range(2):
            wan.cut()
            await went_on(mesh, story)
            await wan.heal()
            await mesh.until_peer("us", "eu")
            await went_on(mesh, story)


@pytest.mark.parametrize("region", ["us", "eu"])
async def test_answers_outlive_a_restart_of_a_nats_server_on_their_way(
    tmp_path, monkeypatch, region
):
    async with asked_abroad(tmp_path, monkeypatch) as (mesh, _, servers, story):
        await servers[region].stop()
        await went_on(mesh, story)
        await servers[region].start()
        await mesh.until_peer("us", "eu")
        await went_on(mesh, story)
