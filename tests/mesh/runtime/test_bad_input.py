"""What a client can do wrong: each gets a clear error in OpenAI's shape, and nothing is lost.

Status, code and parameter of every kind of mistake are in tests/mesh/http/test_inputs.py.
"""

import asyncio
import gzip
import zlib

import orjson
import pytest
import pytest_asyncio

from tests.support.nats_server import running_nats_server
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh, upload
from tests.support.until import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def of_all_tests(tmp_path_factory):
    async with (
        running_nats_server(tmp_path_factory.mktemp("nats")) as server,
        scripted_engine() as engine,
        small_mesh({"us": server}) as mesh,
    ):
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", engine)
        mesh.engine = engine
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(of_all_tests):
    """One for all tests: what one does wrong costs the next nothing."""
    of_all_tests.engine.seen.clear()
    await of_all_tests.until_ready("us", 1)
    return of_all_tests


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

BAD = [
    (CHAT, b'"text"', 400, "must be a JSON object"),
    (CHAT, b'{"model":"","messages":[]}', 400, "model"),
    (CHAT, b'{"model":"tiny","messages":[]}', 400, "messages"),
    (CHAT, b'{"model":"tiny","messages":"hi"}', 400, "messages"),
    (CHAT, b'{"model":"tiny","messages":["hi"]}', 400, "messages[0]"),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":5}]}', 400, "content"),
    (CHAT, orjson.dumps(chat() | {"stream": 1}), 400, "stream"),
    (CHAT, orjson.dumps(chat() | {"model": "nope"}), 404, "known: tiny"),
    (COMPLETIONS, b'{"model":"tiny"}', 400, "prompt"),
    (COMPLETIONS, b'{"model":"tiny","prompt":[]}', 400, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), BAD, ids=range(len(BAD)))
async def test_a_bad_body_is_answered_with_what_to_change(mesh, path, body, status, says):
    async with (
        client() as session,
        session.post(mesh.urls["us"] + path, data=upload(body)) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == status
        assert says in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    assert mesh.engine.seen == []


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf", "99999"])
async def test_a_bad_timeout_header_is_named(mesh, value):
    url = mesh.urls["us"] + CHAT
    async with (
        client() as session,
        session.post(url, json=chat(), headers={"x-mesh-timeout-s": value}) as answer,
    ):
        assert answer.status == 400
        assert "x-mesh-timeout-s" in (await answer.json())["error"]["message"]


async def test_a_debug_header_that_says_nothing_is_no_silent_wish(mesh):
    url = mesh.urls["us"] + CHAT
    async with client() as session:
        async with session.post(url, json=chat(), headers={"x-mesh-debug": "yes"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "x-mesh-debug"
        async with session.post(url, json=chat(), headers={"x-mesh-debug": "0"}) as answer:
            assert answer.status == 200
            assert "x-mesh-decision" not in answer.headers


async def raw(mesh, data: bytes) -> bytes:
    host, port = mesh.urls["us"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(65536)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-a: {'a' * 40_000}\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\n"
        "content-length: 4\r\n\r\nabcd".encode(),
    ],
    ids=["no HTTP", "too long a head", "no gzip"],
)
async def test_who_is_refused_before_a_request_is_known_is_told_by_whom(mesh, caplog, data):
    answer = await raw(mesh, data)
    assert b"x-request-id: " in answer and b"x-mesh-region: us" in answer
    assert not caplog.records


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate", "GZip"])
async def test_a_body_that_is_encoded_as_we_take_it_reaches_the_engine_plain(mesh, encoding):
    codec = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding.lower()]
    data, headers = codec(orjson.dumps(chat())), {"content-encoding": encoding}
    async with (
        client() as session,
        session.post(mesh.urls["us"] + CHAT, data=upload(data), headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.read()
    assert mesh.engine.seen == [chat()]


@pytest.mark.parametrize("upto", [0, 10, 60, 100])
async def test_a_client_that_hangs_up_inside_its_request_leaves_nothing(mesh, upto):
    body = orjson.dumps(chat("x" * 200))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    host, port = mesh.urls["us"].removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, port)
    writer.write((head + body)[:upto])
    await writer.drain()
    writer.transport.abort()
    async with client() as session, session.post(mesh.urls["us"] + CHAT, json=chat()) as answer:
        assert answer.status == 200
    router = mesh.routers["us"]
    await mesh.until(lambda: router.requests.open_requests == 0, "no request to be open")
    assert len(mesh.engine.seen) == 1


async def test_a_strange_request_id_is_replaced(mesh):
    headers = {"x-request-id": "spaces are not kept"}
    url = mesh.urls["us"] + CHAT
    async with client() as session, session.post(url, json=chat(), headers=headers) as answer:
        assert answer.headers["x-request-id"] != headers["x-request-id"]


async def test_a_body_as_large_as_allowed_travels_in_parts(mesh, monkeypatch):
    # The router's signs of life wait behind the parts, however slow their way is.
    monkeypatch.setattr("agents.core.routers.SILENCE_S", 600.0)
    text = "long " * (2 * 1024 * 1024)  # 10 MiB; the server of this test carries 1 MiB
    url = mesh.urls["us"] + CHAT
    async with client() as session, session.post(url, data=upload(chat(text))) as answer:
        assert answer.status == 200, await answer.read()
    assert mesh.engine.seen == [chat(text)]


async def test_completions_take_text_and_token_ids(mesh):
    url = mesh.urls["us"] + COMPLETIONS
    async with client() as session:
        for prompt in ("hello", [1, 2, 3]):
            async with session.post(url, json={"model": "tiny", "prompt": prompt}) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
async def test_where_no_model_is_served_a_client_is_told_to_try_again(nats_server, path):
    """And not handed an empty list, which a client takes for all that there will be."""
    async with small_mesh({"us": nats_server}) as mesh, client() as session:
        url = await mesh.router("us")
        async with session.get(url + path) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "no_replica")
            assert error["message"] == "no replica of any region is ready"


async def test_a_router_without_replicas_is_alive_and_not_ready(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", hold_s_max=0.2)
        async with client() as session:
            async with session.get(mesh.urls["us"] + "/health") as answer:
                assert answer.status == 200
            async with session.get(mesh.urls["us"] + "/ready") as answer:
                assert answer.status == 503
            async with session.post(mesh.urls["us"] + CHAT, json=chat()) as answer:
                assert answer.status == 503
                assert answer.headers["retry-after"]


async def test_more_bytes_than_the_router_keeps_are_shed_and_given_back(mesh, monkeypatch):
    bodies = mesh.routers["us"].requests.bodies
    monkeypatch.setattr(bodies, "_limit_bytes", 1000)
    url = mesh.urls["us"] + CHAT
    async with client() as session:
        async with session.post(url, json=chat("x" * 2000)) as answer:
            assert answer.status == 429
            assert answer.headers["retry-after"]
        for body in (chat(), b"not json", chat() | {"model": "nope"}, chat()):
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            async with session.post(url, data=data) as answer:
                assert answer.status in (200, 400, 404)
    assert bodies.taken_bytes == 0
