"""Three linked regions: everything arrives once, and nobody speaks or hears in another's name."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra.nats import permissions
from infra.nats.region_config import ACCOUNT, LINK_COMPRESSION
from infra.topology import parse
from mesh.demo.wan_proxy import WanProxy
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.link_speech import concrete, unspoken
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.taps import Taps, add_tap
from tests.support.until import PATIENCE_S

REGIONS = ("ap", "eu", "us")
PAIRS = list(itertools.permutations(REGIONS, 2))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[NatsRegions]:
    """As rendered, but for the tap."""
    with running_regions(
        tmp_path_factory.mktemp("mesh"), edit=lambda _, tree: add_tap(tree)
    ) as regions:
        yield regions


@pytest.fixture(scope="module")
def as_rendered(tmp_path_factory) -> Iterator[dict[str, dict[str, Any]]]:
    """Each region's settings, which its nats-server runs with."""
    trees: dict[str, dict[str, Any]] = {}
    with running_regions(tmp_path_factory.mktemp("rendered"), edit=trees.__setitem__):
        yield trees


def test_both_ends_of_a_link_leave_out_the_slow_levels_of_compression(as_rendered) -> None:
    none_up_to_ms, *levels = LINK_COMPRESSION["rtt_thresholds"]
    assert (none_up_to_ms, len(levels)) == ("10ms", 1), "a third would be better, a fourth best"
    leaves = [tree["leafnodes"] for tree in as_rendered.values()]
    ends = [*leaves, *(remote for each in leaves for remote in each["remotes"])]
    assert len(ends) == len(REGIONS) + len(PAIRS) // 2
    assert all(end["compression"] == LINK_COMPRESSION for end in ends)


@pytest.mark.parametrize(
    ("rtt_ms", "level"), [(0, "s2_uncompressed"), (60, "s2_fast"), (150, "s2_fast")]
)
async def test_a_link_is_compressed_by_its_round_trip(tmp_path, rtt_ms, level):
    """As rendered; NATS' own choice is `best` beyond 100 ms."""
    topology = parse(mesh_toml(("eu", "us")), "mesh.toml")
    [link] = topology.links
    [target] = topology.region(link.acceptor).leaf
    async with WanProxy(target, one_way_s=rtt_ms / 2000) as wan:
        through = {(link.solicitor, link.acceptor): [wan.address]}
        regions = NatsRegions(topology, tmp_path, leaf_addresses=through)
        try:
            await regions.start()
            for region in ("eu", "us"):
                client = await regions.connect(region, "system")
                async with asyncio.timeout(PATIENCE_S):  # its first measurement may be off
                    while [end["compression"] for end in await regions.leaf_links(client)] != [
                        level
                    ]:
                        await asyncio.sleep(0.05)
        finally:
            await regions.stop()


def test_a_server_that_hangs_is_left_soon_where_there_is_another(tmp_path):
    """Streams may pause for two: then frames are retransmitted over the next one."""
    topology = parse(mesh_toml(("eu", "us"), clusters=("eu",)), "mesh.toml")
    trees: list[dict[str, Any]] = []
    NatsRegions(topology, tmp_path, edit=lambda _, tree: trees.append(tree))
    assert len(trees) == 4
    for tree in trees:
        pings = tree["ping_max"] + 1
        noticed_ms = milliseconds(tree["ping_interval"]) * pings
        assert noticed_ms + milliseconds(tree["leafnodes"]["reconnect"]) <= 1700
        if "cluster" in tree:
            assert milliseconds(tree["cluster"]["ping_interval"]) * pings <= 1500


def milliseconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(ms|s)", text).groups()
    return int(number) * {"ms": 1, "s": 1000}[unit]


@pytest.fixture(scope="module", params=REGIONS)
def bought(request, tmp_path_factory) -> Iterator[tuple[str, NatsRegions]]:
    """One region whose server has dropped every guard at its end of its links."""

    def edit(name: str, tree: dict[str, Any]) -> None:
        if name == request.param:
            drop_guards(tree)
        add_tap(tree)

    with running_regions(tmp_path_factory.mktemp("bought"), edit=edit) as regions:
        yield request.param, regions


