"""The narrowest link that docs/install.md allows: 10 Mbit/s and a round trip of 300 ms."""

import asyncio
import itertools
from random import Random

from infra.address import Address
from mesh.core.gossip.gossip import LINK_SHARE as GOSSIP_SHARE
from mesh.core.membership.region_digest import LINK_SHARE as DIGEST_SHARE
from mesh.core.model.settings import SLOWEST_BYTES_PER_S
from mesh.demo.wan_proxy import WanProxy
from tests.support.nats_pair import nats_pair
from tests.support.ports import free_ports
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

ONE_WAY_S = 0.15
STRAINED_S = 3.0
BURST_S = 4.0  # of gossip, after quiet times
REQUESTS_BYTES = 65_536  # all of them, there and back, and pings


async def test_gossip_and_digests_keep_to_their_share_and_requests_cross(tmp_path):
    port, dialled = free_ports(2)
    listen = Address("127.0.0.1", dialled)
    async with (
        WanProxy(
            Address("127.0.0.1", port),
            one_way_s=ONE_WAY_S,
            listen=listen,
            bytes_per_s=SLOWEST_BYTES_PER_S,
        ) as wan,
        nats_pair(tmp_path, "us", "eu", port=port, dialled=dialled) as servers,
        scripted_engine() as engine,
        small_mesh(servers) as mesh,
    ):
        for region in ("us", "eu"):
            await mesh.router(region, policy="mesh", **PATIENT)
        await mesh.agent("eu", "eu-0", engine)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("us", "eu")
        clock = asyncio.get_running_loop().time
        began, before = clock(), (wan.to_target_bytes, wan.from_target_bytes)
        straining = asyncio.create_task(strain(mesh, engine))
        try:
            for _ in range(2):
                asked = (post(mesh, chat(f"word {number}")) for number in range(8))
                for status, body, headers in await asyncio.gather(*asked):
                    assert (status, headers["x-mesh-region"]) == (200, "eu"), body
            await asyncio.sleep(STRAINED_S - (clock() - began))
        finally:
            straining.cancel()
        carried_s = clock() - began
        most = SLOWEST_BYTES_PER_S * (
            GOSSIP_SHARE * (carried_s + BURST_S) + DIGEST_SHARE * carried_s
        )
        for after, first in zip((wan.to_target_bytes, wan.from_target_bytes), before, strict=True):
            assert 65_536 < after - first <= most + REQUESTS_BYTES
        assert wan.connections == 2, "the link was not cut"


async def strain(mesh, engine) -> None:
    """All that both regions hold is new, and what peers ask about changes all the time."""
    dice = Random(7)
    for turn in itertools.count():
        for router in mesh.routers.values():
            path = tuple(dice.getrandbits(64) for _ in range(3000))
            router.core.gossip.outgoing.used(path, asyncio.get_running_loop().time())
        engine.waiting = turn % 2
        await asyncio.sleep(0.05)
