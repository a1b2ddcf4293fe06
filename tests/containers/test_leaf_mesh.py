"""Three nats-servers in containers: what crosses a link, and what a cut link takes away."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from schemas import subjects
from tests.containers.leaf_mesh import LeafMesh, running_leaf_mesh
from tests.support.flushed import flushed

pytestmark = [pytest.mark.containers, pytest.mark.timeout(120)]

REGIONS = ("us", "eu", "ap")
FRAMES = 50
CROSSING_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def leaf_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeafMesh]:
    with running_leaf_mesh(tmp_path_factory.mktemp("leaf_mesh")) as mesh:
        yield mesh


@contextlib.asynccontextmanager
async def connected(leaf_mesh: LeafMesh, region: str, user: str) -> AsyncIterator[Client]:
    who = leaf_mesh.environment(region, user)
    address = bus.BusAddress(who["NATS_URL"], who["NATS_USER"], who["NATS_PASSWORD"])
    inbox = subjects.inbox_prefix(region, "test")
    client = await bus.connect(address, name=f"{user} of {region}", inbox_prefix=inbox)
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def answering(leaf_mesh: LeafMesh, region: str) -> AsyncIterator[None]:
    """A router of the region that hands every request to an agent, which streams the answer."""
    async with (
        connected(leaf_mesh, region, "router") as router,
        connected(leaf_mesh, region, f"agent-{region}-0") as agent,
    ):

        async def stream(message: Msg) -> None:
            for number in range(FRAMES):
                await agent.publish(message.reply, b"%s %d" % (message.data, number))

        await router.subscribe(subjects.ingress(region), queue=subjects.QUEUE_ROUTERS, cb=stream)
        await flushed(router)
        yield


async def asked(client: Client, region: str, timeout_s: float) -> list[bytes]:
    """The frames of one answer. Raises TimeoutError when they don't all come in time."""
    inbox = client.new_inbox()
    frames = await client.subscribe(inbox)
    try:
        async with asyncio.timeout(timeout_s):
            await client.publish(subjects.ingress(region), b"hello", reply=inbox)
            return [(await frames.next_msg(timeout=timeout_s)).data for _ in range(FRAMES)]
    except nats.errors.TimeoutError as error:
        raise TimeoutError from error
    finally:
        await frames.unsubscribe()


async def answered(client: Client, region: str) -> list[bytes]:
    """The frames of the first answer that comes: a link may still be on its way up."""
    async with asyncio.timeout(CROSSING_TIMEOUT_S):
        while True:
            with contextlib.suppress(TimeoutError, nats.errors.NoRespondersError):
                return await asked(client, region, timeout_s=0.5)


WHOLE_ANSWER = [b"hello %d" % number for number in range(FRAMES)]


@pytest.mark.parametrize(("asking", "region"), list(itertools.permutations(REGIONS, 2)))
async def test_an_agent_streams_to_the_router_of_another_region(leaf_mesh, asking, region):
    async with (
        answering(leaf_mesh, region),
        connected(leaf_mesh, asking, "router") as client,
    ):
        assert await answered(client, region) == WHOLE_ANSWER


async def test_a_cut_link_parts_two_regions_and_nobody_else(leaf_mesh):
    async with (
        answering(leaf_mesh, "eu"),
        answering(leaf_mesh, "ap"),
        connected(leaf_mesh, "us", "router") as us,
        connected(leaf_mesh, "eu", "router") as eu,
    ):
        assert await answered(us, "eu") == WHOLE_ANSWER
        leaf_mesh.cut("us", "eu")
        with pytest.raises(TimeoutError):
            await asked(us, "eu", timeout_s=1.0)
        assert await asked(us, "ap", timeout_s=5.0) == WHOLE_ANSWER
        assert await asked(eu, "ap", timeout_s=5.0) == WHOLE_ANSWER
        leaf_mesh.mend("us", "eu")
        assert await answered(us, "eu") == WHOLE_ANSWER
