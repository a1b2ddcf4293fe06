"""One region's nats-server with batch streams, for the tests of a module; emptied after each."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from mesh.batch.store import BatchStore
from schemas.batch import (
    STREAM_FILE_RECORDS,
    STREAM_FILES,
    STREAM_JOBS,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
)
from tests.support.batch_regions import LIMITS, batch_toml, opened
from tests.support.nats_regions import NatsRegions, running_regions

STREAMS = (
    STREAM_FILES,
    STREAM_FILE_RECORDS,
    STREAM_JOBS,
    STREAM_TASKS,
    STREAM_LINES,
    STREAM_RESULTS,
)


@pytest.fixture(scope="module")
def us(tmp_path_factory) -> Iterator[NatsRegions]:
    with running_regions(tmp_path_factory.mktemp("us"), toml=batch_toml()) as regions:
        yield regions


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[NatsRegions]:
    """With limits that a test reaches."""
    toml = batch_toml(limits=LIMITS)
    with running_regions(tmp_path_factory.mktemp("small"), toml=toml) as regions:
        yield regions


@pytest.fixture
async def store(us: NatsRegions) -> AsyncIterator[BatchStore]:
    async with emptied(us) as store:
        yield store


@pytest.fixture
async def full(small: NatsRegions) -> AsyncIterator[BatchStore]:
    """A store with small limits."""
    async with emptied(small) as store:
        yield store


@contextlib.asynccontextmanager
async def emptied(regions: NatsRegions) -> AsyncIterator[BatchStore]:
    async with opened(regions) as store:
        for stream in STREAMS:
            await store._connection.purge(stream, ">")
        yield store
