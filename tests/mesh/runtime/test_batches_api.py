"""Batches over a real router and nats-server, by OpenAI's clients. No batch runner runs."""

import asyncio
import itertools
import time
from dataclasses import replace

import openai
import pytest

from infra.tenant_table import Caller, key_hash
from mesh.batch.records import NewFile
from schemas.batch import ENDPOINTS, JobStatus, LineError, Purpose, Task
from schemas.batch_http import BatchRequest
from schemas.residency import ground
from tests.support.batch_regions import LIMITS, opened, pieces
from tests.support.small_mesh import PATIENT, client

assert "jobs_max = 3\n" in LIMITS
KEYS = map("sk-b{}".format, itertools.count(1))
CHAT = "/v1/chat/completions"
LINES = b'{"custom_id": "1"}\n'


@pytest.fixture
async def store(batch_regions):
    """The region's store, whose jobs and files are removed at the end."""
    async with opened(batch_regions) as made:
        yield made
        for job in [stored async for stored, _ in made.jobs._all()]:
            await made.jobs.delete(job.subject.rpartition(".")[2])
        for file in [each async for each in made.files._all()]:
            await made.files.delete(file.info.id)
        await made._connection.purge("BATCH_TASKS", "batch.task.>")


@pytest.fixture
async def api(batch_mesh, store):
    base_url = batch_mesh.urls["us"] + "/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=next(KEYS), max_retries=0) as made:
        yield made


async def uploaded(api) -> str:
    return (await api.files.create(file=LINES, purpose="batch")).id


async def created(api, **fields):
    given = {"endpoint": CHAT, "completion_window": "24h", **fields}
    if "input_file_id" not in given:
        given["input_file_id"] = await uploaded(api)
    return await api.batches.create(**given)


async def test_a_batch_lives_as_openais_do(api, store):
    metadata = {"project": "one", "": ""}
    began_at = int(time.time())
    made = await created(api, metadata=metadata)
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", CHAT)
    assert (made.completion_window, made.metadata) == ("24h", metadata)
    assert began_at <= made.created_at <= time.time() + 1
    assert made.expires_at == made.created_at + 86_400
    counts = made.request_counts
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)
    assert (made.errors, made.output_file_id, made.error_file_id) == (None, None, None)
    assert made.model_extra["mesh"] == {"estimated_end_at": None, "late": False, "tokens": 0}
    task = await store.tasks.take(5.0)
    assert (task.task, task.job) == (Task.CHECK, made.id)
    assert await api.batches.retrieve(made.id) == made
    assert [batch.id async for batch in await api.batches.list()] == [made.id]
    cancelled = await api.batches.cancel(made.id)
    assert (cancelled.status, cancelled.cancelling_at >= began_at) == ("cancelling", True)
    assert await api.batches.cancel(made.id) == cancelled, "a second time changes nothing"


async def test_the_plain_client_works_too(batch_mesh, store):
    def use() -> None:
        with openai.OpenAI(base_url=batch_mesh.urls["us"] + "/v1", api_key=next(KEYS)) as api:
            file = api.files.create(file=LINES, purpose="batch")
            made = api.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            assert api.batches.retrieve(made.id) == made
            assert [batch.id for batch in api.batches.list(limit=1)] == [made.id]
            assert api.batches.cancel(made.id).status == "cancelling"

    await asyncio.to_thread(use)


async def test_a_batch_shows_what_its_runners_write(api, store):
    made = await created(api)
    errors = (LineError(code="invalid_json", message="no JSON", line=3, param="body"),)
    await store.jobs.update(
        made.id,
        lambda job: replace(
            job,
            status=JobStatus.IN_PROGRESS,
            in_progress_at=job.created_at + 1,
            total=9,
            completed=4,
            failed=1,
            errors=errors,
            estimated_end_at=1e9,
            late=True,
            input_tokens=70,
            output_tokens=7,
            output_file_id="file-o",
            error_file_id="file-e",
        ),
    )
    seen = await api.batches.retrieve(made.id)
    counts = seen.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 4, 1)
    assert (seen.status, seen.in_progress_at) == ("in_progress", made.created_at + 1)
    assert (seen.output_file_id, seen.error_file_id) == ("file-o", "file-e")
    assert seen.model_extra["mesh"] == {"estimated_end_at": 1e9, "late": True, "tokens": 77}
    usage = seen.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (70, 7, 77)
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    [error] = seen.errors.data
    assert (error.code, error.message, error.line) == ("invalid_json", "no JSON", 3)
    assert (error.param, seen.errors.object) == ("body", "list")


