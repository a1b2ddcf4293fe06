"""What a client can do wrong: each gets a clear error in OpenAI's shape, and nothing is lost."""

import asyncio
import gzip
import zlib

import aiohttp
import orjson
import pytest
import pytest_asyncio

from schemas.exchange import BODY_BYTES_MAX
from tests.support.nats_server import running_nats_server
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh, upload

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
    (CHAT, b"not json", 400, "not JSON"),
    (CHAT, b"", 400, "not JSON"),
    (CHAT, b"\xff\xfe", 400, "not JSON"),
    (CHAT, b"[1,2]", 400, "must be a JSON object"),
    (CHAT, b'"text"', 400, "must be a JSON object"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}]}', 400, "model"),
    (CHAT, b'{"model":7,"messages":[]}', 400, "model"),
    (CHAT, b'{"model":"","messages":[]}', 400, "model"),
    (CHAT, b'{"model":"tiny"}', 400, "messages"),
    (CHAT, b'{"model":"tiny","messages":[]}', 400, "messages"),
    (CHAT, b'{"model":"tiny","messages":"hi"}', 400, "messages"),
    (CHAT, b'{"model":"tiny","messages":["hi"]}', 400, "messages[0]"),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":5}]}', 400, "content"),
    (CHAT, orjson.dumps(chat() | {"stream": "yes"}), 400, "stream"),
    (CHAT, orjson.dumps(chat() | {"stream": 1}), 400, "stream"),
    (CHAT, orjson.dumps(chat() | {"model": "nope"}), 404, "known: tiny"),
    (COMPLETIONS, b'{"model":"tiny"}', 400, "prompt"),
    (COMPLETIONS, b'{"model":"tiny","prompt":[]}', 400, "prompt"),
    ("/v1/unheard-of", b"{}", 404, "no path"),
    (CHAT, b"x" * (BODY_BYTES_MAX + 1), 413, "more than"),
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


@pytest.mark.parametrize(("path", "allowed"), [(CHAT, "POST"), ("/v1/models/tiny", "GET, HEAD")])
async def test_a_wrong_method_is_told_the_right_one(mesh, path, allowed):
    async with client() as session, session.delete(mesh.urls["us"] + path) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, allowed)
        assert allowed in (await answer.json())["error"]["message"]


async def raw(mesh, data: bytes) -> bytes:
    host, port = mesh.urls["us"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read(65536)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "head",
    [
        b"x-a: " + b"a" * 40_000 + b"\r\n",
        b"".join(b"x-%d: 1\r\n" % n for n in range(500)),
    ],
    ids=["one long header", "many headers"],
)
async def test_a_header_bomb_is_refused_in_our_words(mesh, head):
    answer = await raw(mesh, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
    assert b" 431 " in answer.split(b"\r\n", 1)[0]
    assert b'"code":"headers_too_large"' in answer
    assert b"x-request-id: " in answer and b"x-mesh-region: us" in answer


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"]
)
async def test_bytes_that_are_no_http_get_a_400(mesh, data):
    answer = await raw(mesh, data)
    assert b" 400 " in answer.split(b"\r\n", 1)[0]
    assert b'"code":"invalid_request"' in answer
    assert b"x-request-id: " in answer and b"x-mesh-region: us" in answer


def encoded(encoding: str, body: bytes) -> bytes:
    head = f"content-encoding: {encoding}\r\ncontent-length: {len(body)}\r\n\r\n"
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}".encode() + body


@pytest.mark.parametrize(
    ("encoding", "body", "says"),
    [
        ("gzip", b"abcd", b"the body is not gzip, as its content-encoding says"),
        ("gzip", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, b"the body is not gzip"),
    ],
)
async def test_a_body_that_is_not_encoded_as_we_take_it_is_the_clients(
    mesh, caplog, encoding, body, says
):
    answer = await raw(mesh, encoded(encoding, body))
    assert b" 400 " in answer.split(b"\r\n", 1)[0]
    assert says in answer and b'"code":"invalid_request"' in answer
    assert b"x-request-id: " in answer and b"x-mesh-region: us" in answer
    assert not caplog.records
    assert mesh.routers["us"].requests.bodies.taken_bytes == 0


@pytest.mark.parametrize("name", ["br", "zstd", "zip", "gzip,br"])
async def test_an_encoding_that_is_not_taken_is_told_from_those_that_are(mesh, name):
    answer = await raw(mesh, encoded(name, b"abcd"))
    assert b" 415 " in answer.split(b"\r\n", 1)[0]
    assert b"may be gzip or deflate" in answer and b'"code":"unsupported_encoding"' in answer
    assert b"accept-encoding: gzip, deflate\r\n" in answer.lower()


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


@pytest.mark.parametrize(
    ("line", "more", "status"),
    [
        ("POST /v1/chat/completions", "x-mesh-debug: 7", 400),
        ("POST /v1/chat/completions", "x-mesh-residency: nowhere", 400),
        ("POST /nothing", "", 404),
        ("GET /health", "", 200),
    ],
)
async def test_who_is_answered_before_the_body_is_sent_gets_no_second_answer_there(
    mesh, line, more, status
):
    head = f"{line} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 500\r\n"
    answer = await raw(mesh, f"{head}{more}\r\n\r\n".replace("\r\n\r\n\r\n", "\r\n\r\n").encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close\r\n" in answer.lower()


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
    monkeypatch.setattr("agents.core.routers.SILENCE_S", 60.0)
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


async def test_probes(mesh):
    async with client() as session:
        for path in ("/health", "/ready"):
            async with session.get(mesh.urls["us"] + path) as answer:
                assert answer.status == 200
        async with session.get(mesh.urls["us"] + "/v1/models/tiny") as answer:
            assert (await answer.json())["id"] == "tiny"
        async with session.get(mesh.urls["us"] + "/v1/models/nope") as answer:
            assert answer.status == 404
        async with session.get(mesh.urls["us"] + "/metrics") as answer:
            page = await answer.text()
    assert 'mesh_replicas{state="ready"} 1.0' in page


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


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/realtime"])
async def test_a_websocket_is_refused_and_told_what_to_use(mesh, path):
    """By the status: Codex falls back to HTTP at once after 426, and ends after 400."""
    async with client() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(mesh.urls["us"] + path)
    assert refused.value.status == 426
    upgrade = {"upgrade": "websocket", "connection": "upgrade"}
    async with client() as session:
        async with session.get(mesh.urls["us"] + path, headers=upgrade) as answer:
            error = (await answer.json())["error"]
        assert "websockets are not served here" in error["message"]
        assert error["code"] == "upgrade_required"
        assert answer.headers["upgrade"] == "HTTP/1.1"
        assert answer.headers["connection"].lower() == "upgrade"
        async with session.post(mesh.urls["us"] + CHAT, json=chat()) as answer:
            assert answer.status == 200
