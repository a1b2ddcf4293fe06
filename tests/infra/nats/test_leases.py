"""A region's lease on servers as they are rendered: written from any region, one at a time."""

import asyncio
import contextlib
import json
from collections.abc import Iterator

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.until import PATIENCE_S

EXPECTED = "Nats-Expected-Last-Subject-Sequence"


@pytest.fixture(scope="module")
def regions(tmp_path_factory) -> Iterator[NatsRegions]:
    with running_regions(tmp_path_factory.mktemp("leases")) as mesh:
        yield mesh


class Router:
    """A region's router user, who claims us's lease and hears what its stream took."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.client: Client
        self.received: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.forbidden: list[str] = []

    async def join(self, regions: NatsRegions) -> None:
        self.client = await regions.connect(
            self.region,
            "router",
            inbox_prefix=subjects.inbox_prefix(self.region, "r1"),
            on_error=lambda problem: self.forbidden.append(str(problem)),
        )
        await self.client.subscribe(subjects.leased("us"), cb=self._hear)
        await flushed(self.client)

    async def _hear(self, msg: Msg) -> None:
        self.received.put_nowait((msg.headers["Nats-Sequence"], msg.data))

    async def claim(self, expected: int) -> dict:
        """What the stream answers; asked again while the new link does not know the way yet."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                data, headers = self.region.encode(), {EXPECTED: str(expected)}
                lease = subjects.lease("us")
                with contextlib.suppress(nats.errors.NoRespondersError):
                    answer = await self.client.request(
                        lease, data, timeout=PATIENCE_S, headers=headers
                    )
                    return json.loads(answer.data)
                await asyncio.sleep(0.05)


async def test_of_regions_that_claim_at_once_one_gets_the_lease_and_all_receive_it(
    regions: NatsRegions,
):
    us, eu, ap = routers = [Router(region) for region in ("us", "eu", "ap")]
    for router in routers:
        await router.join(regions)
    last = 0
    async with asyncio.timeout(PATIENCE_S):
        while not last or eu.received.empty() or ap.received.empty():  # until interest has crossed
            last = (await us.claim(last))["seq"]
            await asyncio.sleep(0.05)
    answers = await asyncio.gather(eu.claim(last), ap.claim(last))
    [taken] = [one for one in answers if "error" not in one]
    [refused] = [one for one in answers if "error" in one]
    assert taken["seq"] == last + 1 and refused["error"]["err_code"] == 10071
    winner = (eu, ap)[answers.index(taken)].region.encode()
    for router in routers:
        async with asyncio.timeout(PATIENCE_S):
            while (await router.received.get()) != (str(last + 1), winner):
                pass
        assert router.forbidden == []
        await router.client.close()


async def test_a_peer_may_neither_read_nor_change_the_stream(regions: NatsRegions):
    eu = Router("eu")
    await eu.join(regions)
    for call in ("STREAM.DELETE.LEASES", "STREAM.CREATE.LEASES", "DIRECT.GET.LEASES"):
        await eu.client.publish(f"$JS.us.API.{call}")
    await eu.client.publish(subjects.leased("us"), b"forged")
    await flushed(eu.client)
    async with asyncio.timeout(PATIENCE_S):
        while len(eu.forbidden) < 4:
            await asyncio.sleep(0.01)
    await eu.client.close()
