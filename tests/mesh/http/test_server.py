"""Limits on connections, on the loop of tests and on that of live routers.

The rest of the server is seen in tests/mesh/runtime/test_front_door.py.
"""

import asyncio
import socket

import pytest
import uvloop

from mesh.http.http_request import Answer, HttpRequest
from mesh.http.server import REFUSALS, ConnectionLimit, HttpServer, HttpTimes
from tests.support.raw_http import connections
from tests.support.until import PATIENCE_S

ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def handle(request: HttpRequest) -> Answer:
    if request.refused is not None:
        return Answer(request.refused.fault.value.status, {})
    while await request.body.next():
        pass
    return Answer(200, {}, b"served")


async def answers(most: int, probes: int, count: int) -> list[bytes]:
    """What so many connections that come to a port with that many places are answered."""
    places = ConnectionLimit(most, probes=probes)
    server, url = await serve(handle, connections=places)
    try:
        async with asyncio.timeout(PATIENCE_S), connections(url, count) as pairs:
            for _, writer in pairs:
                writer.write(ASK)
            got = await asyncio.gather(*(reader.read(20) for reader, _ in pairs))
        while places.open:
            await asyncio.sleep(0.005)
        return got
    finally:
        await server.close(0.1)


@each_loop
def test_who_finds_no_place_reads_why(run):
    got = run(answers(2, 1, 6))
    assert [text[:12] for text in got] == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 4


@each_loop
def test_a_flood_is_answered_as_far_as_there_is_room_for_answers(run):
    got = run(answers(1, 0, 1 + 2 * REFUSALS))
    said = [text for text in got[1:] if text]
    assert all(text.startswith(b"HTTP/1.1 503") for text in said)
    assert len(said) >= REFUSALS  # more, where some had left already


async def serve(handler, **options):
    """A server on a free port, and its address."""
    server = HttpServer(handler, region="us", **options)
    await server.listen("127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.port}"


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
LARGE_HEADERS = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 4000) for number in range(12))


async def answers_in_turn(pieces: list[bytes], until: int) -> bytes:
    """What comes back for bytes that are sent with a moment between them.

    Either all, where the server closes the connection, or so many bodies of `handle`.
    """
    server, url = await serve(handle)
    try:
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(reader, writer)]:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            got = b""
            while got.count(b"served") < until and (more := await reader.read(65536)):
                got += more
            return got
    finally:
        await server.close(0.1)


@each_loop
@pytest.mark.parametrize("more", [b"\r\n", b""], ids=["whole", "unfinished"])
@pytest.mark.parametrize("pieces", [1, 5])
def test_a_head_that_is_too_long_as_a_whole_is_refused(run, more, pieces):
    head = HEAD + LARGE_HEADERS + more
    size = -(-len(head) // pieces)
    got = run(answers_in_turn([head[at : at + size] for at in range(0, len(head), size)], 1))
    assert b" 431 " in got.partition(b"\r\n")[0], got


@each_loop
def test_a_head_behind_another_request_is_not_longer_either(run):
    got = run(answers_in_turn([HEAD + b"\r\n" + HEAD + LARGE_HEADERS + b"\r\n"], 2))
    assert (got.count(b"HTTP/1.1 200"), got.count(b" 431 ")) == (1, 1)


@each_loop
def test_large_bodies_are_no_heads(run):
    ask = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    body = b"x" * 50_000
    got = run(answers_in_turn([ask, body, body + HEAD, b"\r\n"], 2))
    assert (got.count(b"HTTP/1.1 200"), got.count(b"served")) == (2, 2)


@each_loop
def test_requests_that_are_sent_early_are_all_answered(run):
    got = run(answers_in_turn([(HEAD + b"\r\n") * 50], 50))
    assert got.count(b"HTTP/1.1 200") == 50


@each_loop
def test_requests_that_are_sent_early_are_not_all_kept(run):
    assert run(kept_of_a_pipeline()) < 512 * 1024


async def kept_of_a_pipeline() -> int:
    """Bytes of 30 MB of early requests that a server takes while a first one is answered."""
    gate, arrived = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> Answer:
        arrived.set()
        await gate.wait()
        return Answer(200, {}, b"served")

    server, url = await serve(slow)
    head = HEAD + LARGE_HEADERS[:28_000].rpartition(b"x-")[0] + b"\r\n"
    try:
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(_, writer)]:
            writer.write(head)
            await arrived.wait()
            [client] = server.clients
            for _ in range(1000):
                writer.write(head)
            while client._is_reading and len(client._held) < 30 * len(head):
                await asyncio.sleep(0.01)
            kept = len(client._held)
            gate.set()
            return kept
    finally:
        await server.close(0.1)


