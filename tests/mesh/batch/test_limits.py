"""What other limits in mesh.toml do to a store that holds something."""

from dataclasses import replace

import pytest

from infra.batch_table import BatchTable
from mesh.adapters import streams
from mesh.batch.records import NewFile, StoreFull
from mesh.batch.store import BatchStore
from mesh.batch.streams import kept
from schemas.batch import STREAM_FILES, STREAM_RESULTS, Purpose
from tests.mesh.batch.test_queues import a_line, a_result
from tests.support.batch_regions import pieces, some_job
from tests.support.nats_regions import NatsRegions

MEBIBYTE = 1024 * 1024
NEW = NewFile(filename="in.jsonl", purpose=Purpose.BATCH)


async def test_smaller_limits_refuse_what_is_new_and_drop_nothing(
    us: NatsRegions, store: BatchStore
):
    job, data = some_job().id, bytes(20 * MEBIBYTE)
    file = await store.files.put(NEW, pieces(data, MEBIBYTE))
    for number in range(1, 21):
        await store.results.put(a_result(job, number, bytes(MEBIBYTE)))
    await store.lines.add(a_line(job, number, bytes(MEBIBYTE)) for number in range(1, 21))
    smaller = BatchTable(files_mib=16, results_mib=16, lines_mib=16, file_mib_max=12)
    setup = us.address("us", "batch-setup")
    done = await streams.set_up_batch(setup, smaller)
    assert done[STREAM_FILES] == done[STREAM_RESULTS] == streams.PUT_RIGHT
    try:
        with pytest.raises(StoreFull):
            await store.files.put(NEW, pieces(b"x"))
        with pytest.raises(StoreFull):
            await store.results.put(a_result(job, 21))
        with pytest.raises(StoreFull):
            await store.lines.add([a_line(job, 21)])
        assert b"".join([part async for part in store.files.read(file.id)]) == data
        assert await store.results.count(job) == 20
        await store.lines.make_ready(job, 100)
        assert (await store.lines.queued(job)).waiting == 20
    finally:
        await streams.set_up_batch(setup, us.topology.batch)
    await store.files.put(NEW, pieces(b"x"))


async def test_streams_larger_than_the_account_are_refused_with_what_to_do(us: NatsRegions):
    """mesh.toml was changed, and nats-server runs with what was rendered before."""
    larger = replace_limits(us.topology.batch, lines_mib=1024)
    with pytest.raises(streams.StreamsUnusable, match=r"BATCH_LINES: .*resource.*mesh infra nats"):
        await streams.set_up_batch(us.address("us", "batch-setup"), larger)
    again = await streams.set_up_batch(us.address("us", "batch-setup"), us.topology.batch)
    assert set(again.values()) == {streams.AS_IT_SHOULD_BE}


def replace_limits(limits: BatchTable, **differ: int) -> BatchTable:
    return BatchTable(**{**limits.model_dump(), **differ})


def test_every_stream_is_bounded_keeps_what_it_has_and_is_on_disk():
    limits = BatchTable()
    for config in kept(limits):
        assert config.max_bytes and config.max_bytes > 0
        assert (config.discard, config.storage) == ("new", "file")
        assert config.max_age in (None, 0)
        assert replace(config) == config
    total = sum(config.max_bytes or 0 for config in kept(limits))
    assert total == limits.disk_mib * MEBIBYTE
