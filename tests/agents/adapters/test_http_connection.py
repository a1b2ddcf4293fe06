"""One connection over real HTTP, and any answer in any pieces."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from agents.adapters.http_client import (
    BUFFERED_BYTES,
    SILENT_BYTES_MAX,
    Connection,
    HttpBroken,
    HttpLost,
    ResponseHead,
)
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    Script,
    chunk,
    plain,
    running,
)

ASK = (b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n", b"{}")
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\nContent-Length: 7\r\n\r\n"
EARLY_HINTS = b"HTTP/1.1 103 Early Hints\r\nContent-Type: text/odd\r\n\r\n"


def sends(*pieces: bytes, then: str = "stays") -> Script:
    async def script(talk: Conversation) -> None:
        for piece in pieces:
            await talk.send(piece)
        if then == "cuts":
            talk.cut()
        elif then == "closes":
            talk.close()

    return script


@contextlib.asynccontextmanager
async def asked(script: Script) -> AsyncIterator[Connection]:
    async with running(script) as engine:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", engine.port)
        try:
            connection.send(ASK)
            yield connection
        finally:
            connection.close()


async def whole(connection: Connection) -> tuple[ResponseHead, bytes]:
    head, parts = await connection.head(), []
    while part := await connection.read():
        parts.append(part)
    return head, b"".join(parts)


@pytest.mark.parametrize(
    ("script", "head", "body", "usable"),
    [
        (sends(plain(200, b"hello")), ResponseHead(200, "application/json"), b"hello", True),
        (sends(plain(404, b"")), ResponseHead(404, "application/json"), b"", True),
        (
            sends(CHUNKED, chunk(b"a") + chunk(b"b"), LAST_CHUNK),
            ResponseHead(200, "text/event-stream"),
            b"ab",
            True,
        ),
        (
            sends(CHUNKED + chunk(b"a") + b"0\r\nContent-Type: trailer\r\n\r\n"),
            ResponseHead(200, "text/event-stream"),
            b"a",
            True,
        ),
        (sends(UNTIL_CLOSE, b"abc", then="closes"), ResponseHead(200, "text/plain"), b"abc", False),
        (
            sends(CONTINUE + EARLY_HINTS + plain(200, b"x", "text/plain")),
            ResponseHead(200, "text/plain"),
            b"x",
            True,
        ),
        (
            sends(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"),
            ResponseHead(200, ""),
            b"x",
            False,
        ),
        (
            sends(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx"),
            ResponseHead(200, ""),
            b"x",
            False,
        ),
        (
            sends(EARLY_HINTS + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"),
            ResponseHead(200, ""),
            b"x",
            True,
        ),
        (
            sends(CONTINUE + UNTIL_CLOSE, b"abc", then="closes"),
            ResponseHead(200, "text/plain"),
            b"abc",
            False,
        ),
        (
            sends(
                UNTIL_CLOSE[:-2] + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
                b"abc",
                then="closes",
            ),
            ResponseHead(200, "text/plain"),
            b"abc",
            False,
        ),
        (
            sends(b"HTTP/1.1 204 No\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n\r\n"),
            ResponseHead(204, "a/b"),
            b"",
            True,
        ),
        (sends(b"HTTP/1.1 204 No\r\n\r\n"), ResponseHead(204, ""), b"", True),
        (sends(plain(200, b"a") * 2), ResponseHead(200, "application/json"), b"a", False),
        (sends(plain(200, b"a") + b"odd"), ResponseHead(200, "application/json"), b"a", False),
        # Engines of many makes: what they get wrong here misleads nobody.
        (
            sends(CHUNKED + b"1 \r\na\r\n" + LAST_CHUNK),
            ResponseHead(200, "text/event-stream"),
            b"a",
            True,
        ),
    ],
)
async def test_answers(script, head, body, usable) -> None:
    async with asked(script) as connection:
        assert await whole(connection) == (head, body)
        assert connection.is_usable is usable


@pytest.mark.parametrize(
    ("script", "problem", "words"),
    [
        (sends(then="cuts"), HttpLost, "before its answer"),
        (sends(then="closes"), HttpLost, "before its answer"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-", then="closes"), HttpLost, "before its answer"),
        (sends(CHUNKED + chunk(b"a"), then="closes"), HttpLost, "inside its answer"),
        (sends(plain(200, b"abc")[:-1], then="closes"), HttpLost, "inside its answer"),
        (sends(b"SSH-2.0-OpenSSH\r\n"), HttpBroken, "no response in HTTP/1.1"),
        (sends(CHUNKED + b"zz\r\n"), HttpBroken, "no response in HTTP/1.1"),
        (sends(b"HTTP/1.1 101 Up\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), HttpBroken, "no"),
        (sends(b"HTTP/1.1 200 OK\r\nA: " + b"a" * SILENT_BYTES_MAX), HttpBroken, "has more than"),
        (sends(plain(200, b"x", "text/plain\0x")), HttpBroken, "content type"),
        (
            sends(CHUNKED + b"0\r\nA: " + b"a" * 2 * SILENT_BYTES_MAX),
            HttpBroken,
            "has more than",
        ),
        (sends(EARLY_HINTS * 2_000), HttpBroken, "has more than"),
    ],
)
async def test_what_is_no_whole_answer(script, problem, words) -> None:
    async with asked(script) as connection:
        with pytest.raises(problem, match=words):
            await whole(connection)
        assert not connection.is_usable


async def test_bytes_before_a_cut_are_given_out() -> None:
    async with asked(sends(CHUNKED + chunk(b"a"), then="cuts")) as connection:
        await connection.head()
        got: list[bytes] = []
        with pytest.raises(HttpLost):
            await connection.stream_to(got.append)
    assert b"".join(got) in (b"", b"a")  # a reset may overtake what came before it


async def test_one_connection_carries_one_answer_after_the_other() -> None:
    async with asked(sends(plain(200, b"x"))) as connection:
        for _ in range(3):
            assert (await whole(connection))[1] == b"x"
            assert connection.is_usable
            connection.reset()
            connection.send(ASK)
        got: list[bytes] = []
        await connection.head()
        await connection.stream_to(got.append)
        assert b"".join(got) == b"x"


async def test_no_request_is_sent_on_a_closed_connection() -> None:
    async with asked(sends(plain(200, b"x"), then="closes")) as connection:
        await whole(connection)
        while not connection.is_closing:
            await asyncio.sleep(0)
        with pytest.raises(HttpLost, match="has closed"):
            connection.send(ASK)


async def test_an_engine_that_speaks_unasked_is_cut_off() -> None:
    late = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(plain(200, b"x"))
        await late.wait()
        await talk.send(plain(408, b"too late"))

    async with asked(script) as connection:
        await whole(connection)
        connection.reset()
        late.set()
        while not connection.is_closing:
            await asyncio.sleep(0)


async def _early(answer: bytes, *, half_closes: bool) -> tuple[bytes, bool]:
    """What comes of an answer that comes before the request is sent, and may more be asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reader.set_exception(ConnectionError("reads no further"))
        writer.transport.pause_reading()
        writer.write(answer)
        if half_closes:
            writer.write_eof()
        await done.wait()
        writer.transport.abort()

    done = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, "127.0.0.1", port
    )
    connection.send((ASK[0], b"x" * 32 * 1024 * 1024))
    try:
        return (await whole(connection))[1], connection.is_usable
    finally:
        connection.close()
        done.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("answer", "half_closes"), [(plain(413, b"no"), False), (UNTIL_CLOSE + b"no", True)]
)
def test_nothing_is_sent_behind_half_a_request(loop, answer, half_closes) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(_early(answer, half_closes=half_closes)) == (b"no", False)