@each_loop
def test_who_is_answered_while_a_next_head_becomes_too_long_is_answered_and_let_go(run):
    got = run(answered_before_a_long_head())
    assert (got.count(b"HTTP/1.1 200"), got.count(b"HTTP/1.1 431"), got.count(b"HTTP/")) == (
        1,
        1,
        2,
    )


async def answered_before_a_long_head() -> bytes:
    """All that comes back on a connection where the second head, early, has no end."""
    gate, arrived = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> Answer:
        arrived.set()
        await gate.wait()
        return Answer(200, {}, b"served")

    server, url = await serve(slow)
    try:
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(reader, writer)]:
            writer.write(HEAD + b"\r\n")
            await arrived.wait()
            [client] = server.clients
            writer.write(HEAD + LARGE_HEADERS)
            while client._is_reading:
                await asyncio.sleep(0.005)
            gate.set()
            return await reader.read()
    finally:
        await server.close(0.1)


@each_loop
@pytest.mark.parametrize("at_once", [HEAD, b""], ids=["some", "none"])
def test_headers_that_are_there_at_once_and_never_end_are_given_up(run, at_once):
    assert run(said_of_headers_that_never_end(at_once))[:12] == (at_once and b"HTTP/1.1 408")


async def said_of_headers_that_never_end(at_once: bytes) -> bytes:
    """All that comes back for bytes that are there before the connection is accepted."""
    server, url = await serve(handle, times=HttpTimes(headers_s=0.2, idle_s=600.0))
    try:
        host, port = url.removeprefix("http://").split(":")
        early = socket.create_connection((host, int(port)))  # the kernel's answer; no loop has run
        early.sendall(at_once)
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(sock=early)
            try:
                return await reader.read()
            finally:
                writer.transport.abort()
    finally:
        await server.close(0.1)


@each_loop
def test_a_connection_is_counted_as_refused_where_it_is(run):
    assert run(refusals_counted()) == (["connections"], ["connections"] * 2)


async def refusals_counted() -> tuple[list[str], list[str]]:
    """After a probe that is served and a request for work that is not; after one beyond both."""
    why: list[str] = []
    places = ConnectionLimit(1, probes=2)
    server, url = await serve(handle, connections=places, probes=["/health"], count=why.append)
    try:
        async with asyncio.timeout(PATIENCE_S), connections(url, 1):
            while not places.open:
                await asyncio.sleep(0.005)
            for ask in (HEAD + b"\r\n", ASK):
                async with connections(url, 1) as [(reader, writer)]:
                    writer.write(ask)
                    await reader.read()
                while places.open > 1:
                    await asyncio.sleep(0.005)
            before = list(why)
            async with connections(url, 2):
                while places.open < 3:
                    await asyncio.sleep(0.005)
                async with connections(url, 1) as [(reader, _)]:
                    assert await reader.read(20)
            return before, why
    finally:
        await server.close(0.1)


class Reads(asyncio.Transport):
    """The end of a connection whose client reads so many bytes between two looks."""

    def __init__(self, unread: int, by_look: int) -> None:
        super().__init__()
        self.unread, self.by_look = unread, by_look
        self.looks, self.over = 0, asyncio.Event()

    def write(self, data: bytes) -> None:
        """All of it is unread."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is written at once."""

    def get_write_buffer_size(self) -> int:
        self.looks += 1
        self.unread = max(0, self.unread - self.by_look)
        return self.unread

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """What is unread is still on its way."""

    def abort(self) -> None:
        self.over.set()