def drop_guards(tree: dict[str, Any]) -> None:
    """Every peer's link ends in the region's own account, and nothing is forbidden there."""
    accounts, mesh = tree["accounts"], tree["accounts"][ACCOUNT]
    for name in [name for name in accounts if name.startswith("LINK-")]:
        mesh["users"] += accounts.pop(name)["users"]
    for user in mesh["users"]:
        del user["permissions"]
    for account in accounts.values():
        account.pop("exports", None)
        account.pop("imports", None)
    for remote in tree["leafnodes"]["remotes"]:
        remote["account"] = ACCOUNT


@pytest.mark.parametrize("speaker", REGIONS)
async def test_one_copy_of_a_message_arrives_in_every_region(mesh: NatsRegions, speaker: str):
    peers = [region for region in REGIONS if region != speaker]
    said = [subjects.alive(speaker, f"r{number}") for number in range(200)]
    async with Taps(mesh) as taps:
        for region in REGIONS:
            await taps.listen(region, subjects.alive("*", "*"))
        for region in peers:
            await taps.fence(speaker, region)
        await taps.say(speaker, said)
        for region in peers:
            await taps.fence(speaker, region)
        # Copies relayed by a third region would be on the peers' link: wait for that link too.
        for pair in itertools.permutations(peers):
            await taps.fence(*pair)
        for region in REGIONS:
            assert {taps.heard[region][subject] for subject in said} == {1}, region


@pytest.mark.parametrize(("here", "there"), PAIRS)
async def test_a_request_to_a_peer_streams_its_answer_straight_back(
    mesh: NatsRegions, here: str, there: str
):
    prefix = subjects.inbox_prefix(here, "r1")
    asking = await mesh.connect(here, "router", inbox_prefix=prefix)
    placing = await mesh.connect(there, "router", inbox_prefix=subjects.inbox_prefix(there, "r1"))
    agent = await mesh.connect(there, f"agent-{there}-0")

    async def place(message: Msg) -> None:
        work = subjects.work(there, f"{there}-0")
        await placing.publish(work, message.data, reply=message.reply)

    async def answer(message: Msg) -> None:
        for number in range(50):
            await agent.publish(message.reply, b"%d" % number)

    await placing.subscribe(subjects.ingress(there), queue=subjects.QUEUE_ROUTERS, cb=place)
    await agent.subscribe(subjects.work(there, f"{there}-0"), queue=subjects.QUEUE_AGENT, cb=answer)
    await flushed(placing)
    await flushed(agent)
    inbox = subjects.inbox(here, "r1", 7)
    answers = await asking.subscribe(inbox)
    await until_answered(asking, subjects.ping(there), placing)
    await asking.publish(subjects.ingress(there), b"prompt", reply=inbox)
    got = [(await answers.next_msg(timeout=PATIENCE_S)).data for _ in range(50)]
    assert got == [b"%d" % number for number in range(50)]
    for client in (asking, placing, agent):
        await client.close()


async def until_answered(asking: Client, ping: str, answering: Client) -> None:
    """Ping until the answer comes: then interest has crossed the link in both directions."""

    async def echo(message: Msg) -> None:
        await message.respond(message.data)

    await answering.subscribe(ping, queue=subjects.QUEUE_ROUTERS, cb=echo)
    await flushed(answering)
    inbox = f"{asking._inbox_prefix.decode()}.ping"
    echoes = await asking.subscribe(inbox)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await asking.publish(ping, b"12345678", reply=inbox)
            with suppress(nats.errors.TimeoutError):
                if (await echoes.next_msg(timeout=1)).data == b"12345678":
                    return


