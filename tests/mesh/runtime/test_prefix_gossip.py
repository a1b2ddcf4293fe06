"""What one region served is known in the other: over real servers, a cut link, and restarts."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from infra.address import Address
from infra.bus import BusAddress, connect
from mesh.core.gossip.remote_prefixes import Origin
from mesh.demo.wan_proxy import WanProxy
from schemas import subjects, wire
from schemas.gossip import TrieAsk, TrieDelta, TriePart
from tests.support.flushed import flushed
from tests.support.nats_pair import nats_pair
from tests.support.ports import free_ports
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import chat, client, post, small_mesh

US, EU = Origin("us", "r1"), Origin("eu", "r1")
# Two seconds by the clock of tests/mesh/core/gossip; a machine may stand still meanwhile.
KNOWN_S = 8.0
ONE_WAY_S = 0.04


@pytest.fixture
async def two(tmp_path):
    """us and eu, a replica each, and the wide area between them as `wan`."""
    port, dialled = free_ports(2)
    listen = Address("127.0.0.1", dialled)
    async with (
        WanProxy(Address("127.0.0.1", port), one_way_s=ONE_WAY_S, listen=listen) as wan,
        nats_pair(tmp_path, "us", "eu", port=port, dialled=dialled) as servers,
        scripted_engine() as near,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", policy="mesh")
        await mesh.router("eu", policy="mesh")
        await mesh.agent("us", "us-0", near)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready("us", 1)
        await mesh.until_ready("eu", 1)
        mesh.wan, mesh.servers, mesh.engines = wan, servers, (near, far)
        await mesh.until(lambda: trusts(mesh, "us", EU) and trusts(mesh, "eu", US), "first words")
        yield mesh


def gossip(mesh, region):
    return mesh.routers[region].core.gossip


def trusts(mesh, region, origin):
    return gossip(mesh, region).remote.is_trusted(origin)


def knows(mesh, listener, speaker, blocks):
    """Whether `listener` has the whole set of `speaker`, and that is so large."""
    told = set(gossip(mesh, listener).remote.blocks(Origin(speaker, "r1")))
    said = set(gossip(mesh, speaker).outgoing.published)
    return told == said and len(told) == blocks and trusts(mesh, listener, Origin(speaker, "r1"))


def prompt(name: str, blocks: int = 20) -> dict:
    """A chat of so many full blocks, none like another name's."""
    return chat(name * (256 // len(name)) * blocks)


async def soon(mesh, condition, what):
    """The condition holds sooner than by anything but the gossip that is meant."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await mesh.until(condition, what)
    assert clock() - began < KNOWN_S, f"{what} took {clock() - began:.1f} s"


@asynccontextmanager
async def stranger(server):
    bus = await connect(
        BusAddress(server.url), name="stranger", inbox_prefix=subjects.inbox_prefix("eu", "x")
    )
    try:
        yield bus
    finally:
        await bus.close()


async def test_what_one_region_served_is_known_in_the_other(two):
    assert (await post(two, prompt("abcd"), "eu"))[0] == 200
    await soon(two, lambda: knows(two, "us", "eu", 20), "us to know what eu served")
    assert two.sample("us", "mesh_gossip_blocks", peer="eu") == 20
    assert two.sample("us", "mesh_gossip_doubted", peer="eu") == 0
    assert two.sample("eu", "mesh_gossip_bytes_total", peer="us", kind="sent") > 20 * 8
    assert gossip(two, "us").counts.holes == 0


async def test_a_cut_link_is_noticed_and_mended(two):
    await post(two, prompt("abcd"), "eu")
    await two.until(lambda: knows(two, "us", "eu", 20), "us to know what eu served")
    two.wan.cut()
    await two.until(lambda: not trusts(two, "us", EU), "us to doubt what it can't hear")
    await post(two, prompt("efgh"), "eu")
    await post(two, prompt("ijkl"), "us")
    await two.until(lambda: len(gossip(two, "eu").outgoing) == 40, "eu to have told it nobody")
    await two.wan.heal()
    await two.until(lambda: two.wan.connections > 0, "the servers to dial again")
    await soon(two, lambda: knows(two, "us", "eu", 40), "us to have caught up")
    await soon(two, lambda: knows(two, "eu", "us", 20), "eu to have caught up")
    assert gossip(two, "us").counts.holes >= 1
    assert gossip(two, "eu").counts.snapshots == 0  # the missing deltas were enough


async def test_a_router_that_starts_anew_takes_the_whole_set(two):
    for name in ("abcd", "efgh", "ijkl"):
        await post(two, prompt(name), "eu")
        await two.until(lambda: gossip(two, "eu").outgoing.is_empty, "eu to have told it")
    two.engines[1].waiting = 9  # full: its replica's prefixes stay, and nothing is added
    await two.routers["us"].close()
    await two.router("us", policy="mesh")
    await soon(two, lambda: knows(two, "us", "eu", 60), "the new router to know eu")


async def test_a_restarted_origin_is_believed_what_it_says_now(two):
    await post(two, prompt("abcd"), "eu")
    await two.until(lambda: knows(two, "us", "eu", 20), "us to know what eu served")
    await two.routers["eu"].close()
    await two.router("eu", policy="mesh")
    await soon(two, lambda: knows(two, "us", "eu", 0), "us to forget what eu forgot")


async def readiness(mesh, router):
    async with client() as session, session.get(mesh.urls[router] + "/ready") as answer:
        return answer.status, await answer.json()


def knows_of(mesh, router, replica, blocks):
    """Whether that router believes the replica to hold so many blocks."""
    [index] = mesh.routers[router].core.gossip.siblings.indexes
    return index.blocks(replica) == blocks


async def test_routers_of_one_region_know_each_others_placements_and_peers_hear_them_once(two):
    await two.router("eu", "r2", policy="mesh")
    await two.until_ready("eu/r2", 1)
    second = Origin("eu", "r2")
    await two.until(lambda: trusts(two, "us", second), "first words of the second")
    assert (await post(two, prompt("abcd", 20), "eu"))[0] == 200
    await soon(two, lambda: knows_of(two, "eu/r2", "eu-0", 20), "r2 to know what r1 placed")
    await two.until(lambda: knows(two, "us", "eu", 20), "us to know it too")
    assert (await post(two, prompt("abcd", 30), "eu/r2"))[0] == 200
    await soon(two, lambda: knows_of(two, "eu", "eu-0", 30), "r1 to know what r2 placed")
    await two.until(lambda: len(gossip(two, "us").remote.blocks(second)) == 10, "only what is new")
    assert len(gossip(two, "us").remote.blocks(EU)) == 20


async def test_a_router_that_starts_is_warm_by_its_sibling_and_says_so(two, monkeypatch):
    await two.until(lambda: gossip(two, "eu").siblings.sync.warm_at is not None, "r1 to be warm")
    status, alone = await readiness(two, "eu")
    assert (status, alone["warm"], alone["warmed_by"]) == (200, True, None)
    await post(two, prompt("abcd", 20), "eu")
    monkeypatch.setattr(
        "mesh.core.gossip.siblings.ALONE_S", 600.0
    )  # it is not, and waits to hear so
    await two.router("eu", "r2", policy="mesh")
    await two.until_ready("eu/r2", 1)
    assert (await readiness(two, "eu/r2"))[1]["status"] == "ready"
    await soon(two, lambda: knows_of(two, "eu/r2", "eu-0", 20), "r2 to be told everything")
    _, told = await readiness(two, "eu/r2")
    assert told["warm"] and told["warmed_by"] == "r1" and told["warm_for_s"] >= 0.0
    assert two.sample("eu/r2", "mesh_warm") == 1


async def test_nobody_asks_in_another_regions_name(two):
    ask = wire.encode(TrieAsk("r1", 1, 0))
    async with stranger(two.servers["eu"]) as bus:
        await bus.publish(subjects.snapshot("us", "ap"), ask, "_INBOX.eu.r1.1")
        await bus.publish(subjects.snapshot("us", "eu"), ask, "_INBOX.us.r1.1")
        await two.until(
            lambda: two.sample("us", "mesh_replies_dropped_total", channel="snapshot") == 2,
            "both to be dropped",
        )


async def test_nothing_but_keyed_hashes_crosses(two):
    heard: list[bytes] = []
    bus = await connect(
        BusAddress(two.servers["us"].url),
        name="curious",
        inbox_prefix=subjects.inbox_prefix("us", "c"),
    )

    async def hear(msg):
        heard.append(msg.data)

    await bus.subscribe(subjects.trie("eu"), cb=hear)
    await flushed(bus)
    await post(two, prompt("a secret, of 16!"), "eu")
    await two.until(lambda: knows(two, "us", "eu", 20), "us to know what eu served")
    await two.until(lambda: any(len(data) > 150 for data in heard), "the delta to pass")
    assert not any(b"secret" in data for data in heard)
    await bus.close()


async def test_who_speaks_for_another_region_is_not_heard(two):
    lie = TrieDelta("us", "r9", 1, 1, (1, 2, 3), ())
    part = TriePart("eu", "r1", 9**15, 1, 0, 1, (1, 2, 3))
    async with stranger(two.servers["eu"]) as bus:
        await bus.publish(subjects.trie("eu"), wire.encode(lie))
        await bus.publish(subjects.inbox("us", "r1", "trie-guessed"), wire.encode(part))
        await bus.publish(
            subjects.snapshot("us", "eu"), wire.encode(TrieAsk("r1", 1, 0)), "_INBOX.us.r1.1"
        )
        for garbage in (b"", b"\xff" * 40, wire.encode(part)):
            await bus.publish(subjects.trie("eu"), garbage)
            await bus.publish(subjects.snapshot("us", "eu"), garbage, subjects.inbox("eu", "r1", 1))
        await two.until(
            lambda: two.sample("us", "mesh_gossip_dropped_total") == 5, "all gossip to be dropped"
        )
        await two.until(
            lambda: two.sample("us", "mesh_replies_dropped_total", channel="snapshot") == 4,
            "all questions to be dropped",
        )
    assert set(gossip(two, "us").remote.origins) == {EU}
    assert knows(two, "us", "eu", 0)