async def test_a_fault_of_the_sink_is_not_the_engines() -> None:
    def sink(data: bytes) -> None:
        raise ZeroDivisionError

    async with asked(sends(plain(200, b"x"))) as connection:
        with pytest.raises(ZeroDivisionError):
            await connection.stream_to(sink)
        assert not connection.is_usable


async def test_one_that_was_held_rests_ready() -> None:
    async with asked(sends(plain(200, b"x"))) as connection:
        connection.pause()
        connection.resume()
        await connection.stream_to(lambda data: connection.pause())
        assert connection.is_usable
        connection.reset()
        connection.send(ASK)
        assert (await whole(connection))[1] == b"x"


async def _holds() -> None:
    """What is poured stops while it is held, and what nobody reads fills no memory."""
    piece, count = b"x" * 65_536, 200
    sent = 0

    async def script(talk: Conversation) -> None:
        nonlocal sent
        await talk.send(CHUNKED)
        for _ in range(count):
            await talk.send(chunk(piece))
            sent += 1
        await talk.send(LAST_CHUNK)

    async def stalled() -> None:
        """Until the engine has sent nothing for a while."""
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)

    async with asked(script) as connection:
        await connection.head()
        await stalled()  # nobody reads
        assert sent < count
        first = await connection.read()
        assert 0 < len(first) < BUFFERED_BYTES + 512 * 1024
        got = bytearray()

        def sink(data: bytes) -> None:
            got.extend(data)
            if len(got) < 1_000_000:
                connection.pause()

        poured = asyncio.ensure_future(connection.stream_to(sink))
        while not got:
            await asyncio.sleep(0)
        while len(got) < 1_000_000:
            await stalled()
            held = len(got)
            await asyncio.sleep(0.05)
            assert len(got) == held
            connection.resume()
            while len(got) == held:
                await asyncio.sleep(0)
        connection.resume()
        await poured
        assert first + got == piece * count


