"""Files over a real router and nats-server, by OpenAI's clients and by hand."""

import asyncio
import itertools
import os
import signal
import socket
import time

import openai
import pytest
import yarl

from infra.process import end_all
from mesh.http.batch_api import LISTS_MAX
from mesh.http.files_api import UPLOADS_MAX
from mesh.http.request_body import WINDOW_BYTES
from tests.support.batch_regions import LIMITS, opened
from tests.support.raw_http import connections
from tests.support.small_mesh import client
from tests.support.until import PATIENCE_S

MEBIBYTE = 1024 * 1024
FILE_MIB_MAX = 12
assert f"file_mib_max = {FILE_MIB_MAX}\n" in LIMITS and "files_max = 5\n" in LIMITS
KEYS = map("sk-{}".format, itertools.count(1))  # on no list: each sees its own files only
LINES = b'{"custom_id": "1"}\n{"custom_id": "2"}\n'


@pytest.fixture
async def api(batch_mesh):
    """OpenAI's client with a key of its own. Its files are deleted at the end."""
    base_url = batch_mesh.urls["us"] + "/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=next(KEYS), max_retries=0) as made:
        yield made
        async for file in await made.files.list():
            await made.files.delete(file.id)


async def ids(api, **query):
    return [file.id for file in (await api.files.list(**query)).data]


async def until_nothing_is_left(batch_regions, files=0):
    """No more of the store's messages than those of so many small files."""
    async with opened(batch_regions) as store, asyncio.timeout(PATIENCE_S):
        while True:
            reply = await store._connection.ask("STREAM.INFO.OBJ_files")
            if reply["state"]["messages"] == 2 * files:
                return
            await asyncio.sleep(0.02)


async def test_a_file_lives_as_openais_do(api):
    began_at = int(time.time())
    made = await api.files.create(file=("in.jsonl", LINES), purpose="batch")
    assert (made.object, made.filename, made.bytes) == ("file", "in.jsonl", len(LINES))
    assert (made.purpose, made.status) == ("batch", "processed")
    assert began_at <= made.created_at <= time.time() + 1
    assert made.expires_at - made.created_at in (30 * 86_400, 30 * 86_400 - 1)
    assert await api.files.retrieve(made.id) == made
    assert (await api.files.content(made.id)).content == LINES
    assert await ids(api) == [made.id]
    gone = await api.files.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
    assert await ids(api) == []
    for call in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(made.id)
        assert caught.value.code == "file_not_found"


async def test_the_plain_client_works_too(batch_mesh, tmp_path):
    def use() -> bytes:
        with openai.OpenAI(base_url=batch_mesh.urls["us"] + "/v1", api_key=next(KEYS)) as api:
            (tmp_path / "in.jsonl").write_bytes(LINES)
            made = api.files.create(file=tmp_path / "in.jsonl", purpose="batch")
            with api.files.with_streaming_response.content(made.id) as answer:
                answer.stream_to_file(tmp_path / "back.jsonl")
            assert [file.id for file in api.files.list()] == [made.id]
            assert api.files.delete(made.id).deleted
        return (tmp_path / "back.jsonl").read_bytes()

    assert await asyncio.to_thread(use) == LINES


async def test_a_client_chooses_when_its_file_expires(api):
    chosen = {"anchor": "created_at", "seconds": 3600}
    made = await api.files.create(file=LINES, purpose="batch", expires_after=chosen)
    assert made.expires_at - made.created_at in (3600, 3599)
    for wrong in ({"anchor": "created_at", "seconds": 3599}, {"anchor": "now", "seconds": 3600}):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.files.create(file=LINES, purpose="batch", expires_after=wrong)
        assert caught.value.param == "expires_after"


async def test_lists_have_pages_and_an_order(api):
    made = [(await api.files.create(file=LINES, purpose="batch")).id for _ in range(3)]
    oldest_first = await ids(api, order="asc")
    assert sorted(oldest_first) == sorted(made)
    assert await ids(api) == oldest_first[::-1]
    page = await api.files.list(order="asc", limit=2)
    assert ([file.id for file in page.data], page.has_more) == (oldest_first[:2], True)
    assert [file.id async for file in page] == oldest_first
    assert await ids(api, order="asc", after=oldest_first[1]) == oldest_first[2:]
    assert await ids(api, purpose="batch_output") == []
    for wrong, param in (
        ({"order": "up"}, "order"),
        ({"purpose": "vision"}, "purpose"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"extra_query": {"afer": "x"}}, "afer"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.files.list(**wrong)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.files.list(after="file-" + "0" * 32)
    assert unknown.value.param == "after"


async def test_a_file_is_its_tenants_alone(batch_mesh):
    base_url = batch_mesh.urls["us"] + "/v1"
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-acme") as acme,
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-acme-2") as acme_too,
        openai.AsyncOpenAI(base_url=base_url, api_key="sk-beta") as beta,
        openai.AsyncOpenAI(base_url=base_url, api_key=next(KEYS)) as unlisted,
    ):
        made = await acme.files.create(file=LINES, purpose="batch")
        for other in (beta, unlisted):
            assert await ids(other) == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError) as caught:
                    await call(made.id)
                assert caught.value.body == {
                    "message": f"no file {made.id}",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "file_not_found",
                }
        assert await ids(acme_too) == [made.id], "another key of the same tenant"
        assert (await acme_too.files.delete(made.id)).deleted
    async with client() as session, session.get(base_url + "/files") as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (401, "api_key_missing")