async def test_links_carry_exactly_the_allowed_subjects(mesh: NatsRegions):
    """Between honest servers, whoever is logged in there."""
    async with Taps(mesh) as taps:
        for region in REGIONS:
            await taps.listen(region, ">")
        for speaker, listener in PAIRS:  # before any lease is written, which its stream publishes
            forged = subjects.leased(speaker)
            await taps.say(speaker, [forged])
            await taps.fence(speaker, listener)
            assert taps.heard_of(listener, [forged]) == set()
        for speaker, listener in PAIRS:
            await assert_only_spoken_arrives(taps, speaker, listener)


async def test_a_bought_server_can_speak_in_no_other_name(bought: tuple[str, NatsRegions]):
    region, mesh = bought
    async with Taps(mesh) as taps:
        for peer in mesh.topology.peers(region):
            await taps.listen(peer, ">")
            await assert_only_spoken_arrives(taps, region, peer)


async def test_a_compromised_server_receives_nothing_more(bought: tuple[str, NatsRegions]):
    """Not the prompts of its peers' work, nor their answers to their own clients."""
    region, mesh = bought
    async with Taps(mesh) as taps:
        await taps.listen(region, ">")
        for peer in mesh.topology.peers(region):
            await assert_only_spoken_arrives(taps, peer, region)


async def assert_only_spoken_arrives(taps: Taps, speaker: str, listener: str) -> None:
    spoken = set(concrete(permissions.allowed_across(speaker, listener)))
    spoken -= by_streams(speaker, listener)
    forbidden = concrete(unspoken(speaker, listener, REGIONS))
    await taps.fence(speaker, listener)
    taps.heard[listener].clear()
    await taps.say(speaker, [*forbidden, *spoken])
    await taps.fence(speaker, listener)
    assert taps.heard_of(listener, forbidden) == set()
    assert taps.heard_of(listener, [*spoken]) == spoken


def by_streams(speaker: str, listener: str) -> set[str]:
    """What goes to a stream, and what one says: not from and to those who are logged in."""
    return {subjects.lease(listener), subjects.leased(speaker)}


def write_message(writer: asyncio.StreamWriter, subject: str) -> None:
    writer.write(f"LMSG {subject} 6\r\nforged\r\n".encode())


@pytest.mark.parametrize("forged", concrete(unspoken("us", "eu", REGIONS)))
async def test_a_peer_that_ignores_its_permissions_is_cut_off(mesh: NatsRegions, forged: str):
    """A soliciting server that sends what the acceptor told it not to, spoken here by hand."""
    remote = next(r for r in remotes_of(mesh, "us") if "link-us" in r and port_of(mesh, "eu") in r)
    user, password = remote.removeprefix("nats-leaf://").split("@")[0].split(":")
    async with Taps(mesh) as taps:
        await taps.listen("eu", ">")
        address = mesh.topology.region("eu").leaf[0]
        reader, writer = await asyncio.open_connection(*address)
        assert (await reader.readline()).startswith(b"INFO ")
        hello = {
            "user": user,
            "pass": password,
            "name": "forger",
            "server_id": "F",
            "headers": True,
        }
        writer.write(b"CONNECT " + json.dumps(hello).encode() + b"\r\nPING\r\n")
        await until_line(reader, b"PONG")
        await taps.until_heard("eu", subjects.alive("us", "r9"), partial(write_message, writer))
        write_message(writer, forged)
        assert b"Permissions Violation for Publish" in await until_line(reader, b"-ERR")
        writer.close()
        await taps.fence("ap", "eu")
        assert taps.heard_of("eu", [forged]) == set()


async def until_line(reader: asyncio.StreamReader, start: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        while not (line := await reader.readline()).startswith(start):
            assert line, f"the server hung up before {start!r}"
        return line


def port_of(mesh: NatsRegions, region: str) -> str:
    return f":{mesh.topology.region(region).leaf[0].port}"


def remotes_of(mesh: NatsRegions, region: str) -> list[str]:
    text = mesh.files[region].config.read_text()
    return [line.split('"')[3] for line in text.splitlines() if "nats-leaf://" in line]
