"""Regions with batch runners: their mesh.toml, and stores over real nats-servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from mesh.batch.records import new_job_id
from mesh.batch.store import BatchStore
from schemas.batch import BatchJob, JobStatus
from schemas.http import CHAT
from tests.support.nats_regions import NatsRegions, mesh_toml

# Small, so that a test reaches them.
LIMITS = """
[batch]
files_mib = 16
results_mib = 16
lines_mib = 16
jobs_mib = 16
file_mib_max = 12
files_max = 5
jobs_max = 3
"""
ROOMY = "[batch]\nfiles_mib = 64\nresults_mib = 64\nlines_mib = 256\nfile_mib_max = 32\n"


def batch_toml(regions: tuple[str, ...] = ("us",), limits: str = ROOMY) -> str:
    more = dict.fromkeys(regions, 'batch_runners = ["batch-0"]\ngpu_hour_price = 2')
    return mesh_toml(regions, more=more) + limits


@contextlib.asynccontextmanager
async def opened(regions: NatsRegions, region: str = "us") -> AsyncIterator[BatchStore]:
    """A store as the region's routers and batch runners open it."""
    address = regions.address(region, "batch")
    store = BatchStore(address, f"test {region}", regions.topology.batch)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def some_job(created_at: int = 1_000, **fields: object) -> BatchJob:
    job = {
        "id": new_job_id(),
        "endpoint": CHAT,
        "input_file_id": "file-" + "0" * 32,
        "completion_window": "24h",
        "status": JobStatus.VALIDATING,
        "created_at": created_at,
        "expires_at": created_at + 86_400,
    }
    return BatchJob(**{**job, **fields})


async def pieces(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    """As a body comes over HTTP."""
    for start in range(0, len(data), size):
        yield data[start : start + size]
        await asyncio.sleep(0)
