"""Lines of batch jobs that are computed in another region."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from schemas.batch import JobStatus
from schemas.residency import Label
from tests.support.batch_mesh import BatchMesh, batch_mesh
from tests.support.batch_regions import ROOMY
from tests.support.batch_store import output_lines, request_line, submit
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

RUNNERS = 'batch_runners = ["batch-0"]'
TOML = mesh_toml(("us", "eu"), more={"us": RUNNERS, "eu": f'{RUNNERS}\nresidency = ["eu"]'}) + ROOMY


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[NatsRegions]:
    with running_regions(tmp_path, toml=TOML) as started:
        yield started


@pytest.fixture
async def mesh(regions: NatsRegions) -> AsyncIterator[BatchMesh]:
    """Both regions have a runner."""
    async with batch_mesh(regions) as started:
        await started.runner("us")
        await started.runner("eu")
        yield started


@pytest.fixture
async def abroad(mesh: BatchMesh) -> AsyncIterator[ScriptedEngine]:
    """The engine of eu; jobs are of us."""
    async with scripted_engine() as started:
        await mesh.agent("eu-0", started)
        yield started


def file_of(lines: int, content: str = "line") -> bytes:
    return b"".join(request_line(f"{n}", content=f"{content} {n}") for n in range(lines))


@pytest.mark.parametrize("characters", [10, 600_000], ids=["short", "in parts"])
async def test_lines_go_where_there_is_room(mesh, abroad, characters) -> None:
    job = await submit(mesh.store, file_of(5, "x" * characters))
    found = await mesh.until(job, JobStatus.COMPLETED)
    assert (found.completed, found.failed) == (5, 0)
    output = await output_lines(mesh.store, found.output_file_id)
    assert sorted(output) == [f"{n}" for n in range(5)]
    assert len(abroad.seen) == 5


async def test_lines_with_a_label_go_only_where_it_is_carried(mesh, abroad) -> None:
    async with scripted_engine() as home:
        await mesh.agent("us-0", home)
        job = await submit(mesh.store, file_of(5), residency=(Label("eu"),))
        found = await mesh.until(job, JobStatus.COMPLETED)
    assert (found.completed, found.failed) == (5, 0)
    assert (len(home.seen), len(abroad.seen)) == (0, 5)