@pytest.mark.parametrize("status", JobStatus)
async def test_what_can_be_cancelled_is_and_the_rest_is_a_conflict(api, store, status):
    made = await created(api)
    await store.jobs.update(made.id, lambda job: replace(job, status=status))
    if status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
        assert (await api.batches.cancel(made.id)).status == "cancelling"
    elif status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
        assert (await api.batches.cancel(made.id)).status == status
    else:
        with pytest.raises(openai.ConflictError, match=status) as caught:
            await api.batches.cancel(made.id)
        assert caught.value.code == "batch_over"
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert (await api.batches.retrieve(made.id)).status == status


LONGEST = {f"{number:\U0001f600>64}": "\U0001f600" * 512 for number in range(16)}
WRONG = {
    "no file id": ({"input_file_id": openai.NOT_GIVEN}, "input_file_id"),
    "a number": ({"input_file_id": 7}, "input_file_id"),
    "an unknown file": ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
    "no id at all": ({"input_file_id": "../etc"}, "input_file_id"),
    "an unknown endpoint": ({"endpoint": "/v1/responses"}, "endpoint"),
    "no endpoint": ({"endpoint": openai.NOT_GIVEN}, "endpoint"),
    "no window": ({"completion_window": openai.NOT_GIVEN}, "completion_window"),
    "a window of no unit": ({"completion_window": "24"}, "completion_window"),
    "a window too short": ({"completion_window": "0m"}, "completion_window"),
    "a window too long": ({"completion_window": "31d"}, "completion_window"),
    "an unknown field": ({"extra_body": {"endpont": CHAT}}, "endpont"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata"),
    "metadata of 17": ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    "a long key": ({"metadata": {"x" * 65: ""}}, "metadata"),
    "a long value": ({"metadata": {"a": "x" * 513}}, "metadata"),
    "an expiry too soon": (
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
        "output_expires_after",
    ),
}


@pytest.mark.parametrize(("fields", "param"), WRONG.values(), ids=WRONG)
async def test_a_wrong_batch_is_refused_and_its_field_is_named(api, store, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await created(api, **fields)
    assert caught.value.param == param, caught.value
    assert (await api.batches.list()).data == []
    assert await store.jobs.unfinished() == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"x" * 200_000])
async def test_a_body_that_is_no_batch_is_refused(batch_mesh, store, body):
    headers = {"authorization": f"Bearer {next(KEYS)}"}
    async with client() as session:
        url = batch_mesh.urls["us"] + "/v1/batches"
        async with session.post(url, data=body, headers=headers) as answer:
            error = (await answer.json())["error"]
    assert answer.status == (413 if len(body) > 1000 else 400)
    assert error["type"] == "invalid_request_error"


async def test_requests_with_one_key_make_one_batch(api, store):
    file_id = await uploaded(api)
    keyed = {"extra_headers": {"Idempotency-Key": "first"}, "input_file_id": file_id}
    made = await created(api, **keyed)
    again = await asyncio.gather(*(created(api, **keyed) for _ in range(3)))
    assert {one.id for one in again} == {made.id}
    with pytest.raises(openai.BadRequestError, match="sent with another batch") as caught:
        await created(api, **keyed, metadata={"project": "two"})
    assert caught.value.param == "idempotency-key"
    other = await created(api, **(keyed | {"extra_headers": {"Idempotency-Key": "second"}}))
    assert other.id != made.id
    assert len(await store.jobs.unfinished()) == 2
    for key in ("x" * 256, "a\tb"):
        with pytest.raises(openai.BadRequestError, match="1 to 255 characters"):
            await created(api, **(keyed | {"extra_headers": {"Idempotency-Key": key}}))


@pytest.mark.parametrize("header", [{"Idempotency-Key": "gone"}, {"x-stainless-retry-count": "1"}])
async def test_a_request_is_repeated_after_its_input_file_was_deleted(api, header):
    given = {"extra_headers": header, "input_file_id": await uploaded(api)}
    made = await created(api, **given)
    await api.files.delete(given["input_file_id"])
    assert (await created(api, **given)).id == made.id


async def test_at_once_requests_with_one_key_make_one_batch(api, store):
    keyed = {"extra_headers": {"Idempotency-Key": "at once"}, "input_file_id": await uploaded(api)}
    made = await asyncio.gather(*(created(api, **keyed) for _ in range(8)))
    assert len({one.id for one in made}) == len(await store.jobs.unfinished()) == 1


