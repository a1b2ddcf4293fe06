"""What most tests of the router's runtime ask: one region, with and without batch runners."""

from collections.abc import AsyncIterator, Iterator

import pytest

from infra.tenant_table import Caller, key_hash
from tests.support.batch_regions import LIMITS, batch_toml
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.small_mesh import PATIENT, SmallMesh, one_region, small_mesh

BATCH_KEYS = {
    key_hash("sk-acme"): Caller(tenant="acme"),
    key_hash("sk-acme-2"): Caller(tenant="acme"),
    key_hash("sk-beta"): Caller(tenant="beta"),
}


@pytest.fixture
async def one(nats_server):
    """A router, two replicas, and their engines."""
    async with one_region(nats_server) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def batch_regions(tmp_path_factory) -> Iterator[NatsRegions]:
    """A region with batch runners, whose store is small; none of them runs."""
    with running_regions(tmp_path_factory.mktemp("batch"), toml=batch_toml(limits=LIMITS)) as made:
        yield made


@pytest.fixture
async def batch_mesh(batch_regions) -> AsyncIterator[SmallMesh]:
    """A router of that region. Each API key sees its own files; two are of one tenant."""
    async with small_mesh(batch_regions) as mesh:
        await mesh.router("us", keys=BATCH_KEYS, **PATIENT)
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        yield mesh
