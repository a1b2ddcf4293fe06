"""A request for work is answered alike, whether its connection serves it or aiohttp does."""

import asyncio
import contextlib

import orjson
import pytest
import pytest_asyncio
import uvloop

from mesh.adapters.http_server import HttpTimes
from schemas.http import CHAT
from tests.support.nats_server import running_nats_server
from tests.support.raw_http import connections
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, one_region, set_all, small_mesh

pytestmark = [pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]
CHANGES = {"date", "x-request-id"}


def asked(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def chunked(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers, "", "")
    return "\r\n".join(lines).encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def with_slash(body: bytes, *headers: str) -> bytes:
    return asked(body, *headers, path=CHAT + "/")


def twice(body: bytes, *headers: str) -> bytes:
    """With a header in two lines that means nothing to the router."""
    return asked(body, *headers, "x-any: 1", "x-any: 2")


def upgrading(body: bytes, *headers: str) -> bytes:
    """As Java's client asks at first."""
    return asked(body, *headers, "connection: upgrade", "upgrade: h2c")


BY_AIOHTTP = {"chunked": chunked, "slash": with_slash, "twice": twice, "upgrade": upgrading}
HELLO = orjson.dumps(chat("hello"))
REQUESTS = {
    "plain": (HELLO,),
    "stream": (orjson.dumps(chat("hello", stream=True)),),
    "large": (orjson.dumps(chat("hello " * 10_000)),),
    "receipt": (HELLO, "x-mesh-debug: 1"),
    "options": (HELLO, "x-mesh-priority: high", "X-Mesh-Session: s", "x-mesh-slo-ttft-ms: 60000"),
    "own id": (HELLO, "x-request-id: mine"),
    "no JSON": (b"{",),
    "no object": (b"[1]",),
    "no model": (b'{"messages":[]}',),
    "unknown model": (HELLO.replace(b'"tiny"', b'"tin"'),),
    "stream is no flag": (orjson.dumps(chat("hello") | {"stream": 1}),),
    "priority": (HELLO, "x-mesh-priority: now"),
    "timeout": (HELLO, "x-mesh-timeout-s: none"),
    "residency": (HELLO, "x-mesh-residency: nowhere"),
    "misspelt": (HELLO, "x-mesh-residancy: eu"),
    "origin": (HELLO, "origin: https://example.org"),
    "bytes": (HELLO, "x-any: \xe9"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def of_all_tests(tmp_path_factory):
    async with (
        running_nats_server(tmp_path_factory.mktemp("nats")) as server,
        one_region(server) as mesh,
    ):
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def one(of_all_tests):
    """One for all tests, with engines that answer whole."""
    set_all(of_all_tests, say("hello"))
    await of_all_tests.until_ready("us", 2)
    return of_all_tests


async def answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """One answer: its status line, its headers, its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(headers) == len(lines)
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    assert headers["transfer-encoding"] == "chunked"
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return status, headers, body


def comparable(got: tuple[str, dict[str, str], bytes]) -> tuple[object, ...]:
    """Without what differs from one request to the next."""
    status, headers, body = got[0], dict(got[1]), got[2]
    if "x-mesh-decision" in headers:
        headers["x-mesh-decision"] = " ".join(sorted(orjson.loads(headers["x-mesh-decision"])))
    return status, {n: v for n, v in headers.items() if n not in CHANGES}, body


@pytest.mark.parametrize("name", REQUESTS)
async def test_status_headers_and_body_are_the_same(one, name):
    body, *headers = REQUESTS[name]
    set_all(one, say("a ", "b ", "c"))
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        writer.write(asked(body, *headers))
        wanted = await answer(reader)
        if name == "own id":
            assert wanted[1]["x-request-id"] == "mine"
        for unusual in BY_AIOHTTP.values():  # and back, on the same connection
            writer.write(unusual(body, *headers))
            got = await answer(reader)
            assert got[1].keys() == wanted[1].keys()
            assert comparable(got) == comparable(wanted)
            writer.write(asked(body, *headers))
            assert comparable(await answer(reader)) == comparable(wanted)
    assert one.routers["us"].requests.open_requests == 0
    assert one.routers["us"].requests.bodies.taken_bytes == 0


async def test_requests_of_both_kinds_are_answered_in_their_order_on_one_connection(one):
    set_all(one, say("fine"))
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    mixed = [asked(HELLO), get, chunked(HELLO), asked(HELLO), get, get, with_slash(HELLO)]
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        for _ in range(3):
            writer.write(b"".join(mixed))
            got = [await answer(reader) for _ in mixed]
            assert [body == b"ok\n" for _, _, body in got] == [one == get for one in mixed]
            assert all(status.startswith("HTTP/1.1 200") for status, _, _ in got)


@pytest.mark.parametrize("size", [1, 7, 60])
async def test_a_request_may_come_in_pieces_of_any_size(one, size):
    set_all(one, say("fine"))
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    sent = asked(HELLO) + b"\r\n" + asked(HELLO, "x-any: 1") + get
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0)
        statuses = [(await answer(reader))[0] for _ in range(3)]
    assert statuses == ["HTTP/1.1 200 OK"] * 3
    assert one.routers["us"].requests.bodies.taken_bytes == 0


SMUGGLED = {
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "length and chunked": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "list of lengths": b"content-length: 5, 5\r\n\r\nhello",
    "signed length": b"content-length: +5\r\n\r\nhello",
    "endless length": b"content-length: " + b"0" * 5000 + b"5\r\n\r\nhello",
    "huge length": b"content-length: 99999999999999999999999\r\n\r\nhello",
    "bare line feed": b"x-a: b\ncontent-length: 5\r\n\r\nhello",
    "bare return": b"x-a: b\rc\r\ncontent-length: 5\r\n\r\nhello",
    "folded line": b"x-a: b\r\n c\r\ncontent-length: 5\r\n\r\nhello",
    "space before colon": b"content-length : 5\r\n\r\nhello",
    "no host": b"",
    "no name": b": a\r\ncontent-length: 5\r\n\r\nhello",
    "NUL": b"x-a: \0\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", SMUGGLED)
async def test_what_two_servers_may_read_in_two_ways_is_refused_and_closed(one, name):
    head = f"POST {CHAT} HTTP/1.1\r\n".encode() + (b"host: x\r\n" if SMUGGLED[name] else b"\r\n")
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        writer.write(head + SMUGGLED[name] + asked(HELLO))
        got = await reader.read()
    assert got.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), got
    assert got.count(b"HTTP/1.") == 1


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("before", [b"", asked(HELLO)])
@pytest.mark.parametrize("sent", [PREFACE, PREFACE.replace(b"*", b"/")])
async def test_a_client_that_speaks_http_2_is_told_so_and_let_go(one, before, sent):
    set_all(one, say("fine"))
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        writer.write(before + sent)
        got = await reader.read()
    assert got.count(b"HTTP/1.1 200 OK") == bool(before)
    assert got.count(b"HTTP/1.") == 1 + bool(before)


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"5\nhello", b"-1\r\n", b"3\r\nhello\r\n"])
async def test_a_broken_chunk_beside_its_head_is_refused_at_once(one, chunk):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        writer.write(head + chunk)
        got = await reader.read()
    assert got.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")), got
    assert got.count(b"HTTP/1.") == 1


async def test_the_last_request_of_a_connection_is_answered_and_closed(one):
    set_all(one, say("fine"))
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        writer.write(asked(HELLO, "connection: close") + asked(HELLO))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == ("HTTP/1.1 200 OK", "close")
        assert await reader.read() == b""


async def test_a_body_without_room_is_refused_before_it_has_come(one, monkeypatch):
    monkeypatch.setattr(one.routers["us"].requests.bodies, "_limit_bytes", 1000)
    body = b"x" * 100_000
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(60):
        sent = asked(body)
        writer.write(sent[:50_000])
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == ("HTTP/1.1 429 Too Many Requests", "close")
        writer.write(sent[50_000:])
        assert await reader.read() == b""
    assert one.routers["us"].requests.bodies.taken_bytes == 0


async def test_a_client_that_hangs_up_inside_a_body_costs_nothing_more(one):
    async with connections(one.urls["us"], 1) as [(_, writer)]:
        writer.write(asked(b"x" * 100_000)[:50_000])
        bodies = one.routers["us"].requests.bodies
        await one.until(lambda: bodies.taken_bytes > 0, "a part of it")
        writer.transport.abort()
        await one.until(lambda: bodies.taken_bytes == 0, "its room to be free")


async def test_both_ways_on_the_loop_of_the_command(tmp_path):
    """Answers of both kinds, one after the other, and a stream that is left."""

    async def go() -> None:
        async with (
            running_nats_server(tmp_path) as server,
            scripted_engine() as engine,
            small_mesh({"us": server}) as mesh,
        ):
            await mesh.router("us", **PATIENT)
            await mesh.agent("us", "us-0", engine)
            await mesh.until_ready("us", 1)
            engine.behaviour = say("a ", "b ")
            async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
                for stream in (False, True):
                    body = orjson.dumps(chat("hello", stream=stream))
                    writer.write(asked(body) + b"".join(way(body) for way in BY_AIOHTTP.values()))
                    wanted = comparable(await answer(reader))
                    for _ in BY_AIOHTTP:
                        assert comparable(await answer(reader)) == wanted
            await mesh.until(lambda: not mesh.routers["us"].requests.open_requests, "the end")

    async def limited() -> None:
        async with asyncio.timeout(60):
            await go()

    await asyncio.to_thread(lambda: uvloop.run(limited()))


@pytest.mark.parametrize("last", ["", "connection: close"])
async def test_a_client_that_reads_no_errors_is_read_no_further_and_let_go(nats_server, last):
    """Errors cost a client nothing; what it does not read must not fill the router."""
    async with small_mesh({"us": nats_server}) as mesh:
        times = HttpTimes(headers_s=0.5, idle_s=0.5)
        await mesh.router("us", **PATIENT, http_times=times)
        async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
            reader._transport.pause_reading()
            bad = asked(b"{" + b" " * 200, *([last] if last else []))
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(30):
                    while True:
                        writer.write(bad * 100)
                        await writer.drain()
                        if not mesh.sample("us", "mesh_http_connections"):
                            break
            await mesh.until(lambda: not mesh.sample("us", "mesh_http_connections"), "it to go")
