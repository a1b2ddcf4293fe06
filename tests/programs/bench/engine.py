"""A scripted engine that costs little, so that what is before it is what is measured.

    python -m tests.programs.bench.engine PORT

Raw HTTP/1.1 in one asyncio protocol: a web framework would spend more on each event than the
routers do. How a request is answered is in two fields that every OpenAI proxy passes on:
`max_tokens` events (some proxies rename it), and `seed` milliseconds before each. Headers leave at
once, every event is a write of its own, as those of vLLM and SGLang are under uvicorn, and streams
of one pace go in step, as a batch does, unless a request's `user` is OUT_OF_STEP. The pages are
those that routers and agents ask engines for; the metrics have vLLM's names.
"""

import asyncio
import re
import sys
from typing import ClassVar

import orjson
import uvloop

MODEL = "tiny"
OUT_OF_STEP = "out-of-step"  # as a request's `user`: its events have a pace of their own
BACKLOG = 4096
_USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 10,
    "total_tokens": 60,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def _event(choices: list[object], **fields: object) -> bytes:
    answer = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + orjson.dumps({**answer, "choices": choices, **fields}) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def _json(document: object) -> bytes:
    return _response(orjson.dumps(document))


_SAYS = {"role": "assistant", "content": "Well, that depends on whom you ask."}
PLAIN = _json(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": _SAYS, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_WORD = _event([{"index": 0, "delta": {"content": " token"}, "finish_reason": None}])
WORD = _chunk(_WORD)
LAST = _chunk(_WORD + _event([], usage=_USAGE) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
PAGES = {
    b"/v1/models": _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"/health": _json({}),
    b"/get_model_info": _json({"model_path": MODEL, "is_generation": True}),
    b"/model_info": _json({"model_path": MODEL, "is_generation": True}),
    b"/get_server_info": _json({"model_path": MODEL, "served_model_name": MODEL}),
    b"/server_info": _json({"model_path": MODEL, "served_model_name": MODEL}),
    b"/version": _json({"version": "0"}),
}
METRICS = (
    b'vllm:num_requests_running{model_name="tiny"} %d\n'
    b'vllm:num_requests_waiting{model_name="tiny"} 0\n'
    b'vllm:kv_cache_usage_perc{model_name="tiny"} 0.1\n'
)
CHAT = b"/v1/chat/completions"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
_NUMBER = re.compile(rb"\s*:\s*(\d+)")
_IS_APART = re.compile(rb'"user"\s*:\s*"%b"' % OUT_OF_STEP.encode())


def number(body: bytes, *fields: bytes) -> int:
    """The first of these integer fields that a JSON text has, found without parsing it; or 0."""
    for field in fields:
        at = body.find(b'"%b"' % field)
        found = _NUMBER.match(body, at + len(field) + 2) if at >= 0 else None
        if found:
            return int(found[1])
    return 0


class Batch:
    """The streams of one pace: each gets an event at every step, as continuous batching does."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()
        self._streams: list[Connection] = []

    def join(self, stream: "Connection") -> None:
        """Take part from the next step on."""
        self._streams.append(stream)
        if len(self._streams) == 1:
            self._due_at = self._loop.time() + self._step_s
            self._loop.call_at(self._due_at, self._step)

    def _step(self) -> None:
        self._streams = [stream for stream in self._streams if stream.send_event()]
        if self._streams:
            self._due_at += self._step_s
            self._loop.call_at(self._due_at, self._step)


class Connection(asyncio.Protocol):
    """One client's connection: requests one after another."""

    running = 0  # streams of all connections
    batches: ClassVar[dict[int, Batch]] = {}  # by milliseconds of a step

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head = b""
        self._whole = 0  # bytes of the request that is arriving; 0: its head is not here yet
        self._left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def connection_lost(self, problem: Exception | None) -> None:
        Connection.running -= bool(self._left)
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._take():
            pass

    def _take(self) -> bool:
        """Answer a request if it is here as a whole."""
        if not self._whole:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._head = bytes(self._buffer[:end])
            length = _LENGTH.search(self._head.lower())
            self._whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < self._whole:
            return False
        body = bytes(self._buffer[len(self._head) + 4 : self._whole])
        del self._buffer[: self._whole]
        self._whole = 0
        words = self._head.split(b" ", 2)
        if len(words) != 3:  # some routers try HTTP/2 first
            self._transport.close()
            return False
        self._answer(words[0], words[1], body)
        return True

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        if path == b"/metrics":
            self._transport.write(_response(METRICS % Connection.running, b"text/plain"))
        elif (method, path) != (b"POST", CHAT):
            missing = _response(b"{}", status=b"404 Not Found")
            self._transport.write(PAGES.get(path, missing))
        elif not body:  # sent in chunks, which this engine does not read
            self._transport.write(_response(b"{}", status=b"411 Length Required"))
        elif re.search(rb'"stream"\s*:\s*true', body):
            events = number(body, b"max_tokens", b"max_completion_tokens")
            if events:
                self._stream(events, number(body, b"seed"), _IS_APART.search(body) is None)
            else:  # a proxy lost it: what is measured then would be something else
                self._transport.write(_response(b"{}", status=b"400 Bad Request"))
        else:
            self._transport.write(PLAIN)

    def _stream(self, events: int, gap_ms: int, in_step: bool) -> None:
        self._transport.write(HEAD)
        Connection.running += 1
        self._left = events
        batch = Batch(gap_ms / 1000)
        if in_step:
            batch = Connection.batches.setdefault(gap_ms, batch)
        # The first event takes as long as any: prefill is no step of the batch.
        asyncio.get_running_loop().call_later(gap_ms / 1000, self._first, batch)

    def _first(self, batch: Batch) -> None:
        if self.send_event():
            batch.join(self)

    def send_event(self) -> bool:
        """Write the next event; whether there are more."""
        if self._left > 1:
            self._transport.write(WORD)
            self._left -= 1
            return True
        if self._left == 1:
            self._transport.write(LAST)
            self._left = 0
            Connection.running -= 1
        return False


async def serve(port: int) -> None:
    """Listen on loopback until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