def test_what_is_held_stays_in_the_socket_under_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_holds())


async def test_what_is_held_stays_in_the_socket() -> None:
    await _holds()


class Wire(asyncio.Transport):
    """Where a connection writes, when a test brings the answer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False

    def writelines(self, list_of_data) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_cut

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.is_cut = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@given(
    parts=st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    cuts=st.lists(st.integers(1, 3_000), max_size=20),
    informed=st.booleans(),
)
def test_an_answer_is_the_same_in_any_pieces(parts, cuts, informed) -> None:
    answer = CHUNKED + b"".join(map(chunk, parts)) + LAST_CHUNK
    answer = EARLY_HINTS + answer if informed else answer
    got: list[bytes] = []

    async def play() -> None:
        connection = Connection()
        connection.connection_made(Wire())
        connection.send(ASK)
        poured = asyncio.ensure_future(connection.stream_to(got.append))
        await asyncio.sleep(0)
        begins = [0, *sorted({cut for cut in cuts if cut < len(answer)})]
        for begin, end in zip(begins, [*begins[1:], len(answer)], strict=True):
            before = len(got)
            connection.data_received(answer[begin:end])
            assert len(got) <= before + 1
        await poured
        assert await connection.head() == ResponseHead(200, "text/event-stream")
        assert connection.is_usable

    asyncio.run(play())
    assert b"".join(got) == b"".join(parts)


@given(junk=st.binary(max_size=200), at=st.integers(0, 200))
def test_no_bytes_hurt_it(junk, at) -> None:
    answer = CHUNKED + chunk(b"data: 1\n\n") + LAST_CHUNK
    spoilt = answer[:at] + junk + answer[at:]

    async def play() -> None:
        connection = Connection()
        connection.connection_made(Wire())
        connection.send(ASK)
        connection.data_received(spoilt)
        connection.connection_lost(None)
        with contextlib.suppress(HttpLost, HttpBroken):
            await whole(connection)

    asyncio.run(play())
