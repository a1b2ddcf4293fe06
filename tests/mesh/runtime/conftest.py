"""The one region that most tests of the router's runtime ask."""

import pytest

from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import small_mesh


@pytest.fixture
async def one(nats_server):
    """A router, two replicas, and their engines."""
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2)
        mesh.engines = (first, second)
        yield mesh
