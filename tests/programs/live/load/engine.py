"""An engine that costs next to nothing: answers at once, whatever it is asked.

    python -m tests.programs.live.load.engine

Prints its port. A request is read to the end of its body, and gets a whole answer or, if it wants
a stream, 32 chunks in one piece.
"""

import asyncio
import re
from typing import cast

import click
import uvloop

from tests.programs.live.load.fleet import CHUNK, DONE, MODEL, PLAIN

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKS = 32
METRICS = b"".join(
    b'# TYPE vllm:%b gauge\nvllm:%b{model_name="tiny"} 0\n' % (name, name)
    for name in (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc")
)
MODELS = b'{"object":"list","data":[{"id":"%b"}]}' % MODEL.encode()


def _whole(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    return head + body


def _stream() -> bytes:
    parts = [b"%x\r\n%b\r\n" % (len(each), each) for each in ([CHUNK] * CHUNKS + [DONE])]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
    return head + b"\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


ANSWERS = {
    b"GET /metrics": _whole(b"text/plain", METRICS),
    b"GET /v1/models": _whole(b"application/json", MODELS),
    b"POST plain": _whole(b"application/json", PLAIN),
    b"POST stream": _stream(),
}


class Connection(asyncio.Protocol):
    """One connection; requests on it come one after another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._read = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self._read = b""
        asked = b"POST stream" if b'"stream":true' in body else b"POST plain"
        asked = asked if head.startswith(b"POST") else b" ".join(head.split(b" ", 2)[:2])
        self._transport.write(ANSWERS[asked])


async def _run() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    click.echo(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_run())
