"""Answers on their way to real sockets: whole, broken, unread, and left."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace

import aiohttp
import orjson
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from mesh.adapters.ended_requests import EndedRequests
from mesh.http import answer_writer
from mesh.http.read_request import BodyBudget
from mesh.http.routes import HttpApi
from mesh.http.server import HttpServer
from mesh.session.answer import PLAIN_BYTES_MAX, EngineError
from mesh.session.client_request import ClientRequest
from mesh.session.record import Failure
from schemas.http import CHAT, COMPLETIONS, H_REGION, MESSAGES, RESPONSES, Fault
from schemas.ids import RegionId, RouterId
from tests.mesh.adapters.build import EVENTS, JSON, LOST, Feeder, client_request
from tests.support.until import PATIENCE_S, until

SOCKET_BYTES = 16 * 1024  # what the kernel may hold for a reader that does not read
LARGE = b'{"a":"' + b"x" * 1_000_000 + b'"}'


BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
DIRECT, BY_HANDLER = "/v1/chat/completions", "/v1/chat/completions/"
both_ways = pytest.mark.parametrize("path", [DIRECT, BY_HANDLER], ids=["direct", "by a handler"])


class StubDoor:
    """A front door that answers every request with one record; `calls` keeps their order."""

    def __init__(self, held: ClientRequest, path: str = DIRECT, *, breaks: bool = False) -> None:
        """`breaks`: the answer fails as soon as it has begun."""
        self.client_request, self.path, self.breaks = held, path, breaks
        self.bodies = BodyBudget()
        self.ended = EndedRequests(RegionId("us"), RouterId("r1"), time.monotonic)
        self.calls: list[str] = []
        self.unsent: list[int] = []  # bytes still in this process when the answer was finished
        self.transport: asyncio.Transport | None = None
        self.port = 0

    def server(self) -> HttpServer:
        api = HttpApi(RegionId("us"), self, CollectorRegistry())
        return HttpServer(api.handle, completions=api.completions)

    def has_listened(self) -> bool:
        return True

    def admit(self, parsed, headers, caller, changed) -> ClientRequest:
        self.bodies.give_back(parsed.kept_bytes)
        self.transport = changed.__self__._transport
        self.client_request.changed = changed
        self.client_request.wants_decision = parsed.options.debug
        return self.client_request

    def started(self, held: ClientRequest) -> None:
        self.calls.append("started")
        if self.breaks:
            held.failure = LOST

    def passed(self, held: ClientRequest) -> None:
        if self.calls[-1] != "passed":
            self.calls.append("passed")

    def finished(self, held: ClientRequest) -> None:
        assert self.transport is not None
        self.unsent.append(self.transport.get_write_buffer_size())
        self.calls.append("finished")

    def failed(self, held: ClientRequest) -> None:
        self.calls.append("failed")

    def leave(self, held: ClientRequest) -> None:
        self.calls.append("leave")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    @property
    def asked(self) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\nx-request-id: q-1\r\n"
        return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY

    @property
    def is_over(self) -> bool:
        return self.calls[-1:] in (["finished"], ["failed"], ["leave"])


@contextlib.asynccontextmanager
async def serving(
    held: ClientRequest, path: str = DIRECT, *, breaks: bool = False
) -> AsyncIterator[StubDoor]:
    door = StubDoor(held, path, breaks=breaks)
    server = door.server()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    door.port = listener.getsockname()[1]
    await server.listen(listener=listener)
    try:
        yield door
    finally:
        await server.close(0.1)


class Reader:
    """A client that reads only when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def upto(self, ending: bytes) -> bytes:
        data = b""
        while not data.endswith(ending):
            data += await self._reader.read(SOCKET_BYTES)
        return data

    async def rest(self) -> bytes:
        return await self._reader.read()

    def hang_up(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def reading(door: StubDoor) -> AsyncIterator[Reader]:
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    plug.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", door.port))
    reader, writer = await asyncio.open_connection(sock=plug, limit=SOCKET_BYTES)
    writer.write(door.asked)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Reader(reader, writer)
    finally:
        writer.transport.abort()


class Writes(asyncio.Transport):
    """A client's end of a connection that tells one write from the next."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.made.append(bytes(data))

    def writelines(self, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        self.made.append(b"".join(chunks))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is written at once."""

    def get_write_buffer_size(self) -> int:
        return 0


def answered(content_type: str, *parts: bytes, status: int = 200) -> ClientRequest:
    """A ticket whose whole answer is here."""
    held = client_request()
    feeder = Feeder(held, content_type, status)
    for part in parts:
        feeder.data(part)
    feeder.end()
    return held


async def fetch(door: StubDoor) -> tuple[int, bytes, Mapping[str, str]]:
    headers = {"x-request-id": "q-1"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(door.url, data=BODY, headers=headers) as answer,
    ):
        return answer.status, await answer.read(), answer.headers


@both_ways
async def test_a_stream_costs_no_write_for_its_head_alone_nor_for_its_end(path):
    held = client_request()
    door, feeder, writes = StubDoor(held, path), Feeder(held, EVENTS), Writes()
    feeder.data(b"data: 1\n\n")
    protocol = door.server()()
    protocol.connection_made(writes)
    protocol.data_received(door.asked)
    await until(lambda: len(writes.made) == 1)
    feeder.data(b"data: 2\n\n")
    feeder.end(last=b"data: 3\n\n")
    await until(lambda: door.is_over)
    protocol.connection_lost(None)
    head, _, first = writes.made[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    event = b"9\r\ndata: %d\n\n\r\n"
    assert [first, *writes.made[1:]] == [event % 1, event % 2, event % 3 + b"0\r\n\r\n"]
    assert door.calls == ["started", "passed", "finished"]


@pytest.mark.parametrize("status", [200, 404])
@both_ways
async def test_a_plain_answer_goes_out_with_its_length(status, path):
    async with serving(answered(JSON, b'{"a":', b"1}", status=status), path) as door:
        got, body, headers = await fetch(door)
        await until(lambda: door.is_over)
    assert (got, body) == (status, b'{"a":1}')
    assert headers["Content-Length"] == "7"
    assert (headers["Content-Type"], headers[H_REGION]) == (JSON, "eu")
    assert headers["x-request-id"] == "q-1"
    assert door.calls == ["started", "finished"]


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n"])
@pytest.mark.parametrize("given_out", [True, False])
@both_ways
async def test_nothing_follows_the_last_event(done, given_out, path):
    """Whatever the core makes of an answer whose end was lost: also before [DONE] was written."""
    held = client_request()
    feeder = Feeder(held)
    feeder.data(b"data: 1\n\n")
    async with serving(held, path) as door, reading(door) as reader:
        await reader.upto(b"data: 1\n\n\r\n")
        if given_out:
            feeder.data(done)
            await reader.upto(done + b"\r\n")
            feeder.fail()
            assert await reader.exactly(5) == b"0\r\n\r\n"
        else:
            held.failure = LOST
            feeder.data(done)
            assert (await reader.upto(b"0\r\n\r\n")).endswith(done + b"\r\n0\r\n\r\n")
        await until(lambda: door.is_over)
    assert door.calls[-1] == "finished"


@both_ways
async def test_events_go_out_as_they_come(path):
    held = client_request()
    feeder = Feeder(held)
    feeder.data(b"data: 1\n\n")
    async with serving(held, path) as door, reading(door) as client:
        head = await client.head()
        assert b"cache-control: no-cache" in head.lower()
        assert b"x-accel-buffering: no" in head.lower()
        assert b"content-length" not in head.lower()
        assert await client.exactly(14) == b"9\r\ndata: 1\n\n\r\n"
        feeder.data(b"data: 2\n\n")
        assert await client.exactly(14) == b"9\r\ndata: 2\n\n\r\n"
        assert door.calls == ["started", "passed"]
        feeder.end()
        assert await client.exactly(5) == b"0\r\n\r\n"
        await until(lambda: door.is_over)
    assert door.calls == ["started", "passed", "finished"]


@both_ways
async def test_a_connection_serves_one_answer_after_another(path):
    async with (
        serving(answered(JSON, LARGE[:100_000]), path) as door,
        aiohttp.ClientSession() as session,
    ):
        for _ in range(3):
            door.client_request = answered(JSON, LARGE[:100_000])
            async with session.post(door.url, data=BODY) as answer:
                assert await answer.read() == LARGE[:100_000]
        assert session.connector is not None
        assert len(session.connector._conns) == 1
        await until(lambda: door.calls == ["started", "finished"] * 3)


# An answer is finished when its bytes have left, and not before.


async def unread_answer_is_unfinished(path: str, content_type: str, *parts: bytes) -> None:
    async with serving(answered(content_type, *parts), path) as door, reading(door) as client:
        await client.head()
        await until(lambda: door.transport is not None and door.transport.get_write_buffer_size())
        await round_trip(door)
        assert "finished" not in door.calls
        reading_on = asyncio.create_task(client.exactly(len(b"".join(parts))))
        await until(lambda: door.is_over)
        await reading_on
        assert door.calls[-1] == "finished"
        assert door.unsent == [0]


async def round_trip(door: StubDoor) -> None:
    """Over another connection: time enough for anything that does not wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(b"not http\r\n\r\n")
    assert b" 400 " in await reader.read()
    writer.transport.abort()


UNREAD = pytest.mark.parametrize(
    ("content_type", "parts"),
    [(JSON, [LARGE]), (EVENTS, [b"data: 1\n\n", b"data: " + LARGE + b"\n\n"])],
    ids=["plain", "events"],
)


@UNREAD
@both_ways
async def test_an_answer_that_is_not_read_is_not_finished(content_type, parts, path):
    await unread_answer_is_unfinished(path, content_type, *parts)


@UNREAD
@both_ways
def test_nor_is_it_on_the_loop_of_the_command(content_type, parts, path):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(unread_answer_is_unfinished(path, content_type, *parts))


@UNREAD
@both_ways
async def test_the_deadline_ends_a_client_that_does_not_read(
    content_type, parts, path, monkeypatch
):
    monkeypatch.setattr(answer_writer, "DEADLINE_GRACE_S", 0.1)
    held = answered(content_type, *parts)
    deadline = asyncio.get_running_loop().time()
    held.request = replace(held.request, deadline=deadline)
    async with serving(held, path) as door, reading(door) as client:
        await client.head()
        await until(lambda: door.is_over)
        assert door.calls[-1] == "leave"
        with contextlib.suppress(ConnectionError):
            assert len(await client.rest()) < len(LARGE)
    assert "finished" not in door.calls


@UNREAD
@both_ways
async def test_an_answer_that_ends_past_its_deadline_is_written_to_a_client_that_reads(
    content_type, parts, path
):
    """Its router was suspended."""
    held = answered(content_type, *parts)
    deadline = asyncio.get_running_loop().time() - 60.0
    held.request = replace(held.request, deadline=deadline)
    async with serving(held, path) as door, reading(door) as client:
        await client.head()
        await client.exactly(len(LARGE))
        await until(lambda: door.is_over)
    assert "finished" in door.calls


@UNREAD
@both_ways
async def test_a_client_that_hangs_up_has_no_finished_answer(content_type, parts, path):
    async with serving(answered(content_type, *parts), path) as door, reading(door) as client:
        await client.head()
        client.hang_up()
        await until(lambda: door.is_over)
    assert door.calls[-1] == "leave"
    assert "finished" not in door.calls


# Answers that break.


def failing(content_type: str, *parts: bytes) -> ClientRequest:
    held = client_request()
    feeder = Feeder(held, content_type)
    for part in parts:
        feeder.data(part)
    return held


def events(body: bytes) -> list[bytes]:
    return [event for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event]


@pytest.mark.parametrize(
    ("parts", "before"),
    [
        ([b"data: 1\n\n"], [b"data: 1"]),
        ([b"data: 1\r\n\r\n"], [b"data: 1"]),
        ([b"data: 1\n\ndata: half"], [b"data: 1"]),
        ([b"data: " + b"x" * 70_000], [b"data: " + b"x" * 70_000]),
        ([b"data: 1\n\ndata: " + b"x" * 70_000], [b"data: 1", b"data: " + b"x" * 70_000]),
    ],
    ids=["whole", "returns", "half event", "half long event", "half long second event"],
)
@both_ways
async def test_events_that_break_off_end_with_an_error_event_of_its_own(parts, before, path):
    async with serving(failing(EVENTS, *parts), path, breaks=True) as door:
        status, body, _ = await fetch(door)
        await until(lambda: door.is_over)
    *got, error = events(body)
    assert (status, got) == (200, before)
    assert orjson.loads(error.removeprefix(b"data: "))["error"] == {
        "message": LOST.message,
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    assert b"[DONE]" not in body
    assert door.calls == ["started", "passed", "failed"]


def numbered(number: int, text: str) -> bytes:
    return b"data: " + orjson.dumps({"sequence_number": number, "text": text}) + b"\n\n"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("size", [10, 5_000, 100_000])
async def test_a_responses_stream_that_breaks_after_a_long_event_goes_on_counting(is_first, size):
    held = client_request()
    held.path = RESPONSES
    feeder = Feeder(held)
    feeder.data(numbered(0, "begun") + numbered(1, "x" * size) * is_first)
    async with (
        serving(held) as door,
        aiohttp.ClientSession() as session,
        session.post(door.url, data=BODY) as answer,
    ):
        await answer.content.readuntil(b"\n\n")
        if not is_first:
            feeder.data(numbered(1, "x" * size))
        feeder.fail()
        error = events(await answer.read())[-1]
    assert orjson.loads(error.partition(b"data: ")[2])["sequence_number"] == 2


@both_ways
async def test_a_plain_answer_that_breaks_is_visibly_cut(path):
    async with serving(failing(JSON, LARGE, LARGE), path, breaks=True) as door:
        with pytest.raises(aiohttp.ClientError):
            await fetch(door)
        await until(lambda: door.is_over)
    assert door.calls[-1] == "failed"
    assert "finished" not in door.calls


@both_ways
async def test_an_answer_that_breaks_while_nobody_reads_still_ends_with_its_error(path):
    held = client_request()
    feeder = Feeder(held)
    feeder.data(b"data: " + b"x" * 1_000_000 + b"\n\n")
    async with serving(held, path) as door, reading(door) as client:
        await client.head()
        await until(lambda: door.transport is not None and door.transport.get_write_buffer_size())
        feeder.fail()
        body = await client.upto(b"\r\n0\r\n\r\n")
        await until(lambda: door.is_over)
    assert LOST.message.encode() in body[-200:]
    assert door.calls == ["started", "passed", "failed"]


# Streams that are silent for long before they begin.

KEPT_ALIVE = b"e\r\n: keep-alive\n\n\r\n"


@contextlib.asynccontextmanager
async def kept_alive(held: ClientRequest, path: str = DIRECT) -> AsyncIterator[tuple]:
    """A door and a client that was sent a head, and what it passes over, twice."""
    async with serving(held, path) as door, reading(door) as client:
        await until(lambda: door.transport is not None)
        held.fell_silent()
        head = (await client.head()).lower()
        assert head.startswith(b"http/1.1 200 ok\r\n")
        for line in (b"content-type: text/event-stream", b"cache-control: no-cache",
                     b"x-accel-buffering: no", b"x-request-id: q-1"):  # fmt: skip
            assert line in head
        held.fell_silent()
        yield door, client


async def of(held: ClientRequest, client: Reader) -> None:
    """What each form of API passes over is here, twice."""
    ping = b'24\r\nevent: ping\ndata: {"type": "ping"}\n\n\r\n'
    kept = ping if held.path == MESSAGES else KEPT_ALIVE
    assert await client.exactly(2 * len(kept)) == 2 * kept


@both_ways
async def test_a_stream_that_waits_has_begun_for_its_client_alone(path):
    held = client_request()
    async with kept_alive(held, path) as (door, client):
        await of(held, client)
        assert door.calls == []
        feeder = Feeder(held)  # another attempt, whose head and first event come now
        feeder.data(b"data: 1\n\n")
        assert await client.exactly(14) == b"9\r\ndata: 1\n\n\r\n"
        held.fell_silent()
        assert await client.exactly(len(KEPT_ALIVE)) == KEPT_ALIVE
        feeder.end(last=b"data: [DONE]\n\n")
        assert await client.upto(b"0\r\n\r\n") == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        await until(lambda: door.is_over)
        held.fell_silent()
    assert door.calls == ["started", "passed", "finished"]


async def test_nothing_is_put_into_an_event_that_is_not_whole():
    held = client_request()
    feeder = Feeder(held)
    long = b"data: " + b"x" * 70_000
    feeder.data(long)
    async with serving(held) as door, reading(door) as client:
        await client.head()
        await client.upto(long + b"\r\n")
        held.fell_silent()
        feeder.data(b"\n\n")
        assert await client.exactly(7) == b"2\r\n\n\n\r\n"


ENDINGS = pytest.mark.parametrize("form", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])


@ENDINGS
async def test_a_failure_of_a_stream_that_was_kept_alive_is_an_event(form):
    held = client_request()
    held.path = form
    async with kept_alive(held) as (door, client):
        await of(held, client)
        held.failure = Failure(Fault.SATURATED, "no room", 7.0)
        held.changed()
        error = error_of(await client.upto(b"0\r\n\r\n"), form)
        assert error["message"] == "no room"
        await round_trip(door)
    assert door.calls == ["failed"]


@ENDINGS
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"too long","type":"BadRequestError","code":400}}', "too long"),
        (b'{"object":"error","message":"too long","type":"x","code":400}', "too long"),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}', "no"),
        (b'{"detail":"Not so"}', "the engine answered 400: Not so"),
        (b'{"error":"unknown field"}', "the engine answered 400: unknown field"),
        (b"[1]", "the engine answered 400: [1]"),
        (b"no \xff json\n\ndata: x", "the engine answered 400: no \ufffd json\n\ndata: x"),
    ],
)
@pytest.mark.parametrize("at_last", [True, False], ids=["after attempts", "its answer"])
async def test_so_is_an_engines_error(form, body, said, at_last):
    held = client_request()
    held.path = form
    async with kept_alive(held) as (door, client):
        await of(held, client)
        if at_last:
            held.engine_error = EngineError(400, JSON, body)
            held.pass_engine_error = True
            held.changed()
        else:
            feeder = Feeder(held, JSON, 400)
            feeder.data(body)
            feeder.end()
        assert error_of(await client.upto(b"0\r\n\r\n"), form)["message"] == said
        await until(lambda: door.is_over)
    assert door.calls == (["failed"] if at_last else ["started", "finished"])


@ENDINGS
@pytest.mark.parametrize(
    "size", [20, PLAIN_BYTES_MAX], ids=["whole", "too long to wait for its end"]
)
async def test_an_engine_that_does_not_stream_has_failed(form, size):
    held = client_request()
    held.path = form
    async with kept_alive(held) as (door, client):
        await of(held, client)
        feeder = Feeder(held, JSON)
        feeder.data(b"x" * size)
        if size < PLAIN_BYTES_MAX:
            feeder.end()
        error = error_of(await client.upto(b"0\r\n\r\n"), form)
        assert "a whole body where a stream" in error["message"]
        await until(lambda: door.is_over)
    assert door.calls == ["failed"]


def error_of(chunk: bytes, form: str) -> dict:
    """What an event that ends a stream of that path says."""
    _, text, last = chunk.split(b"\r\n", 2)
    assert last == b"0\r\n\r\n"
    *name, data = text.removesuffix(b"\n\n").split(b"\n")
    named = {MESSAGES: [b"event: error"], RESPONSES: [b"event: response.failed"]}
    assert name == named.get(form, [])
    return orjson.loads(data.removeprefix(b"data: "))["error"]


async def test_a_client_that_hangs_up_while_its_stream_is_kept_alive_has_left():
    held = client_request()
    async with kept_alive(held) as (door, client):
        client.hang_up()
        await until(lambda: door.is_over)
    assert door.calls == ["leave"]


async def test_the_routers_own_mistake_cuts_a_stream_that_was_kept_alive():
    held = client_request()
    async with kept_alive(held) as (door, client):
        await of(held, client)

        def breaks(held: ClientRequest) -> None:
            raise RuntimeError("broken")

        door.started = breaks
        Feeder(held).data(b"data: 1\n\n")
        assert await client.rest() == b""
    assert door.calls == ["leave"]


async def test_a_client_of_http_1_0_gets_the_same_without_chunks():
    held = client_request()
    async with serving(held) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(door.asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        await until(lambda: door.transport is not None)
        held.fell_silent()
        feeder = Feeder(held)
        feeder.data(b"data: 1\n\n")
        feeder.end()
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.transport.abort()
    assert body == b": keep-alive\n\ndata: 1\n\n"


async def test_who_is_in_the_middle_of_a_body_when_the_server_ends_is_told_so():
    async with serving(client_request()) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(door.asked[:-1])
        await until(lambda: door.bodies.taken_bytes)
    answer = await reader.read()
    writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 503") and b'"code":"draining"' in answer
    assert not door.bodies.taken_bytes