def form(*parts: tuple[str, bytes, str]) -> bytes:
    """A form of these fields: name, value, and what else is beside the name."""
    return (
        b"".join(
            f'--b\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
            + value
            + b"\r\n"
            for name, value, more in parts
        )
        + b"--b--\r\n"
    )


BATCH = ("purpose", b"batch", "")
A_FILE = ("file", LINES, '; filename="in.jsonl"')
WRONG = {
    "no purpose": (form(A_FILE), "purpose"),
    "an unknown purpose": (form(A_FILE, ("purpose", b"vision", "")), "purpose"),
    "a purpose of ours": (form(("purpose", b"batch_output", ""), A_FILE), "purpose"),
    "no file": (form(BATCH), "file"),
    "two files": (form(BATCH, A_FILE, A_FILE), "file"),
    "an unknown field": (form(BATCH, ("porpoise", b"x", ""), A_FILE), "porpoise"),
    "half of a choice": (
        form(BATCH, A_FILE, ("expires_after[seconds]", b"3600", "")),
        "expires_after",
    ),
    "no form": (b'{"purpose": "batch"}', None),
}


@pytest.mark.parametrize(("data", "param"), WRONG.values(), ids=WRONG)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(batch_mesh, batch_regions, data, param):
    kind = "multipart/form-data; boundary=b"
    headers = {"authorization": f"Bearer {next(KEYS)}", "content-type": kind}
    url = batch_mesh.urls["us"] + "/v1/files"
    async with client() as session, session.post(url, data=data, headers=headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param, error
    await until_nothing_is_left(batch_regions)


def head(key: str, *lines: str) -> bytes:
    first = ("POST /v1/files HTTP/1.1", "host: x", f"authorization: Bearer {key}")
    kind = "content-type: multipart/form-data; boundary=b"
    return "\r\n".join((*first, kind, *lines, "", "")).encode()


BEGINNING = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
)


