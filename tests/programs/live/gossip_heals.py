"""How soon sets are equal again after a cut link and a restarted router, over real nats-servers.

    make gossip-heals

Two regions, us with two routers, on two nats-servers whose leaf link passes a proxy that is cut.
While it is, both regions serve new prompts, and one router of us starts anew. Timed is what lies
between the healed link and the moment when every router has what every other published, trusts it,
and the routers of us keep one index; bytes are what all routers received meanwhile.
"""

import asyncio
import statistics
import tempfile
from pathlib import Path

import click

from infra.address import Address
from mesh.core.gossip.remote_prefixes import Origin
from mesh.demo.wan_proxy import WanProxy
from schemas.ids import RegionId
from tests.support.nats_pair import nats_pair
from tests.support.ports import free_ports
from tests.support.result_page import result_page
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import SmallMesh, chat, post, small_mesh

PLACES = ("us", "us/r2", "eu")
BLOCKS = 20
CUT_PROMPTS = 6
ONE_WAY_S = 0.04


@result_page("gossip-heals", "Prefix gossip after a cut link")
@click.command()
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True)
def main(runs: int) -> None:
    """Cut, restart, heal; again and again."""
    found = [asyncio.run(_run(number)) for number in range(runs)]
    for name, values, unit in (
        ("equal after", [took_s for took_s, _ in found], "s"),
        ("heard by all routers", [received / 1024 for _, received in found], "KiB"),
    ):
        middle, least, most = statistics.median(values), min(values), max(values)
        click.echo(f"{name}: median {middle:.2f} {unit} ({least:.2f}–{most:.2f}), {runs} runs")


async def _run(number: int) -> tuple[float, int]:
    """Seconds until all is equal, and the bytes that were received meanwhile."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        async with (
            WanProxy(Address("127.0.0.1", port), one_way_s=ONE_WAY_S) as wan,
            nats_pair(Path(name), "us", "eu", port=port, dialled=wan.address.port) as servers,
            scripted_engine() as near,
            scripted_engine() as far,
            small_mesh(servers) as mesh,
        ):
            for place in PLACES:
                await mesh.router(*place.split("/"), policy="mesh")
            await mesh.agent("us", "us-0", near)
            await mesh.agent("eu", "eu-0", far)
            for place in PLACES:
                await mesh.until_ready(place, 1)
            await _serve(mesh, f"{number:02}before")
            await mesh.until(lambda: _equal(mesh), "all to know all")
            wan.cut()
            await _serve(mesh, f"{number:02}during")
            await mesh.routers["us/r2"].close()
            await mesh.router("us", "r2", policy="mesh")
            await mesh.until_ready("us/r2", 1)
            await wan.heal()
            await mesh.until(lambda: wan.connections > 0, "the servers to dial again")
            clock, received = asyncio.get_running_loop().time, _received_bytes(mesh)
            began = clock()
            await mesh.until(lambda: _equal(mesh), "all to know all again")
            return clock() - began, _received_bytes(mesh) - received


async def _serve(mesh: SmallMesh, name: str) -> None:
    for prompt in range(CUT_PROMPTS):
        text = f"{name}{prompt:08}" * 16 * BLOCKS
        status, _, _ = await post(mesh, chat(text), PLACES[prompt % len(PLACES)])
        assert status == 200


def _equal(mesh: SmallMesh) -> bool:
    cores = {place: mesh.routers[place].core for place in PLACES}
    for place, core in cores.items():
        for other, publisher in cores.items():
            if place == other:
                continue
            region, _, router = other.partition("/")
            origin = Origin(RegionId(region), router or "r1")
            remote = core.gossip.remote
            assert publisher.gossip.outgoing is not None
            if not remote.is_trusted(origin):
                return False
            if set(remote.blocks(origin)) != set(publisher.gossip.outgoing.published):
                return False
    indexes = [cores[place].gossip.siblings.indexes[0] for place in ("us", "us/r2")]
    one, other_index = ({block for block, _ in index.held("us-0")} for index in indexes)
    return one == other_index and len(one) > 0


def _received_bytes(mesh: SmallMesh) -> int:
    return sum(
        sum(router.core.gossip.counts.received_bytes.values())
        + router.core.gossip.siblings.received_bytes
        for router in mesh.routers.values()
    )


if __name__ == "__main__":
    main()