@pytest.mark.parametrize(("by_look", "looks"), [(0, 2), (1000, 2), (50_000, 20)])
@pytest.mark.parametrize("last", [b"connection: close\r\n", b""])
async def test_an_answer_is_cut_when_its_client_reads_no_more_and_no_sooner(by_look, looks, last):
    times = HttpTimes(headers_s=0.02, idle_s=0.02)
    server, _ = await serve(handle, times=times)
    transport, client = Reads(1_000_000, by_look), server()
    client.connection_made(transport)
    client.data_received(HEAD + last + b"\r\n")
    client.pause_writing()
    async with asyncio.timeout(PATIENCE_S):
        await transport.over.wait()
    assert looks <= transport.looks <= looks + 3
    client.connection_lost(None)
    await server.close(0.1)


# A server that is about to end.

LAST = b"\r\nconnection: close\r\n"


async def retired(opened: int, backlog: int, within_s: float = 20.0) -> list[bytes]:
    """What connections of a server that retires are answered: those open, those not accepted."""
    server, url = await serve(handle)
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(PATIENCE_S), connections(url, opened) as pairs:
        while len(server.clients) < opened:
            await asyncio.sleep(0.005)
        # The kernel's answers; the loop has not run.
        early = [socket.create_connection((host, int(port))) for _ in range(backlog)]
        retiring = asyncio.create_task(server.retire(within_s))
        while server._listeners is not None:
            await asyncio.sleep(0)
        pairs += [await asyncio.open_connection(sock=one) for one in early]
        for _, writer in pairs:
            writer.write(HEAD + b"\r\n")
        got = await asyncio.gather(*(reader.read() for reader, _ in pairs))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        for _, writer in pairs:
            writer.transport.abort()
        await retiring
    await server.close(0.1)
    return got


@each_loop
def test_a_server_that_retires_answers_each_connection_once_more(run):
    got = run(retired(3, 5))
    assert [(one[:12], one[-6:], LAST in one.lower()) for one in got] == 8 * [
        (b"HTTP/1.1 200", b"served", True)
    ]


@each_loop
def test_who_brings_nothing_is_let_go(run):
    async def go() -> bytes:
        server, url = await serve(handle)
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(reader, _)]:
            while not server.clients:
                await asyncio.sleep(0.005)
            await server.retire(0.05)
            got = await reader.read()
        await server.close(0.1)
        return got

    assert run(go()) == b""


@each_loop
def test_of_requests_that_are_sent_early_the_first_is_answered_whole(run):
    """The others, which no answer promises, must not make the kernel drop it."""

    async def go() -> bytes:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def slow(request: HttpRequest) -> Answer:
            arrived.set()
            await gate.wait()
            return Answer(200, {}, b"x" * 200_000 + b"served")

        server, url = await serve(slow)
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(reader, writer)]:
            writer.write((HEAD + b"\r\n") * 3)
            await arrived.wait()
            retiring = asyncio.create_task(server.retire(20.0))
            while server._listeners is not None:
                await asyncio.sleep(0)
            gate.set()
            writer.write((HEAD + b"\r\n") * 300)
            got = await reader.read()
            writer.transport.abort()
            await retiring
        await server.close(0.1)
        return got

    got = run(go())
    assert (got.count(b"HTTP/1.1 200"), got[-6:], LAST in got.lower()) == (1, b"served", True)


@each_loop
def test_an_answer_that_promised_to_go_on_is_followed_by_the_next(run):
    async def go() -> bytes:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def slow(request: HttpRequest) -> Answer:
            answer = Answer(200, {}, b"served")
            if not arrived.is_set():
                request.begin(answer)
                arrived.set()
                await gate.wait()
            return answer

        server, url = await serve(slow)
        async with asyncio.timeout(PATIENCE_S), connections(url, 1) as [(reader, writer)]:
            writer.write((HEAD + b"\r\n") * 2)
            await arrived.wait()
            await server.retire(0.05)
            gate.set()
            got = await reader.read()
        await server.close(0.1)
        return got

    got = run(go())
    assert (got.count(b"served"), got.lower().count(LAST)) == (2, 1)
