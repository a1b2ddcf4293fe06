"""Uploads, downloads and jobs through lost connections, refusals and wrong answers."""

import random
from pathlib import Path

import pytest

from mesh.batch_client.download import download
from mesh.batch_client.endpoint import (
    PAGE_FILES,
    Endpoint,
    EndpointError,
    NotConnected,
    Refused,
)
from mesh.batch_client.watch import watch
from schemas.http import CHAT
from tests.support.batch_endpoint import FILE, JOB, BatchEndpoint, batch_endpoint, job_fields
from tests.support.ports import free_ports

DATA = random.Random(3).randbytes(700_000)


def patient(url: str, patience_s: float = 20.0) -> Endpoint:
    return Endpoint(url, patience_s=patience_s, pause_s=0.01)


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / 'näme".jsonl'
    path.write_bytes(DATA)
    return path


async def test_a_file_is_uploaded_whole_and_its_progress_is_told(input_file):
    async with batch_endpoint() as there, Endpoint(there.url.removesuffix("/v1"), "key-1") as api:
        told: list[int] = []
        assert (await api.upload(input_file, told.append)).bytes == len(DATA)
    assert there.files[FILE] == DATA
    assert told[0] == 0 and told[-1] == len(DATA) and told == sorted(told)
    assert there.keys == {"Bearer key-1"}


async def test_an_upload_that_was_cut_off_begins_again(input_file):
    async with (
        batch_endpoint(BatchEndpoint(cuts=[10, 300_000])) as there,
        patient(there.url) as api,
    ):
        await api.upload(input_file, lambda done: None)
        await api.upload(input_file, lambda done: None)
    assert there.files[FILE] == DATA
    first, *again, other = there.idempotency_keys
    assert again == [first, first], "the same upload"
    assert other != first


@pytest.mark.parametrize("status", [400, 413, 507])
async def test_a_file_that_is_refused_is_not_sent_again(input_file, status):
    refused = BatchEndpoint(refusals=[(status, "the store is\x1b[2J full")])
    async with batch_endpoint(refused) as there, patient(there.url) as api:
        with pytest.raises(Refused, match=rf"the store is \[2J full \(HTTP {status}\)"):
            await api.upload(input_file, lambda done: None)
    assert there.requests == [("POST", "/v1/files")]


async def test_a_file_that_becomes_shorter_is_an_error(input_file):
    async with batch_endpoint() as there, patient(there.url) as api:

        def shorten(done: int) -> None:
            if done:
                input_file.write_bytes(b"")

        with pytest.raises(EndpointError, match="became shorter"):
            await api.upload(input_file, shorten)
    assert there.files == {}


async def test_requests_are_repeated_while_the_endpoint_says_later():
    later = BatchEndpoint(refusals=[(503, "starting"), (429, "full")])
    async with batch_endpoint(later) as there, patient(there.url) as api:
        assert (await api.job(JOB)).id == JOB


async def test_patience_ends_with_the_last_refusal():
    full = BatchEndpoint(refusals=[(429, "too many batches")] * 9)
    async with batch_endpoint(full) as there, patient(there.url, patience_s=0.1) as api:
        with pytest.raises(Refused, match="too many batches"):
            await api.create_job(FILE, CHAT, "24h", {})


async def test_a_job_whose_creation_was_not_answered_is_found_not_created_again():
    async with batch_endpoint(BatchEndpoint(lose_creations=1)) as there, patient(there.url) as api:
        assert (await api.create_job(FILE, CHAT, "24h", {"a": "b"})).id == JOB
    [asked] = there.created
    assert asked["metadata"] == {"a": "b"}


async def test_an_endpoint_that_does_not_run_is_said_so():
    [port] = free_ports(1)
    async with Endpoint(f"http://127.0.0.1:{port}", patience_s=0.1) as api:
        with pytest.raises(NotConnected, match=str(port)):
            await api.job(JOB)


@pytest.mark.parametrize("listed", [0, 1, 99, 100, 101, 250])
async def test_lists_are_read_page_by_page(listed):
    jobs = [job_fields(f"batch_{n:032x}") for n in range(listed)]
    async with batch_endpoint(BatchEndpoint(listed=jobs)) as there, patient(there.url) as api:
        for limit in (1, 100, 180, 1000):
            found = await api.jobs(limit)
            assert [job.id for job in found] == [job["id"] for job in jobs[:limit]]


@pytest.mark.parametrize("knows_ranges", [True, False])
async def test_a_download_that_was_cut_off_goes_on(tmp_path, knows_ranges):
    cutting = BatchEndpoint(files={FILE: DATA}, cuts=[300_000, 0, 5], knows_ranges=knows_ranges)
    async with batch_endpoint(cutting) as there, patient(there.url) as api:
        assert await download(api, FILE, tmp_path / "out", lambda have: None) == len(DATA)
    assert (tmp_path / "out").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


