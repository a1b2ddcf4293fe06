"""Reading a request over a real connection: sizes, slow uploads, and what of it becomes an Ask.

What a client can write into a body is in tests/mesh/runtime/test_bad_input.py.
"""

import asyncio
import contextlib
import io

import aiohttp
import orjson
import pytest

from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.core.model.prompt import prompt_text
from mesh.http import request_body as upload
from mesh.http.http_request import Answer, HttpRequest
from mesh.http.large_body_process import ANSWERED, pack, unpack
from mesh.http.read_request import (
    BodyBudget,
    ParsedRequest,
    RequestReader,
    read_fields,
    request_id,
)
from mesh.http.server import HttpServer
from schemas.http import CHAT, COMPLETIONS, Fault
from tests.support.until import PATIENCE_S

HELLO = b'{"model": "tiny",  "messages": [{"role": "user", "content": "hi"}], "stream": null}'


class ReadingServer:
    """Reads every request and keeps what came of it."""

    def __init__(self) -> None:
        self.read: list[ParsedRequest | RequestRefused] = []
        self.port = 0
        self.bodies = self.budget = BodyBudget()
        self.reader = upload.BodyReader(RequestReader(self.bodies), self)

    def residency(self, wanted, caller):
        if caller is not None:
            raise RequestRefused(Fault.RESIDENCY, "forbidden")
        return wanted

    async def handle(self, request: HttpRequest) -> Answer:
        try:
            known_id = request_id(request.headers)
            request.caller = Caller() if "x-forbidden" in request.headers else None
            ask = await self.reader.read(request, request.path, request.headers, known_id)
            self.budget.give_back(ask.kept_bytes)
            self.read.append(ask)
        except RequestRefused as problem:
            self.read.append(problem)
        return Answer(200, {})


@pytest.fixture
async def server():
    made = ReadingServer()
    listening = HttpServer(made.handle)
    await listening.listen("127.0.0.1", 0)
    made.port = listening.port
    yield made
    await listening.close(0.1)
    await made.reader.close()
    assert made.budget.taken_bytes == 0


async def post(
    server: ReadingServer, data, path: str = CHAT, **headers: str
) -> ParsedRequest | RequestRefused:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.post(path, data=data, headers=headers) as answer,
    ):
        await answer.read()
    [read] = server.read
    return read


async def test_an_ask_carries_the_body_as_it_came(server):
    ask = await post(server, HELLO, **{"x-request-id": "abc-1", "x-mesh-timeout-s": "2.5"})
    assert isinstance(ask, ParsedRequest)
    assert (ask.request_id, ask.model, ask.path) == ("abc-1", "tiny", CHAT)
    assert (ask.body, ask.timeout_s) == (HELLO, 2.5)
    assert b"hi" in ask.fields.text.data


async def test_without_a_fit_id_it_gets_its_own(server):
    ask = await post(server, HELLO, **{"x-request-id": "a" * 500})
    assert isinstance(ask, ParsedRequest)
    assert 0 < len(ask.request_id) < 500
    assert ask.timeout_s is None


async def test_the_path_says_where_the_prompt_is(server):
    problem = await post(server, HELLO, COMPLETIONS)
    assert isinstance(problem, RequestRefused)
    assert (problem.fault, problem.param) == (Fault.INVALID, "prompt")


@pytest.mark.parametrize(
    ("fields", "adds_usage"),
    [
        ({"stream": True}, True),
        ({"stream": True, "stream_options": None}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, True),
        ({"stream": True, "stream_options": {"include_usage": None}}, True),
        ({"stream": True, "stream_options": {"include_usage": 0}}, True),
        ({"stream": True, "stream_options": {"include_usage": "No"}}, True),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, False),
        (
            {
                "stream": True,
                "stream_options": {"include_usage": False, "continuous_usage_stats": False},
            },
            True,
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, False),
        ({"stream": True, "stream_options": {}}, False),  # vLLM's default is true, SGLang's false
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False),
        (
            {
                "stream": True,
                "stream_options": {"include_usage": False, "continuous_usage_stats": True},
            },
            False,  # SGLang puts the counts into every event
        ),
        ({"stream": True, "stream_options": "false"}, False),  # the engine's to refuse
        ({"stream": True, "stream_options": {"include_usage": [0]}}, False),
        ({"stream": False, "stream_options": None}, False),
        ({"stream": False}, False),
        ({"stream": None}, False),
        ({}, False),
    ],
)
def test_token_counts_may_be_asked_for_where_a_stream_says_nothing_of_them(fields, adds_usage):
    body = orjson.dumps({"model": "tiny", "prompt": "hi", **fields})
    read = read_fields(COMPLETIONS, body)
    assert read.adds_usage is adds_usage
    _, kind, about_bytes, _ = ANSWERED.unpack((packed := pack(read))[0])
    assert len(packed[1]) == about_bytes
    assert unpack(kind, *packed[1:]) == read


