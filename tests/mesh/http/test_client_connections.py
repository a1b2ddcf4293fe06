"""Connections of the clients' port: bodies that are refused or left, clients that read nothing.

What is answered to which bytes is in test_inputs.py.
"""

import asyncio
import contextlib

import orjson
import pytest
import pytest_asyncio
import uvloop

from mesh.http.server import HttpTimes
from schemas.http import CHAT
from tests.support.nats_server import running_nats_server
from tests.support.raw_http import connections
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, one_region, set_all, small_mesh
from tests.support.until import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def chunked(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers, "", "")
    return "\r\n".join(lines).encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


HELLO = orjson.dumps(chat("hello"))


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


async def test_a_body_without_room_is_refused_before_it_has_come(one, monkeypatch):
    monkeypatch.setattr(one.routers["us"].requests.bodies, "_limit_bytes", 1000)
    body = b"x" * 100_000
    async with connections(one.urls["us"], 1) as [(reader, writer)], asyncio.timeout(PATIENCE_S):
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


async def test_requests_of_all_kinds_on_the_loop_of_the_command(tmp_path):
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
            get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
                for stream in (False, True):
                    body = orjson.dumps(chat("hello", stream=stream))
                    writer.write(asked(body) + get + chunked(body) + asked(body))
                    first, health, *others = [await answer(reader) for _ in range(4)]
                    assert health[2] == b"ok\n"
                    assert {other[2] for other in others} == {first[2]}
                    assert first[0] == "HTTP/1.1 200 OK"
            await mesh.until(lambda: not mesh.routers["us"].requests.open_requests, "the end")

    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
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
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        writer.write(bad * 100)
                        await writer.drain()
                        if not mesh.sample("us", "mesh_http_connections"):
                            break
            await mesh.until(lambda: not mesh.sample("us", "mesh_http_connections"), "it to go")