async def test_a_later_run_goes_on_with_what_an_earlier_one_left(tmp_path):
    async with batch_endpoint(
        BatchEndpoint(files={FILE: DATA}, cuts=[300_000, *[0] * 999])
    ) as there:
        async with patient(there.url, patience_s=0.1) as api:
            with pytest.raises(EndpointError, match="cut off"):
                await download(api, FILE, tmp_path / "out", lambda have: None)
        assert not (tmp_path / "out").exists()
        there.cuts.clear()
        there.ranges.clear()
        async with patient(there.url) as api:
            await download(api, FILE, tmp_path / "out", lambda have: None)
    [asked] = there.ranges
    assert asked != "bytes=0-"
    assert (tmp_path / "out").read_bytes() == DATA


@pytest.mark.parametrize("claimed", [len(DATA) - 1, len(DATA) + 1])
async def test_a_file_of_another_size_than_named_is_no_output(tmp_path, claimed):
    other = BatchEndpoint(files={FILE: DATA}, claims_bytes=claimed)
    async with batch_endpoint(other) as there, patient(there.url, patience_s=0.1) as api:
        with pytest.raises(EndpointError, match="bytes where the endpoint named"):
            await download(api, FILE, tmp_path / "out", lambda have: None)
    assert not (tmp_path / "out").exists()


async def test_a_part_that_is_longer_than_the_file_is_thrown_away(tmp_path):
    part = tmp_path / f"out.{FILE}.part"
    part.write_bytes(DATA + b"more")
    async with (
        batch_endpoint(BatchEndpoint(files={FILE: DATA})) as there,
        patient(there.url) as api,
    ):
        with pytest.raises(EndpointError, match="bytes where the endpoint named"):
            await download(api, FILE, tmp_path / "out", lambda have: None)
        await download(api, FILE, tmp_path / "out", lambda have: None)
    assert (tmp_path / "out").read_bytes() == DATA


async def test_an_empty_file_is_downloaded(tmp_path):
    async with (
        batch_endpoint(BatchEndpoint(files={FILE: b""})) as there,
        patient(there.url) as api,
    ):
        assert await download(api, FILE, tmp_path / "out", lambda have: None) == 0
    assert (tmp_path / "out").read_bytes() == b""


async def test_a_file_id_from_an_endpoint_names_no_other_folder(tmp_path):
    files = {"..": b"x"}
    async with batch_endpoint(BatchEndpoint(files=files)) as there, patient(there.url) as api:
        with pytest.raises(EndpointError, match="no id"):
            await download(api, "../../x", tmp_path / "out", lambda have: None)


async def test_a_job_is_followed_through_losses_to_its_end():
    counts = {"total": 4, "completed": 2, "failed": 0}
    script = [
        job_fields(status="validating", request_counts=None),
        job_fields(request_counts=counts),
        job_fields(status="completed", request_counts={**counts, "completed": 4}),
    ]
    async with batch_endpoint(BatchEndpoint(jobs=script)) as there, patient(there.url) as api:
        looks = []
        async for look in watch(api, JOB, look_every_s=0.01):
            looks.append(look)
            if len(looks) == 1:
                there.refusals += [(503, "draining"), (502, "bad gateway")]
    assert [look.job.lines.answered for look in looks if look.lost is None] == [0, 2, 4]
    assert [str(look.lost) for look in looks if look.lost] == [
        "draining (HTTP 503)",
        "bad gateway (HTTP 502)",
    ]
    assert looks[-1].job.is_over


async def test_a_job_that_is_gone_ends_the_watch():
    forgotten = BatchEndpoint(jobs=[job_fields()])
    async with batch_endpoint(forgotten) as there, patient(there.url) as api:
        with pytest.raises(Refused, match="no such batch"):
            async for _ in watch(api, JOB, look_every_s=0.01):
                there.refusals.append((404, "no such batch"))


async def test_a_deletion_without_an_answer_was_done_and_a_file_that_never_was_is_refused():
    there = BatchEndpoint(files={"file-1": b"x"}, lose_deletions=1)
    async with batch_endpoint(there), patient(there.url) as api:
        await api.delete_file("file-1")
        with pytest.raises(Refused, match="no file file-1"):
            await api.delete_file("file-1")
    assert there.files == {}


async def test_files_are_listed_in_pages_up_to_the_limit():
    there = BatchEndpoint(files={f"file-{n:04}": b"x" for n in range(PAGE_FILES + 2)})
    async with batch_endpoint(there), patient(there.url) as api:
        most, has_more = await api.files(PAGE_FILES + 1)
        all_files, is_cut = await api.files(PAGE_FILES + 2)
    assert [file.id for file in all_files] == list(there.files)
    assert (most, has_more, is_cut) == (all_files[:-1], True, False)
