"""Which large body is read first, and what is answered where none can be."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from mesh.adapters.refused import RequestRefused
from mesh.http.large_bodies import LargeBodies
from mesh.http.read_request import read_fields
from schemas.exchange import LARGE_BYTES
from schemas.http import COMPLETIONS, EMBEDDINGS, Fault

BOMB = b'{"model":"tiny","prompt":"hi","more":[' + b"[]," * 1024**2 + b"[]]}"
HONEST = b'{"model":"tiny","prompt":"' + b"a" * (LARGE_BYTES + 1) + b'"}'
BOMBS = 5


@pytest.fixture
async def bodies():
    made = LargeBodies()
    yield made
    await made.close()


async def test_a_small_one_of_the_large_waits_for_one_bomb_and_not_for_all(bodies):
    over: list[int] = []

    async def read(body: bytes) -> None:
        await bodies.read(COMPLETIONS, [body])
        over.append(len(body))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(BOMBS):
            tasks.create_task(read(BOMB))
        await asyncio.sleep(0)
        tasks.create_task(read(HONEST))
    assert over.index(len(HONEST)) == 1


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    limit = len([*Path("/proc/self/fd").iterdir()])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    used = []
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in used:
            os.close(descriptor)


async def test_where_no_process_can_be_started_it_is_the_router_that_lacks_something(bodies):
    with no_more_descriptors(), pytest.raises(RequestRefused) as refused:
        await bodies.read(COMPLETIONS, [HONEST])
    assert refused.value.fault is Fault.OVERLOADED
    body, fields = await bodies.read(COMPLETIONS, [HONEST])
    assert (body, fields.model) == (HONEST, "tiny")


async def test_large_embeddings_are_read_as_small_ones_are(bodies):
    for given in (["x" * 700_000, "y" * 700_000], [[7] * 400_000, [8] * 400_000]):
        body = orjson.dumps({"model": "tiny", "input": given})
        _, fields = await bodies.read(EMBEDDINGS, [body])
        place = fields.model_place
        assert body[place.start : place.end] == b'"tiny"'
        assert replace(fields, model_place=None) == read_fields(EMBEDDINGS, body)
