"""Routers without a store of files and batches, or whose store is away: chats are served."""

import asyncio

import aiohttp
import openai
import pytest

from infra.bus import BusAddress
from schemas.batch import STREAM_FILES, STREAM_JOBS
from tests.support.batch_regions import batch_toml
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.raw_http import connections
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh
from tests.support.until import PATIENCE_S

LINES = b'{"custom_id": "1"}\n'


@pytest.fixture
def regions(tmp_path):
    """Of its own, because its server is stopped."""
    with running_regions(tmp_path, toml=batch_toml()) as made:
        yield made


async def test_a_region_without_batch_runners_says_what_to_configure(one):
    async with openai.AsyncOpenAI(base_url=one.urls["us"] + "/v1", api_key="none") as api:
        for call in (api.files.list(), api.batches.list(), api.files.retrieve("file-1")):
            with pytest.raises(openai.NotFoundError, match="batch_runners") as caught:
                await call
            assert caught.value.code == "batch_not_configured"


async def test_a_router_serves_chats_while_the_store_is_away(regions):
    async with (
        small_mesh(regions) as mesh,
        scripted_engine() as engine,
        openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0) as api,
    ):
        await mesh.router("us", **PATIENT)
        api.base_url = mesh.urls["us"] + "/v1"
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        made = await api.files.create(file=LINES, purpose="batch")
        await regions.stop_one("us")
        await mesh.until(lambda: not door._store.is_connected, "the loss")
        for call in (
            api.files.create(file=LINES, purpose="batch"),
            api.files.content(made.id),
            api.batches.list(),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
            assert int(caught.value.response.headers["retry-after"]) >= 1
        await regions.start_one("us")
        await mesh.until(lambda: door._store.is_connected, "the return")
        assert (await api.files.content(made.id)).content == LINES
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)


async def test_a_router_says_that_streams_are_missing_until_they_are_made(
    regions, monkeypatch, caplog
):
    monkeypatch.setattr("mesh.runtime.batch_door.AGAIN_S", 0.1)
    remedy = "mesh infra streams"
    async with (
        small_mesh(regions) as mesh,
        openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0) as api,
    ):
        await mesh.router("us", **PATIENT)
        api.base_url = mesh.urls["us"] + "/v1"
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        setup = await regions.connect("us", "batch-setup")
        for stream in (STREAM_FILES, STREAM_JOBS):
            await setup.jetstream().delete_stream(stream)
        await setup.close()
        await mesh.until(lambda: f"lacks {STREAM_FILES}, {STREAM_JOBS}" in caplog.text, "the log")
        assert remedy in caplog.text
        for call in (api.files.create(file=LINES, purpose="batch"), api.batches.list()):
            with pytest.raises(openai.InternalServerError, match=remedy) as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
        await regions.set_up("us")
        assert (await api.files.create(file=LINES, purpose="batch")).bytes == len(LINES)


async def test_a_router_starts_and_is_ready_without_the_store(regions, monkeypatch):
    wrong = BusAddress(regions.address("us", "batch").url, "batch", "wrong")
    address = NatsRegions.address
    monkeypatch.setattr(
        NatsRegions,
        "address",
        lambda self, region, user: wrong if user == "batch" else address(self, region, user),
    )
    async with small_mesh(regions) as mesh, scripted_engine() as engine:
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        assert (await post(mesh, chat()))[0] == 200
        async with client() as session:
            async with session.get(mesh.urls["us"] + "/ready") as answer:
                assert answer.status == 200
            async with session.get(mesh.urls["us"] + "/v1/files") as answer:
                assert answer.status == 503


@pytest.mark.parametrize("ends", [True, False])
async def test_a_router_that_ends_waits_for_an_upload_but_not_for_ever(regions, ends):
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 190\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    )
    form = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    form += b"x" * (190 - len(form) - 9) + b"\r\n--b--\r\n"
    async with small_mesh(regions) as mesh:
        await mesh.router("us", drain_s=PATIENCE_S if ends else 0.1, **PATIENT)
        router = mesh.routers["us"]
        await mesh.until(lambda: router._batch._store is not None, "the store")
        async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
            writer.write(head + form[:-20])
            await mesh.until(lambda: mesh.sample("us", "mesh_uploads_open") == 1, "the upload")
            draining = asyncio.create_task(router.drain())
            await mesh.until(lambda: router.core.draining, "the drain")
            if ends:
                writer.write(form[-20:])
                async with asyncio.timeout(PATIENCE_S):
                    assert b" 200 " in await reader.readline()
            async with asyncio.timeout(PATIENCE_S):
                await draining


async def test_an_upload_whose_store_goes_away_is_refused_and_can_be_repeated(regions):
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    )
    form = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    form += b"x" * (4 << 20) + b"\r\n--b--\r\n"
    async with small_mesh(regions) as mesh:
        await mesh.router("us", **PATIENT)
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
            writer.write(head % len(form) + form[: 2 << 20])
            received = "mesh_file_received_bytes_total"
            await mesh.until(lambda: mesh.sample("us", received) >= 2 << 20, "half of it")
            await regions.stop_one("us")
            writer.write(form[2 << 20 :])
            async with asyncio.timeout(PATIENCE_S):
                assert b" 503 " in await reader.readline()
        await regions.start_one("us")
        await mesh.until(lambda: door._store.is_connected, "the return")
        async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
            writer.write(head % len(form) + form)
            async with asyncio.timeout(PATIENCE_S):
                assert b" 200 " in await reader.readline()


async def test_a_download_whose_store_goes_away_is_cut_and_resumed(regions):
    data = bytes(range(256)) * (64 * 1024)  # 16 MiB: half a second at the routers' pace
    async with small_mesh(regions) as mesh:
        await mesh.router("us", **PATIENT)
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        url = mesh.urls["us"] + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as api, client() as session:
            made = await api.files.create(file=data, purpose="batch")
            async with session.get(f"{url}/files/{made.id}/content") as answer:
                got = await answer.content.readexactly(1 << 20)
                await regions.stop_one("us")
                with pytest.raises(aiohttp.ClientPayloadError):
                    while piece := await answer.content.readany():
                        got += piece
            assert len(got) < len(data) and got == data[: len(got)]
            await mesh.until(lambda: mesh.sample("us", "mesh_downloads_open") == 0, "its end")
            await regions.start_one("us")
            await mesh.until(lambda: door._store.is_connected, "the return")
            headers = {"range": f"bytes={len(got)}-", "if-range": answer.headers["etag"]}
            async with session.get(f"{url}/files/{made.id}/content", headers=headers) as rest:
                assert (rest.status, got + await rest.read() == data) == (206, True)
