"""Replicas come and go in a running region, and nobody else notices."""

import asyncio
import os
import signal
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client

from infra.nats import bundle
from infra.topology import parse
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.until import PATIENCE_S


@pytest.fixture
def mesh(tmp_path: Path):
    toml = mesh_toml(("us", "eu"), replicas=2)
    with running_regions(tmp_path / "mesh", toml=toml) as regions:
        (tmp_path / "mesh.toml").write_text(toml)
        yield regions


def render(mesh: NatsRegions, directory: Path, *, replicas: int) -> None:
    text = (directory / "mesh.toml").read_text().replace("replicas = 2", f"replicas = {replicas}")
    mesh.files = bundle.write(parse(text, "mesh.toml"), directory / "mesh")
    os.kill(mesh.pid("us"), signal.SIGHUP)


async def nothing() -> None:
    return None


async def until_allowed(mesh: NatsRegions, user: str, *, on_closed=nothing) -> Client:
    """Log in, again and again until the server knows the user."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            address = mesh.address("us", user)
            client = Client()
            try:
                await client.connect(
                    address.url,
                    user=address.user,
                    password=address.password,
                    allow_reconnect=False,
                    closed_cb=on_closed,
                )
            except (nats.errors.Error, OSError):  # turned away, or cut off while asking
                await client.close()
                await asyncio.sleep(0.05)
            else:
                return client


async def test_a_new_replica_logs_in_and_no_client_is_cut_off(mesh: NatsRegions, tmp_path: Path):
    lost = asyncio.Event()
    router, peer = [
        await mesh.connect(
            region, "router", inbox_prefix=subjects.inbox_prefix(region, "r1"), on_lost=lost.set
        )
        for region in ("us", "eu")
    ]
    heartbeats = await router.subscribe(subjects.heartbeat("us", "*"))
    answers = await peer.subscribe(subjects.inbox("eu", "r1", 1))
    await flushed(router)
    await flushed(peer)

    render(mesh, tmp_path, replicas=3)
    agent = await until_allowed(mesh, "agent-us-2")
    await agent.publish(subjects.heartbeat("us", "us-2"), b"{}")
    assert (await heartbeats.next_msg(timeout=PATIENCE_S)).data == b"{}"
    await agent.publish(subjects.inbox("eu", "r1", 1), b"over the same link")
    assert (await answers.next_msg(timeout=PATIENCE_S)).data == b"over the same link"
    assert not lost.is_set()
    for client in (agent, router, peer):
        await client.close()


async def test_a_removed_replica_is_cut_off(mesh: NatsRegions, tmp_path: Path):
    closed = asyncio.Event()

    async def note() -> None:
        closed.set()

    await until_allowed(mesh, "agent-us-1", on_closed=note)
    render(mesh, tmp_path, replicas=1)
    async with asyncio.timeout(PATIENCE_S):
        await closed.wait()