async def test_a_request_that_openais_client_repeats_makes_one_batch(api, store):
    """As after an answer that was lost; a first request makes another one."""
    file_id = await uploaded(api)
    made = await created(api, input_file_id=file_id)
    repeated = {"extra_headers": {"x-stainless-retry-count": "1"}, "input_file_id": file_id}
    assert (await created(api, **repeated)).id == made.id
    assert (await created(api, **repeated, metadata={"a": "b"})).id != made.id
    assert (await created(api, input_file_id=file_id)).id != made.id


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("24h", 86_400), ("30d", 2_592_000)])
async def test_windows_and_metadata_of_every_size_are_taken(api, store, window, seconds):
    made = await created(api, completion_window=window, metadata=LONGEST)
    assert made.expires_at - made.created_at == seconds
    assert (await api.batches.retrieve(made.id)).metadata == LONGEST


async def test_a_batch_keeps_the_labels_of_its_request_and_of_its_key(batch_mesh, store):
    keys = {key_hash("sk-eu"): Caller(tenant="acme", residency=("eu",))}
    labels = ground({"us": ("eu", "us")})
    url = await batch_mesh.router("us", "r2", keys=keys, ground=labels, **PATIENT)
    door = batch_mesh.routers["us/r2"]._batch
    await batch_mesh.until(lambda: door._store is not None, "the store")
    for key, wanted, kept in (("sk-eu", "eu,us", ("eu",)), (next(KEYS), "us", ("us",))):
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as api:
            made = await created(api, extra_headers={"x-mesh-residency": wanted})
            assert (await store.jobs.get(made.id)).residency == kept
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="sk-eu") as api:
        with pytest.raises(openai.PermissionDeniedError):
            await created(api, extra_headers={"x-mesh-residency": "us"})


async def test_a_batch_keeps_the_expiry_of_its_output(api, store):
    chosen = {"anchor": "created_at", "seconds": 7200}
    made = await created(api, output_expires_after=chosen)
    assert (await store.jobs.get(made.id)).output_expires_s == 7200
    with pytest.raises(openai.BadRequestError) as caught:
        await created(api, extra_headers={"x-mesh-residency": "eu"})
    assert caught.value.param == "x-mesh-residency"


async def test_only_a_file_that_was_uploaded_for_it_is_a_batchs_input(api, store):
    mine = await uploaded(api)
    tenant = (await store.files.info(mine)).tenant
    new = NewFile(filename="out", purpose=Purpose.BATCH_OUTPUT, tenant=tenant)
    output = await store.files.put(new, pieces(LINES))
    gone = NewFile(filename="old", purpose=Purpose.BATCH, tenant=tenant, expires_at=1)
    expired = await store.files.put(gone, pieces(LINES))
    for file_id in (output.id, expired.id):
        with pytest.raises(openai.BadRequestError) as caught:
            await created(api, input_file_id=file_id)
        assert caught.value.param == "input_file_id"
    assert (await api.files.content(output.id)).content == LINES
    with pytest.raises(openai.NotFoundError):
        await api.files.retrieve(expired.id)


async def test_as_many_batches_as_may_be_and_no_more(api, store):
    file_id = await uploaded(api)
    made = [await created(api, input_file_id=file_id) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        await created(api, input_file_id=file_id)
    assert caught.value.code == "too_many_batches"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    ended = replace(await store.jobs.get(made[0].id), status=JobStatus.COMPLETED)
    await store.jobs.update(made[0].id, lambda job: ended)
    again = await created(api, input_file_id=file_id)
    listed = [batch.id async for batch in await api.batches.list(limit=1)]
    assert sorted(listed) == sorted(batch.id for batch in (*made, again))
    page = await api.batches.list(limit=3)
    assert ([batch.id for batch in page.data], page.has_more) == (listed[:3], True)


async def test_a_batch_is_its_tenants_alone(batch_mesh, store):
    base_url = batch_mesh.urls["us"] + "/v1"
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-acme") as acme,
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-acme-2") as acme_too,
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-beta") as beta,
    ):
        made = await created(acme)
        assert (await store.jobs.get(made.id)).tenant == "acme"
        for call in (beta.batches.retrieve, beta.batches.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(made.id)
            assert caught.value.code == "batch_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await created(beta, input_file_id=made.input_file_id)
        assert refused.value.param == "input_file_id"
        assert (await beta.batches.list()).data == []
        assert (await acme_too.batches.retrieve(made.id)) == made


def test_the_documented_endpoints_are_those_of_batches():
    assert set(BatchRequest.__annotations__["endpoint"].__args__) == ENDPOINTS


async def test_unknown_batches_are_not_found(api):
    for batch_id in ("batch_" + "0" * 32, "batch_x", "a.b", "*"):
        for call in (api.batches.retrieve, api.batches.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(batch_id)
            assert caught.value.code == "batch_not_found"
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.batches.list(after="batch_" + "0" * 32)
    assert unknown.value.param == "after"
    with pytest.raises(openai.BadRequestError):
        await api.batches.list(limit=101)
