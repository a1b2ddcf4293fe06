"""The one region that most tests of the router's runtime ask."""

import pytest

from tests.support.small_mesh import one_region


@pytest.fixture
async def one(nats_server):
    """A router, two replicas, and their engines."""
    async with one_region(nats_server) as mesh:
        yield mesh