async def in_pieces(data: bytes):
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def test_a_body_of_unknown_length_is_read_in_pieces(server):
    body = HELLO[:-1] + b', "x": "' + b"y" * 50_000 + b'"}'
    ask = await post(server, in_pieces(body))
    assert isinstance(ask, ParsedRequest) and ask.body == body


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused_announced_or_not(server, monkeypatch, announced):
    monkeypatch.setattr(upload, "BODY_BYTES_MAX", 10_000)
    monkeypatch.setattr("mesh.http.request_body.LARGE_BYTES", 5_000)
    body = b"x" * 10_001
    problem = await post(server, body if announced else in_pieces(body))
    assert isinstance(problem, RequestRefused)
    assert problem.fault is Fault.BODY_TOO_LARGE
    assert "10000 bytes" in problem.message


async def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(server, monkeypatch):
    monkeypatch.setattr(upload, "WINDOW_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
    writer.write(HELLO[:10])
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        writer.close()
        await writer.wait_closed()
    [problem] = server.read
    assert isinstance(problem, RequestRefused)
    assert problem.fault is Fault.REQUEST_TIMEOUT
    assert "in each 0.05 s" in problem.message


async def answer_to(
    server: ReadingServer, head: str, body: bytes = b"", version: str = "1.1"
) -> list[str]:
    """The status lines that come back; the body goes out after the first of them."""
    lines = []
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        text = f"POST {CHAT} HTTP/{version}\r\nhost: x\r\n{head}\r\n\r\n"
        writer.write(text.encode())
        async with asyncio.timeout(PATIENCE_S):
            lines.append((await reader.readuntil(b"\r\n")).decode().strip())
            if " 100 " in lines[0]:
                await reader.readuntil(b"\r\n")
                writer.write(body)
                lines.append((await reader.readuntil(b"\r\n")).decode().strip())
    finally:
        writer.transport.abort()
    return lines


@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
async def test_a_client_that_waits_is_told_to_go_on(server, value):
    head = f"expect: {value}\r\ncontent-length: {len(HELLO)}"
    assert await answer_to(server, head, HELLO) == ["HTTP/1.1 100 Continue", "HTTP/1.1 200 OK"]
    [ask] = server.read
    assert isinstance(ask, ParsedRequest) and ask.body == HELLO


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        ("expect: 200-ok\r\ncontent-length: 5", Fault.EXPECTATION),
        ("expect: 100-continue\r\ncontent-length: 99999999", Fault.BODY_TOO_LARGE),
        ("expect: 100-continue\r\ncontent-length: 5\r\ncontent-encoding: br", Fault.ENCODING),
        ("expect: 100-continue\r\ncontent-length: 5\r\nx-forbidden: 1", Fault.RESIDENCY),
    ],
)
async def test_what_is_refused_anyway_is_not_asked_for(server, head, fault):
    assert await answer_to(server, head) == ["HTTP/1.1 200 OK"]  # of this test's server
    [problem] = server.read
    assert isinstance(problem, RequestRefused) and problem.fault is fault


async def test_a_client_of_http_1_0_is_not_told_to_go_on(server):
    body = HELLO.decode()
    head = f"expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    assert await answer_to(server, head, version="1.0") == ["HTTP/1.0 200 OK"]


async def test_a_large_body_is_read_elsewhere_and_as_well(server):
    body = HELLO[:-1] + b', "x": "' + b"y" * 400_000 + b'", "user": "me", "cache_salt": "s"}'
    ask = await post(server, io.BytesIO(body))
    assert isinstance(ask, ParsedRequest)
    assert (ask.model, ask.body, b"hi" in ask.fields.text.data) == ("tiny", body, True)
    assert (ask.options.session, ask.options.salt) == ("me", "s")


async def test_a_large_image_is_the_same_part_wherever_its_body_is_read(server):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    fields = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
    ask = await post(server, io.BytesIO(orjson.dumps(fields)))
    assert isinstance(ask, ParsedRequest)
    assert ask.fields.text == prompt_text(fields, chat=True)
    assert len(ask.fields.text.parts) == 1


async def test_a_large_body_that_is_wrong_is_told_what_to_change(server):
    problem = await post(server, io.BytesIO(b'{"model": 7, "x": "' + b"y" * 400_000 + b'"}'))
    assert isinstance(problem, RequestRefused)
    assert (problem.fault, problem.param) == (Fault.INVALID, "model")
