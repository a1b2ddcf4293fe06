"""Reading a request over a real connection: sizes, slow uploads, and what of it becomes an Ask.

What a client can write into a body is in tests/mesh/runtime/test_bad_input.py.
"""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from mesh.adapters import read_request
from mesh.adapters.http_server import HttpServer
from mesh.adapters.problem import Problem
from mesh.adapters.read_request import read_ask, request_id
from mesh.adapters.ticket import Ask
from schemas.http import CHAT, COMPLETIONS, Fault

HELLO = b'{"model": "tiny",  "messages": [{"role": "user", "content": "hi"}], "stream": null}'


class Desk:
    """Reads every request and keeps what came of it."""

    def __init__(self) -> None:
        self.read: list[Ask | Problem] = []
        self.port = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self.read.append(await read_ask(request, request_id(request)))
        except Problem as problem:
            self.read.append(problem)
        return web.Response()


@pytest.fixture
async def desk():
    made = Desk()
    runner = web.ServerRunner(HttpServer(made.handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


async def post(desk: Desk, data, path: str = CHAT, **headers: str) -> Ask | Problem:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{desk.port}") as session,
        session.post(path, data=data, headers=headers) as answer,
    ):
        await answer.read()
    [read] = desk.read
    return read


async def test_an_ask_carries_the_body_as_it_came(desk):
    ask = await post(desk, HELLO, **{"x-request-id": "abc-1", "x-mesh-timeout-s": "2.5"})
    assert isinstance(ask, Ask)
    assert (ask.request_id, ask.model, ask.path) == ("abc-1", "tiny", CHAT)
    assert (ask.body, ask.timeout_s) == (HELLO, 2.5)
    assert b"hi" in ask.text.data


async def test_without_a_fit_id_it_gets_its_own(desk):
    ask = await post(desk, HELLO, **{"x-request-id": "a" * 500})
    assert isinstance(ask, Ask)
    assert 0 < len(ask.request_id) < 500
    assert ask.timeout_s is None


async def test_the_path_says_where_the_prompt_is(desk):
    problem = await post(desk, HELLO, COMPLETIONS)
    assert isinstance(problem, Problem)
    assert (problem.fault, problem.param) == (Fault.INVALID, "prompt")


async def in_pieces(data: bytes):
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def test_a_body_of_unknown_length_is_read_in_pieces(desk):
    body = HELLO[:-1] + b', "x": "' + b"y" * 50_000 + b'"}'
    ask = await post(desk, in_pieces(body))
    assert isinstance(ask, Ask) and ask.body == body


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused_announced_or_not(desk, monkeypatch, announced):
    monkeypatch.setattr(read_request, "BODY_BYTES_MAX", 10_000)
    monkeypatch.setattr("mesh.adapters.http_server.BODY_BYTES_MAX", 10_000)
    body = b"x" * 10_001
    problem = await post(desk, body if announced else in_pieces(body))
    assert isinstance(problem, Problem)
    assert problem.fault is Fault.BODY_TOO_LARGE
    assert "10000 bytes" in problem.message


async def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(desk, monkeypatch):
    monkeypatch.setattr(read_request, "UPLOAD_S_MAX", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", desk.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
    writer.write(HELLO[:10])
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        writer.close()
        await writer.wait_closed()
    [problem] = desk.read
    assert isinstance(problem, Problem)
    assert "did not arrive within 0.05 s" in problem.message