async def answer_to(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.readuntil(b"\r\n\r\n")


async def test_two_gigabytes_are_refused_before_they_come(batch_mesh):
    async with connections(batch_mesh.urls["us"], 2) as pairs:
        for (reader, writer), more in zip(pairs, ((), ("expect: 100-continue",)), strict=True):
            writer.write(head(next(KEYS), f"content-length: {2 << 30}", *more))
            assert (await answer_to(reader)).startswith(b"HTTP/1.1 413 ")
            assert b'"code":"file_too_large"' in await reader.readuntil(b"}}")


async def test_a_file_of_the_largest_size_is_taken_and_a_larger_one_never(api, batch_regions):
    line = b'{"x":"' + b"x" * 1015 + b'"}\n'
    data = line * (FILE_MIB_MAX * 1024)
    assert len(data) == FILE_MIB_MAX * MEBIBYTE
    made = await api.files.create(file=data, purpose="batch")
    assert made.bytes == len(data)
    assert (await api.files.content(made.id)).content == data
    await api.files.delete(made.id)
    with pytest.raises(openai.APIStatusError) as caught:
        await api.files.create(file=data + b"x", purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    await until_nothing_is_left(batch_regions)


async def test_a_full_store_refuses_and_keeps_what_it_has(api):
    """By bytes (16 MiB), and by files."""
    first = await api.files.create(file=b"1" * (FILE_MIB_MAX * MEBIBYTE), purpose="batch")
    with pytest.raises(openai.InternalServerError) as caught:
        await api.files.create(file=b"2" * (5 * MEBIBYTE), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "store_full")
    assert "of which 20% is for outputs of jobs): delete files" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert (await api.files.content(first.id)).content == b"1" * (FILE_MIB_MAX * MEBIBYTE)
    await api.files.delete(first.id)
    for _ in range(5):
        await api.files.create(file=LINES, purpose="batch")
    with pytest.raises(openai.InternalServerError, match="files_max"):
        await api.files.create(file=LINES, purpose="batch")


@pytest.mark.parametrize("end", ["client leaves", "form ends", "chunks are broken"])
async def test_of_an_upload_that_is_cut_nothing_is_left(batch_mesh, batch_regions, end):
    sent = BEGINNING + b"x" * MEBIBYTE
    async with connections(batch_mesh.urls["us"], 1) as [(reader, writer)]:
        if end == "client leaves":
            writer.write(head(next(KEYS), "content-length: 9000000") + sent)
            await batch_mesh.until(
                lambda: batch_mesh.sample("us", "mesh_file_received_bytes_total") > MEBIBYTE, "it"
            )
            writer.transport.abort()
        else:
            chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent)
            if end == "chunks are broken":
                chunks = b"no size\r\n" + chunks
            writer.write(head(next(KEYS), "transfer-encoding: chunked") + chunks)
            assert (await answer_to(reader)).split()[1] == b"400"
    await batch_mesh.until(lambda: batch_mesh.sample("us", "mesh_uploads_open") == 0, "its end")
    await until_nothing_is_left(batch_regions)


async def test_an_upload_in_chunks_with_its_file_first_is_taken(batch_mesh):
    headers = {"authorization": f"Bearer {next(KEYS)}"}
    url = batch_mesh.urls["us"] + "/v1/files"

    async def data():
        parts = BEGINNING.split(b"--b\r\n")[1:][::-1]
        for part in (b"--b\r\n" + parts[0] + LINES, b"\r\n--b\r\n" + parts[1], b"--b--\r\n"):
            for byte in part:
                yield bytes([byte])

    headers["content-type"] = "multipart/form-data; boundary=b"
    async with client() as session:
        async with session.post(url, data=data(), headers=headers, expect100=True) as answer:
            made = await answer.json()
            assert answer.status == 200, made
        async with session.get(f"{url}/{made['id']}/content", headers=headers) as answer:
            assert await answer.read() == LINES
        await session.delete(f"{url}/{made['id']}", headers=headers)


async def test_so_many_uploads_at_once_and_no_more(batch_mesh, batch_regions, api):
    async with connections(batch_mesh.urls["us"], UPLOADS_MAX) as pairs:
        for _, writer in pairs:
            writer.write(head(next(KEYS), "content-length: 9000") + BEGINNING)
        await batch_mesh.until(
            lambda: batch_mesh.sample("us", "mesh_uploads_open") == UPLOADS_MAX, "all uploads"
        )
        with pytest.raises(openai.RateLimitError) as caught:
            await api.files.create(file=LINES, purpose="batch")
        assert caught.value.code == "too_many_transfers"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    await batch_mesh.until(lambda: batch_mesh.sample("us", "mesh_uploads_open") == 0, "their end")
    assert (await api.files.create(file=LINES, purpose="batch")).bytes == len(LINES)
    labels = {"route": "createFile", "code": "too_many_transfers"}
    assert batch_mesh.sample("us", "mesh_batch_requests_total", **labels) == 1


async def test_an_upload_that_is_too_slow_loses_its_place(batch_mesh, batch_regions, monkeypatch):
    """Its client keeps sending, and fast enough for a request's body, but not for a file."""
    monkeypatch.setattr("mesh.http.request_body.WINDOW_S", 2.0)
    sent_each = b"x" * (2 * WINDOW_BYTES)
    async with connections(batch_mesh.urls["us"], 1) as [(reader, writer)]:
        writer.write(head(next(KEYS), "content-length: 9000000") + BEGINNING)

        async def drip():
            while True:
                writer.write(sent_each)
                await asyncio.sleep(1.0)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(PATIENCE_S):
            answered = await answer_to(reader)
        await end_all([dripping])
        assert answered.split()[1] == b"408"
    await batch_mesh.until(lambda: batch_mesh.sample("us", "mesh_uploads_open") == 0, "its end")
    await until_nothing_is_left(batch_regions)


async def test_uploads_with_one_key_make_one_file(api):
    keyed = {"purpose": "batch", "extra_headers": {"Idempotency-Key": "first"}}
    made = await api.files.create(file=LINES, **keyed)
    again = await api.files.create(file=LINES, **keyed)
    assert (again.id, again.created_at) == (made.id, made.created_at)
    for other in (LINES[::-1], LINES * 2, b""):
        with pytest.raises(openai.BadRequestError, match="sent with another file"):
            await api.files.create(file=other, **keyed)
    assert (await api.files.content(made.id)).content == LINES
    assert await ids(api) == [made.id]
    await api.files.delete(made.id)
    # At once: one is stored, and a client that repeats what the others are refused finds it.
    patient = api.with_options(max_retries=5)
    found = await asyncio.gather(*(patient.files.create(file=LINES, **keyed) for _ in range(4)))
    assert {one.id for one in found} == {made.id}
    assert await ids(api) == [made.id]


async def test_so_many_lists_at_once_and_no_more(batch_mesh, batch_regions, api):
    """Each reads all that is known of files, or batches, of all tenants."""
    server = batch_regions.pid("us")
    os.kill(server, signal.SIGSTOP)
    try:
        lists = [asyncio.create_task(ids(api)) for _ in range(LISTS_MAX + 1)]
        done, waiting = await asyncio.wait(lists, return_when=asyncio.FIRST_COMPLETED)
    finally:
        os.kill(server, signal.SIGCONT)
    [refused] = done
    with pytest.raises(openai.RateLimitError) as caught:
        await refused
    assert caught.value.code == "too_many_transfers"
    assert await asyncio.gather(*waiting) == [[]] * LISTS_MAX


async def test_a_download_is_resumed_where_it_broke_off(batch_mesh, api):
    data = bytes(range(256)) * (4 * 4096)  # 4 MiB: more than sockets hold
    made = await api.files.create(file=data, purpose="batch")
    url = f"{batch_mesh.urls['us']}/v1/files/{made.id}/content"
    headers = {"authorization": f"Bearer {api.api_key}"}
    async with client() as session:
        async with session.get(url, headers=headers) as answer:
            etag = answer.headers["etag"]
            assert (answer.headers["accept-ranges"], answer.content_length) == ("bytes", len(data))
            got = await answer.content.readexactly(1_000_001)
            answer.close()
        for start, end in ((len(got), 2_000_000), (2_000_001, len(data) - 1)):
            more = {"range": f"bytes={start}-{end}", "if-range": etag}
            async with session.get(url, headers=headers | more) as answer:
                assert answer.status == 206
                assert answer.headers["content-range"] == f"bytes {start}-{end}/{len(data)}"
                got += await answer.read()
        assert got == data
        for more, status, size in (
            ({"range": "bytes=-5"}, 206, 5),
            ({"range": "bytes=0-", "if-range": '"another"'}, 200, len(data)),
            ({"range": "bytes=5-1"}, 200, len(data)),
        ):
            async with session.get(url, headers=headers | more) as answer:
                assert (answer.status, len(await answer.read())) == (status, size)
        more = {"range": f"bytes={len(data)}-"}
        async with session.get(url, headers=headers | more) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (416, "range_not_satisfiable")
            assert answer.headers["content-range"] == f"bytes */{len(data)}"
        async with session.head(url, headers=headers | {"range": "bytes=0-1"}) as answer:
            assert (answer.status, answer.content_length) == (200, len(data))
            assert answer.headers["etag"] == etag and await answer.read() == b""


async def test_a_download_that_its_client_drags_out_is_cut(batch_mesh, api, monkeypatch):
    monkeypatch.setattr("mesh.http.files_api.DOWNLOAD_S_MAX", 1.0)
    data = bytes(10 * MEBIBYTE)  # more than sockets hold
    made = await api.files.create(file=data, purpose="batch")
    url = yarl.URL(batch_mesh.urls["us"])
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    sock.connect((url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=16 * 1024)
    key = f"authorization: Bearer {api.api_key}\r\n"
    path = f"/v1/files/{made.id}/content"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\n{key}\r\n".encode())
    try:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        # Each piece comes sooner than a client that takes nothing would be cut.
        while batch_mesh.sample("us", "mesh_downloads_open"):
            await reader.read(1024)
            await asyncio.sleep(0.02)
        assert batch_mesh.sample("us", "mesh_file_sent_bytes_total") < len(data)
    finally:
        writer.close()


async def test_an_empty_file_is_a_file(api):
    made = await api.files.create(file=("empty.jsonl", b""), purpose="batch")
    assert made.bytes == 0
    assert (await api.files.content(made.id)).content == b""


async def test_uploads_and_downloads_are_counted(batch_mesh, api):
    made = await api.files.create(file=LINES, purpose="batch")
    await api.files.content(made.id)
    for route in ("createFile", "downloadFile"):
        labels = {"route": route, "code": "ok"}
        assert batch_mesh.sample("us", "mesh_batch_requests_total", **labels) == 1
    assert batch_mesh.sample("us", "mesh_file_sent_bytes_total") == len(LINES)
