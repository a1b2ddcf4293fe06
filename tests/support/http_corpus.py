"""Inputs of the clients' port: bytes of requests, good, unusual and hostile, and how to send them.

Each is sent whole, byte by byte, and cut at random places, and must be answered the same. Behind
the input comes a request that closes the connection (LAST), or the end of the client's bytes: so
all that a server answers is read without waiting for silence, and whether it closed the connection
before LAST is seen.
"""

import asyncio
import contextlib
import gzip
import random
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from schemas.exchange import BODY_BYTES_MAX
from schemas.http import CHAT, H_DECISION
from tests.support.until import PATIENCE_S

ORIGIN = "https://page.example"
KEY = "sk-acme"
FILE_KEY, FILE = "corpus", b'{"custom_id": "1"}\n{"custom_id": "2"}\n'
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: last\r\nconnection: close\r\n\r\n"
# Of every answer, or counted in its body.
CHANGES = frozenset({"date", "server", "x-request-id", "x-mesh-region", "content-length"})
SINGLE_BYTES = 500  # of an input; the rest of a long one in larger pieces
QUIET_S = 0.2  # after which an answer is whole

HELLO = orjson.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": False}
)
STREAM = HELLO.replace(b"false", b"true")
PROMPT = b'{"model":"tiny","prompt":"hello"}'
LARGE = orjson.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 50_000}]}
)  # above what is parsed at once


@dataclass(frozen=True, slots=True)
class Input:
    """What a client sends. `eof`: it ends there, and LAST does not follow. `heads`: which of the
    answers are to HEAD."""

    sent: bytes
    eof: bool = False
    heads: tuple[int, ...] = ()


class Answer(NamedTuple):
    """One that came back. Names of headers are in lower case."""

    status: str  # the whole line
    headers: dict[str, str]
    body: bytes


def request(line: str, *headers: str, body: bytes = b"", host: str = "host: x") -> bytes:
    version = "" if line.endswith(("HTTP/1.0", "HTTP/1.1")) else " HTTP/1.1"
    lines = [line + version, *([host] if host else []), *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


def asked(body: bytes, *headers: str, path: str = CHAT, version: str = "HTTP/1.1") -> bytes:
    length = f"content-length: {len(body)}"
    return request(f"POST {path} {version}", length, *headers, body=body)


def chunks(body: bytes, size: int = 10, ending: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + ending


def chunked(body: bytes, *headers: str, path: str = CHAT, **how: object) -> bytes:
    head = f"POST {path} HTTP/1.1", "transfer-encoding: chunked", *headers
    return request(*head, body=chunks(body, **how))


def form(*parts: tuple[str, bytes], boundary: str = "b0") -> bytes:
    whole = b""
    for about, value in parts:
        head = f"--{boundary}\r\ncontent-disposition: form-data; {about}\r\n\r\n"
        whole += head.encode() + value + b"\r\n"
    return whole + f"--{boundary}--\r\n".encode()


FORM = "content-type: multipart/form-data; boundary=b0"
UPLOAD = form(('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', FILE))
OWN = f"authorization: Bearer {KEY}"
NO_FILE = "file-" + "0" * 32


def _work() -> Iterator[tuple[str, Input]]:
    """Requests for work in every framing that a body may have."""
    bodies: dict[str, tuple[bytes, tuple[str, ...]]] = {
        "plain": (HELLO, ()),
        "stream": (STREAM, ()),
        "receipt": (HELLO, ("x-mesh-debug: 1",)),
        "options": (HELLO, ("x-mesh-priority: high", "X-Mesh-Session: s")),
        "own id": (HELLO, ("x-request-id: mine",)),
        "strange id": (HELLO, ("x-request-id: two words",)),
        "no JSON": (b"{", ()),
        "not UTF-8": (b"\xff\xfe", ()),
        "no object": (b"[1]", ()),
        "no model": (b'{"messages":[]}', ()),
        "a number as model": (b'{"model":7,"messages":[]}', ()),
        "unknown model": (HELLO.replace(b'"tiny"', b'"tin"'), ()),
        "stream is no flag": (HELLO.replace(b"false", b"1"), ()),
        "no messages": (b'{"model":"tiny"}', ()),
        "priority": (HELLO, ("x-mesh-priority: now",)),
        "timeout": (HELLO, ("x-mesh-timeout-s: none",)),
        "residency": (HELLO, ("x-mesh-residency: nowhere",)),
        "misspelt": (HELLO, ("x-mesh-residancy: eu",)),
        "underscores": (HELLO, ("x_mesh_residency: eu",)),
        "a header of answers": (HELLO, ("x-mesh-region: eu",)),
        "origin": (HELLO, (f"origin: {ORIGIN}",)),
        "strange origin": (HELLO, ("origin: https://other.example",)),
        "Latin-1": (HELLO, ("x-any: \udce9",)),
        "closing": (HELLO, ("connection: close",)),
        "spaces around a value": (HELLO, ("x-request-id: \t mine \t ",)),
        "given twice": (HELLO, ("x-mesh-debug: 1", "x-mesh-debug: 0")),
        "two session headers": (HELLO, ("x-session-id: a", "x-session-id: b")),
        "large": (LARGE, ()),
    }
    for name, (body, headers) in bodies.items():
        yield name, Input(asked(body, *headers))
        if name != "large":
            yield f"{name}, slash", Input(asked(body, *headers, path=CHAT + "/"))
        size = 5000 if name == "large" else 10
        yield f"{name}, chunked", Input(chunked(body, *headers, size=size))
        yield f"{name}, repeated header", Input(asked(body, *headers, "x-any: 1", "x-any: 2"))
        gzipped = gzip.compress(body, mtime=0)
        yield f"{name}, gzip", Input(asked(gzipped, *headers, "content-encoding: gzip"))
        if "close" not in headers:
            upgrade = "connection: upgrade", "upgrade: h2c"
            yield f"{name}, upgrade", Input(asked(body, *headers, *upgrade))
        yield f"{name}, 1.0", Input(asked(body, *headers, version="HTTP/1.0"))
        expect = "expect: 100-continue"
        yield f"{name}, expect", Input(asked(body, *headers, expect))
    for path in (
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/rerank",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/chat/completions",
    ):
        yield f"to {path}", Input(asked(PROMPT, path=path))
        yield f"to {path}, no JSON", Input(asked(b"{", path=path))
        yield f"to {path}, chunked, no JSON", Input(chunked(b"{", path=path))
    speech = form(('name="model"', b"tiny"), ('name="file"; filename="a.wav"', b"RIFF"))
    yield "speech", Input(asked(speech, FORM, path="/v1/audio/transcriptions"))
    yield "speech, chunked", Input(chunked(speech, FORM, path="/v1/audio/transcriptions"))
    yield "speech, cut", Input(asked(speech[:-9], FORM, path="/v1/audio/transcriptions"))
    yield "empty body", Input(asked(b""))
    yield "no length", Input(request(f"POST {CHAT}"))
    yield "empty chunked body", Input(chunked(b""))
    yield "chat, a query", Input(asked(HELLO, path=CHAT + "?a=1"))
    yield "chat, whole address", Input(asked(HELLO, path="http://x" + CHAT))
    yield "chat, escaped", Input(asked(HELLO, path="/v1/%63hat/completions"))
    yield "length with a sign", Input(asked(HELLO, version="HTTP/1.1").replace(b"th: ", b"th: +"))


def _encodings() -> Iterator[tuple[str, Input]]:
    def sent(encoding: str, body: bytes) -> Input:
        return Input(asked(body, f"content-encoding: {encoding}"))

    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    whole = gzip.compress(HELLO, mtime=0)
    yield "deflate", sent("deflate", zlib.compress(HELLO))
    yield "raw deflate", sent("deflate", raw.compress(HELLO) + raw.flush())
    yield "identity", sent("identity", HELLO)
    yield "GZip", sent("GZip", whole)
    yield "x-gzip", sent("x-gzip", whole)
    yield "two members", sent("gzip", gzip.compress(HELLO[:9], mtime=0) + gzip.compress(HELLO[9:]))
    yield "gzip, chunked", Input(chunked(whole, "content-encoding: gzip"))
    yield "gzip that ends early", sent("gzip", whole[:-4])
    yield "gzip and more", sent("gzip", whole + b"more")
    yield "no gzip", sent("gzip", b"abcd")
    yield "gzip of nothing", sent("gzip", b"")
    for name in ("br", "zstd", "zip", "gzip,br", "gzip, gzip"):
        yield name, sent(name, b"abcd")
    yield (
        "two content-encodings",
        Input(asked(whole, "content-encoding: gzip", "content-encoding: gzip")),
    )
    yield "large gzip", sent("gzip", gzip.compress(LARGE, mtime=0))


def _expect() -> Iterator[tuple[str, Input]]:
    def sent(line: str, *more: str) -> Input:
        return Input(request(line, "expect: 100-continue", "content-length: 500", *more))

    yield "expect, refused by a header", sent(f"POST {CHAT}", "x-mesh-debug: 7")
    yield "expect, nowhere", sent(f"POST {CHAT}", "x-mesh-residency: nowhere")
    yield "expect, no path", sent("POST /nothing")
    yield "expect, health", sent("GET /health")
    yield "expect, encoding", sent(f"POST {CHAT}", "content-encoding: br")
    yield (
        "expect, too large",
        Input(
            request(f"POST {CHAT}", "expect: 100-continue", f"content-length: {BODY_BYTES_MAX + 1}")
        ),
    )
    yield "expect, chunked", Input(chunked(HELLO, "expect: 100-continue"))
    yield "expect, 1.0", Input(asked(HELLO, "expect: 100-continue", version="HTTP/1.0"))
    yield "expect, upper case", Input(asked(HELLO, "Expect: 100-Continue"))
    yield "expect, other", Input(asked(HELLO, "expect: cake"))
    yield "expect, empty body", Input(asked(b"", "expect: 100-continue"))
    yield "expect, no body", Input(request("GET /health", "expect: 100-continue"))
    yield (
        "expect, upload",
        Input(asked(UPLOAD, FORM, OWN, "expect: 100-continue", path="/v1/files")),
    )
    yield (
        "expect, then nothing",
        Input(request(f"POST {CHAT}", "expect: 100-continue", "content-length: 500"), eof=True),
    )


def _chunks() -> Iterator[tuple[str, Input]]:
    def sent(body: bytes) -> Input:
        return Input(request(f"POST {CHAT}", "transfer-encoding: chunked", body=body))

    size = b"%x" % len(HELLO)
    one = size + b"\r\n" + HELLO + b"\r\n"
    yield "chunks, extension", sent(size + b';a=b;c="d"\r\n' + HELLO + b"\r\n0;e\r\n\r\n")
    yield "chunks, trailers", sent(one + b"0\r\nx-a: b\r\nx-c: d\r\n\r\n")
    yield "chunks, upper case", sent(size.upper() + b"\r\n" + HELLO + b"\r\n0\r\n\r\n")
    yield "chunks, zeros before", sent(b"000" + one + b"000\r\n\r\n")
    yield "chunks of one byte", sent(chunks(HELLO, 1))
    bad = {
        "no size": b"zz\r\n" + HELLO,
        "empty size": b"\r\n" + HELLO,
        "negative size": b"-1\r\n" + HELLO,
        "0x size": b"0x5\r\nhello\r\n0\r\n\r\n",
        "size with underscore": b"1_0\r\n" + HELLO,
        "size with plus": b"+5\r\nhello\r\n0\r\n\r\n",
        "space before size": b" 5\r\nhello\r\n0\r\n\r\n",
        "space after size": b"5 \r\nhello\r\n0\r\n\r\n",
        "bare line feed after size": b"5\nhello\r\n0\r\n\r\n",
        "bare line feed after chunk": b"5\r\nhello\n0\r\n\r\n",
        "bare return after chunk": b"5\r\nhello\rx0\r\n\r\n",
        "longer than its size": b"3\r\nhello\r\n0\r\n\r\n",
        "bare line feed at the end": one + b"0\n\n",
        "bare line feed in trailers": one + b"0\r\nx-a: b\n\r\n",
        "bare return in an extension": size + b";a\rb\r\n" + HELLO + b"\r\n0\r\n\r\n",
        "line feed in an extension": size + b";a\nb\r\n" + HELLO + b"\r\n0\r\n\r\n",
        "NUL in an extension": size + b";a\0b\r\n" + HELLO + b"\r\n0\r\n\r\n",
        "trailer without colon": one + b"0\r\nx-a\r\n\r\n",
        "trailer with a space before its colon": one + b"0\r\nx-a : b\r\n\r\n",
        "trailer of length": one + b"0\r\ncontent-length: 5\r\n\r\n",
        "huge size": b"f" * 15 + b"\r\n" + HELLO,
        "size beyond 64 bits": b"f" * 17 + b"\r\n" + HELLO,
        "endless extension": size + b";a=" + b"b" * 20_000 + b"\r\n" + HELLO + b"\r\n0\r\n\r\n",
        "endless trailer": one + b"0\r\nx-a: " + b"b" * 20_000 + b"\r\n\r\n",
        "many trailers": one + b"0\r\n" + b"x-a: b\r\n" * 500 + b"\r\n",
    }
    for name, body in bad.items():
        yield f"chunks, {name}", sent(body)
    for name, coding in {
        "gzip, chunked": "gzip, chunked",
        "chunked, gzip": "chunked, gzip",
        "chunked twice": "chunked, chunked",
        "identity": "identity",
        "empty": "",
        "unknown": "xchunked",
        "upper case": "Chunked",
        "quoted": '"chunked"',
        "vertical tab": "\x0bchunked",
    }.items():
        yield (
            f"coding {name}",
            Input(request(f"POST {CHAT}", f"transfer-encoding: {coding}", body=chunks(HELLO))),
        )
    yield (
        "coding in two lines",
        Input(
            request(
                f"POST {CHAT}",
                "transfer-encoding: gzip",
                "transfer-encoding: chunked",
                body=chunks(HELLO),
            )
        ),
    )
    yield (
        "coding in 1.0",
        Input(request(f"POST {CHAT} HTTP/1.0", "transfer-encoding: chunked", body=chunks(HELLO))),
    )
    yield "chunks that end early", Input(sent(chunks(HELLO)[:-7]).sent, eof=True)


def _smuggled() -> Iterator[tuple[str, Input]]:
    """What two servers may read in two ways, each with a request behind it."""
    more = {
        "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "equal lengths": b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        "length and chunked": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunked and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        "list of lengths": b"content-length: 5, 5\r\n\r\nhello",
        "signed length": b"content-length: +5\r\n\r\nhello",
        "negative length": b"content-length: -5\r\n\r\nhello",
        "hexadecimal length": b"content-length: 0x5\r\n\r\nhello",
        "empty length": b"content-length: \r\n\r\nhello",
        "length with space": b"content-length: 5 5\r\n\r\nhello",
        "endless length": b"content-length: " + b"0" * 5000 + b"5\r\n\r\nhello",
        "zeros before length": b"content-length: 0000000005\r\n\r\nhello",
        "huge length": b"content-length: 99999999999999999999999\r\n\r\nhello",
        "length of 19 digits": b"content-length: 9999999999999999999\r\n\r\nhello",
        "bare line feed": b"x-a: b\ncontent-length: 5\r\n\r\nhello",
        "bare line feeds": b"x-a: b\n\n",
        "bare return": b"x-a: b\rc\r\ncontent-length: 5\r\n\r\nhello",
        "folded line": b"x-a: b\r\n c\r\ncontent-length: 5\r\n\r\nhello",
        "folded first line": b" x-a: b\r\ncontent-length: 5\r\n\r\nhello",
        "folded length": b"content-length:\r\n 5\r\n\r\nhello",
        "space before colon": b"content-length : 5\r\n\r\nhello",
        "space in name": b"content length: 5\r\n\r\nhello",
        "no name": b": a\r\ncontent-length: 5\r\n\r\nhello",
        "no colon": b"content-length\r\n\r\nhello",
        "NUL in a value": b"x-a: \0\r\ncontent-length: 5\r\n\r\nhello",
        "NUL in a name": b"x-\0a: b\r\ncontent-length: 5\r\n\r\nhello",
        "control in a value": b"x-a: \x01\r\ncontent-length: 5\r\n\r\nhello",
        "DEL in a value": b"x-a: \x7f\r\ncontent-length: 5\r\n\r\nhello",
        "bytes in a name": b"x-\xe9: b\r\ncontent-length: 5\r\n\r\nhello",
        "brackets in a name": b"x(a): b\r\ncontent-length: 5\r\n\r\nhello",
    }
    for name, rest in more.items():
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
        yield f"smuggling, {name}", Input(head + rest + asked(HELLO))
    yield "no host", Input(request(f"POST {CHAT}", host=""))
    yield "no host, a body", Input(asked(HELLO).replace(b"host: x\r\n", b""))
    yield "no host, 1.0", Input(asked(HELLO, version="HTTP/1.0").replace(b"host: x\r\n", b""))
    yield "empty host", Input(asked(HELLO).replace(b"host: x", b"host:"))
    yield "two hosts", Input(asked(HELLO, "host: y"))
    yield (
        "two content-types",
        Input(asked(HELLO, "content-type: application/json", "content-type: text/plain")),
    )
    yield "two user-agents", Input(asked(HELLO, "user-agent: a", "user-agent: b"))
    yield "two authorizations", Input(asked(HELLO, "authorization: a", "authorization: b"))
    yield "sec-websocket-key1", Input(asked(HELLO, "sec-websocket-key1: a"))


def _lines() -> Iterator[tuple[str, Input]]:
    """First lines and heads that are unusual or none."""
    for line in (
        "GET /health HTTP/1.1",
        "get /health HTTP/1.1",
        "GET  /health HTTP/1.1",
        "GET /health  HTTP/1.1",
        " GET /health HTTP/1.1",
        "GET\t/health HTTP/1.1",
        "GET /health\tHTTP/1.1",
        "GET /health HTTP/1.1 ",
        "GET /he alth HTTP/1.1",
        "GET /health",
        "GET /health http/1.1",
        "GET /health HTTP/1.2",
        "GET /health HTTP/2.0",
        "GET /health HTTP/0.9",
        "GET /health HTTP/1.10",
        "GET /health HTTP/11",
        "GET /health HTTPS/1.1",
        "GET /health ICE/1.0",
        "GET health HTTP/1.1",
        "GET http://x/health HTTP/1.1",
        "GET http://x HTTP/1.1",
        "GET HTTP://x:80/health?a=b HTTP/1.1",
        "GET http:///health HTTP/1.1",
        "GET http:/health HTTP/1.1",
        "GET http://[::1/health HTTP/1.1",
        "GET ftp://x/health HTTP/1.1",
        "GET x:80 HTTP/1.1",
        "GET //health HTTP/1.1",
        "GET //x/health HTTP/1.1",
        "GET /health/ HTTP/1.1",
        "GET /health// HTTP/1.1",
        "GET /health?a=b HTTP/1.1",
        "GET /health#a HTTP/1.1",
        "GET /health?a#b HTTP/1.1",
        "GET /%68ealth HTTP/1.1",
        "GET /%zz HTTP/1.1",
        "GET /%ff HTTP/1.1",
        "GET /%2e%2e/health HTTP/1.1",
        "GET /v1/../health HTTP/1.1",
        "GET /h\udce9alth HTTP/1.1",
        "GET /h\u00e9alth HTTP/1.1",
        "GET /\x7f HTTP/1.1",
        "GET /a\"<>b HTTP/1.1",
        "GET / HTTP/1.1",
        "GET * HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "OPTIONS /health HTTP/1.1",
        "CONNECT x:80 HTTP/1.1",
        "CONNECT /health HTTP/1.1",
        "TRACE /health HTTP/1.1",
        "PUT /health HTTP/1.1",
        "PATCH /health HTTP/1.1",
        "DELETE /health HTTP/1.1",
        "QUERY /health HTTP/1.1",
        "PROPFIND /health HTTP/1.1",
        "M-SEARCH /health HTTP/1.1",
        "SOURCE /health HTTP/1.1",
        "PRI * HTTP/1.1",
        "NOTHING /health HTTP/1.1",
        f"DELETE {CHAT} HTTP/1.1",
        "DELETE /v1/models/tiny HTTP/1.1",
        "GET /v1/models HTTP/1.1",
        "GET /v1/models/tiny HTTP/1.1",
        "GET /v1/models/a/b%2Fc HTTP/1.1",
        "GET /v1/models/nope HTTP/1.1",
        "GET /v1/models?a=b HTTP/1.1",
        "GET /v1/unheard-of HTTP/1.1",
        "GET /v1/responses/resp_1 HTTP/1.1",
        "GET /v1/responses/resp_1/input_items?after=a HTTP/1.1",
        "DELETE /v1/responses/resp_1 HTTP/1.1",
        "POST /v1/responses/resp_1/cancel HTTP/1.1",
        "POST /v1/responses/resp_1 HTTP/1.1",
        "GET /v1/regions HTTP/1.1",
        "GET /v1/regions?near=52,13 HTTP/1.1",
        "GET /v1/regions?near=52,13&near=1,1 HTTP/1.1",
        "GET /v1/regions?near HTTP/1.1",
        "GET /v1/regions?near=x HTTP/1.1",
        "GET /v1/regions?naer=52,13 HTTP/1.1",
        "GET /regions HTTP/1.1",
        "GET /regions?near=52,13 HTTP/1.1",
        "GET /regions?near=52,13&near=1,1 HTTP/1.1",
        "GET /regions?near= HTTP/1.1",
        "GET /regions?naer=52%2C13 HTTP/1.1",
        "GET /ready HTTP/1.1",
        "GET /metrics HTTP/1.1",
        "GET /health HTTP/1.0",
        "POST /health HTTP/1.1",
    ):  # fmt: skip
        yield (
            f"line {line!r}",
            Input("\r\n".join((line, "host: x", "", "")).encode("utf-8", "surrogateescape")),
        )
    for path in (
        "/health",
        "/ready",
        "/v1/models",
        "/v1/models/nope",
        "/nothing",
        CHAT,
        "/metrics",
    ):
        yield f"HEAD {path}", Input(request(f"HEAD {path}"), heads=(0,))
    for name, path in {"responses": "/v1/responses/resp_1", "files": "/v1/files"}.items():
        yield f"HEAD of {name}", Input(request(f"HEAD {path}", OWN), heads=(0,))
    yield "no HTTP", Input(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    yield "no header", Input(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
    yield "HTTP/0.9", Input(b"GET /health\r\n\r\n")
    yield "empty lines before", Input(b"\r\n\r\n" + request("GET /health"))
    yield "a line feed before", Input(b"\n" + request("GET /health"))
    yield "empty lines between", Input(request("GET /health") + b"\r\n" + request("GET /health"))
    yield "HTTP/2's preface", Input(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield "HTTP/2's preface, a path", Input(b"PRI / HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield "a request, HTTP/2's preface", Input(asked(HELLO) + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield "long header", Input(request("GET /health", "x-a: " + "a" * 17_000))
    yield "header of 16 KiB", Input(request("GET /health", "x-a: " + "a" * (16 * 1024 - 5)))
    yield "long name", Input(request("GET /health", "x" * 17_000 + ": a"))
    yield "long line", Input(request("GET /health?" + "a" * 17_000))
    yield "long line of work", Input(asked(HELLO, path=CHAT + "?" + "a" * 17_000))
    yield "long head of work", Input(asked(HELLO, *(f"x-{n}: {'a' * 3000}" for n in range(6))))
    yield "endless header", Input(request("GET /health", "x-a: " + "a" * 40_000))
    yield "100 headers", Input(request("GET /health", *(f"x-{n}: 1" for n in range(99))))
    yield "101 headers", Input(request("GET /health", *(f"x-{n}: 1" for n in range(100))))
    yield "101 headers of work", Input(asked(HELLO, *(f"x-{n}: 1" for n in range(99))))
    yield "500 headers", Input(request(f"POST {CHAT}", *(f"x-{n}: 1" for n in range(500))))
    yield "GET with a body", Input(request("GET /health", "content-length: 5", body=b"hello"))
    yield (
        "GET with chunks",
        Input(request("GET /health", "transfer-encoding: chunked", body=chunks(b"hello"))),
    )
    yield "no path, a body", Input(asked(b"hello", path="/nothing"))
    yield "no path, a large body", Input(asked(b"x" * 300_000, path="/nothing"))
    yield "too large", Input(request(f"POST {CHAT}", f"content-length: {BODY_BYTES_MAX + 1}"))
    websocket = "upgrade: websocket", "connection: upgrade"
    for path in (CHAT, "/v1/responses", "/v1/realtime"):
        yield f"websocket at {path}", Input(request(f"GET {path}", *websocket))
    yield "WebSocket", Input(request(f"GET {CHAT}", "Upgrade: WebSocket", "connection: Upgrade"))
    yield "websocket, no connection", Input(asked(HELLO, "upgrade: websocket"))
    yield "websocket and a body", Input(asked(HELLO, *websocket))
    yield (
        "upgrade to h2c, health",
        Input(request("GET /health", "connection: upgrade, http2-settings", "upgrade: h2c")),
    )


def _connections() -> Iterator[tuple[str, Input]]:
    get = request("GET /health")
    slash = asked(HELLO, path=CHAT + "/")
    yield "pipeline", Input(asked(HELLO) + get + chunked(HELLO) + asked(STREAM) + get + get + slash)
    yield "pipeline of 30", Input(get * 30)
    yield "pipeline of work", Input(asked(HELLO) * 5)
    yield "pipeline with an error", Input(asked(b"{") + get + asked(HELLO))
    yield "pipeline with a bad head", Input(get + b"GET /health HTTP/1.1\r\nbad\r\n\r\n" + get)
    yield "pipeline of uploads", Input(asked(UPLOAD, FORM, OWN, path="/v1/files") * 2 + get)
    yield "close, then more", Input(asked(HELLO, "connection: close") + get)
    yield "close by GET, then more", Input(request("GET /health", "connection: close") + get)
    yield "Close, TE", Input(request("GET /health", "connection: TE, Close") + get)
    for version in ("HTTP/1.0", "HTTP/1.1"):
        for value in ("keep-alive", "close", "Keep-Alive", "keep-alive, close", "foo"):
            yield (
                f"{version} {value}",
                Input(request(f"GET /health {version}", f"connection: {value}")),
            )
            yield (
                f"{version} {value}, work",
                Input(asked(HELLO, f"connection: {value}", version=version)),
            )
            yield (
                f"{version} {value}, stream",
                Input(asked(STREAM, f"connection: {value}", version=version)),
            )
    yield "proxy-connection", Input(request("GET /health", "proxy-connection: close"))
    yield "nothing", Input(b"", eof=True)
    yield "half a line", Input(b"GET /hea", eof=True)
    yield "half a head", Input(request("GET /health")[:-2], eof=True)
    yield "half a body", Input(asked(HELLO)[:-5], eof=True)
    yield "half a body by the other path", Input(asked(HELLO, path=CHAT + "/")[:-5], eof=True)
    yield "half a large body", Input(asked(LARGE)[:-5], eof=True)
    yield "half a gzip", Input(asked(LARGE, "content-encoding: gzip")[:-5], eof=True)
    yield "half an upload", Input(asked(UPLOAD, FORM, OWN, path="/v1/files")[:-5], eof=True)


def _cors() -> Iterator[tuple[str, Input]]:
    asks = "access-control-request-method: POST", "access-control-request-headers: x-a, x-b"
    for origin in (ORIGIN, "https://other.example", "null"):
        of = f"origin: {origin}"
        yield f"preflight of {origin}", Input(request(f"OPTIONS {CHAT}", of, *asks))
        yield (
            f"preflight of {origin}, file",
            Input(request(f"OPTIONS /v1/files/{NO_FILE}", of, *asks)),
        )
        yield f"no preflight of {origin}", Input(request(f"OPTIONS {CHAT}", of))
        yield f"models for {origin}", Input(request("GET /v1/models", of))
        yield f"no path for {origin}", Input(request("GET /nothing", of))
        yield f"stream for {origin}", Input(asked(STREAM, of))
    yield "preflight of nobody", Input(request(f"OPTIONS {CHAT}", *asks))
    yield "preflight without a path", Input(request("OPTIONS /nothing", f"origin: {ORIGIN}", *asks))


def _files(file_id: str) -> Iterator[tuple[str, Input]]:
    """Files and batches; `file_id`: of FILE, stored for KEY."""
    files, batches = "/v1/files", "/v1/batches"
    yield "upload", Input(asked(UPLOAD, FORM, OWN, path=files))
    yield "upload, chunked", Input(chunked(UPLOAD, FORM, OWN, path=files))
    yield (
        "upload again",
        Input(asked(UPLOAD, FORM, OWN, f"idempotency-key: {FILE_KEY}", path=files)),
    )
    yield (
        "upload, two keys",
        Input(asked(UPLOAD, FORM, OWN, "idempotency-key: a", "idempotency-key: b", path=files)),
    )
    yield "upload, nobody's", Input(asked(UPLOAD, FORM, path=files))
    yield "upload, no form", Input(asked(FILE, OWN, path=files))
    yield "upload, cut", Input(asked(UPLOAD[:-8], FORM, OWN, path=files))
    yield (
        "upload, gzip",
        Input(
            asked(gzip.compress(UPLOAD, mtime=0), FORM, OWN, "content-encoding: gzip", path=files)
        ),
    )
    yield "upload, a query", Input(asked(UPLOAD, FORM, OWN, path=files + "?a=1"))
    yield "upload, another boundary", Input(asked(form(boundary="b1"), FORM, OWN, path=files))
    yield (
        "upload, too large",
        Input(request("POST /v1/files", FORM, OWN, "content-length: 900000000000")),
    )
    parts = {
        "no file": (('name="purpose"', b"batch"),),
        "no purpose": (('name="file"', FILE),),
        "other purpose": (('name="purpose"', b"vision"), ('name="file"', FILE)),
        "unknown field": (('name="porpose"', b"batch"), ('name="file"', FILE)),
        "twice": (('name="purpose"', b"batch"), ('name="purpose"', b"batch")),
        "no name": (("a=b", b"batch"),),
    }
    for name, fields in parts.items():
        yield f"upload, {name}", Input(asked(form(*fields), FORM, OWN, path=files))
        yield f"upload, {name}, chunked", Input(chunked(form(*fields), FORM, OWN, path=files))
    for name, line in {
        "retrieve": f"GET {files}/{file_id}",
        "retrieve, slash": f"GET {files}/{file_id}/",
        "retrieve, unknown": f"GET {files}/{NO_FILE}",
        "delete, unknown": f"DELETE {files}/{NO_FILE}",
        "list, bad limit": f"GET {files}?limit=0",
        "list, bad order": f"GET {files}?order=up",
        "list, unknown query": f"GET {files}?after_=x",
        "list, twice": f"GET {files}?order=asc&order=asc",
        "list of another purpose": f"GET {files}?purpose=batch_output",
        "list, percent": f"GET {files}?purpose=batch%5Foutput",
        "list, plus": f"GET {files}?purpose=a+b",
        "content": f"GET {files}/{file_id}/content",
        "content, a query": f"GET {files}/{file_id}/content?a=b",
        "content, unknown": f"GET {files}/{NO_FILE}/content",
        "put": f"PUT {files}/{file_id}",
        "batches": f"GET {batches}",
        "batch, unknown": f"GET {batches}/batch_0",
        "cancel, unknown": f"POST {batches}/batch_0/cancel",
    }.items():
        yield f"files, {name}", Input(request(line, OWN))
    yield "files, stranger's", Input(request(f"GET {files}/{file_id}", "authorization: Bearer b"))
    yield "files, nobody's", Input(request(f"GET {files}/{file_id}"))
    yield "HEAD content", Input(request(f"HEAD {files}/{file_id}/content", OWN), heads=(0,))
    for wanted in ("0-4", "5-", "-5", "1-0", "99-", "0-0,5-6", "a-b", "0-99", "-0"):
        line = f"GET {files}/{file_id}/content"
        yield f"range {wanted}", Input(request(line, OWN, f"range: bytes={wanted}"))
    yield (
        "range, 1.0",
        Input(request(f"GET {files}/{file_id}/content HTTP/1.0", OWN, "range: bytes=1-4")),
    )
    yield (
        "range, other etag",
        Input(request(f"GET {files}/{file_id}/content", OWN, "range: bytes=1-4", 'if-range: "x"')),
    )
    for name, body in {
        "no JSON": b"{",
        "no object": b"[]",
        "unknown field": b'{"input_file":"x"}',
        "nothing": b"{}",
        "no file": orjson.dumps(
            {"input_file_id": NO_FILE, "endpoint": CHAT, "completion_window": "24h"}
        ),
        "large": b"{" + b" " * 200_000,
    }.items():
        yield f"batch, {name}", Input(asked(body, OWN, path=batches))
        yield f"batch, {name}, chunked", Input(chunked(body, OWN, path=batches, size=4096))


def inputs(file_id: str = NO_FILE) -> dict[str, Input]:
    """All, by their names."""
    found: dict[str, Input] = {}
    for part in (
        _work(), _encodings(), _expect(), _chunks(), _smuggled(), _lines(), _connections(),
        _cors(), _files(file_id),
    ):  # fmt: skip
        for name, sent in part:
            assert name not in found, name
            found[name] = sent
    return found


# Sending.


def whole(sent: bytes) -> list[bytes]:
    return [sent] if sent else []


def single_bytes(sent: bytes) -> list[bytes]:
    head, rest = sent[:SINGLE_BYTES], sent[SINGLE_BYTES:]
    pieces = [head[at : at + 1] for at in range(len(head))]
    return pieces + [rest[at : at + 4096] for at in range(0, len(rest), 4096)]


def cut_at_random(sent: bytes, seed: str) -> list[bytes]:
    dice = random.Random(seed)
    count = min(len(sent), dice.choice((1, 2, 3, 8, 20)))
    # Mostly in the head, where most decisions are.
    upto = [len(sent), min(len(sent), 400)]
    places = sorted({dice.randrange(dice.choice(upto) or 1) for _ in range(count)} - {0})
    return [sent[a:b] for a, b in zip([0, *places], [*places, len(sent)], strict=True) if b > a]


async def exchanged(url: str, one: Input, pieces: list[bytes]) -> bytes:
    """All that a server answers to an input in these pieces, until the connection is closed.

    A server may wait for the rest of a body after its last answer; that is not waited for.
    """
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socket.create_connection((host, int(port))) as plug:
        plug.setblocking(False)
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(PATIENCE_S):
            reading = asyncio.create_task(_read(plug, one))
            with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
                for piece in (*pieces, *(() if one.eof else (LAST,))):
                    await loop.sock_sendall(plug, piece)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                if one.eof:
                    plug.shutdown(socket.SHUT_WR)
            return await reading


async def _read(plug: socket.socket, one: Input) -> bytes:
    got, loop = bytearray(), asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                more = await asyncio.wait_for(loop.sock_recv(plug, 65536), QUIET_S)
            except TimeoutError:
                if _says_close(bytes(got), one.heads):
                    break
                continue
            if not more:
                break
            got += more
    return bytes(got)


def _says_close(got: bytes, heads: tuple[int, ...]) -> bool:
    """Whether the last answer is the connection's last."""
    found, _ = answers(got, heads)
    return bool(found) and "close" in found[-1].headers.get("connection", "")


# Reading what came back.

_VOLATILE = (
    (re.compile(rb"(file-|batch_)[0-9a-f]{32}"), rb"\1*"),
    (re.compile(rb'"(created_at|expires_at|created|last_seen|since)":[0-9.]+'), rb'"\1":0'),
)


def outcome(got: bytes, heads: tuple[int, ...] = ()) -> list[str]:
    """Each answer as a line of text, without what changes from one run to the next; last whether
    the connection was closed before LAST was answered."""
    found, is_closed = answers(got, heads)
    return [*map(_shown, found), "closed" if is_closed else "open"]


def essence(shown: list[str]) -> list[str]:
    """An outcome without what depends on how its input is cut: whether a client is told to send its
    body, and whether an answer came before the body, and was the connection's last."""
    kept = (one.replace(" | connection: close", "") for one in shown[:-1])
    return [one.replace(", close", "") for one in kept if not one.startswith("1.1 100")]


def answers(got: bytes, heads: tuple[int, ...] = ()) -> tuple[list[Answer], bool]:
    """All but that to LAST; and whether there was none to that."""
    found: list[Answer] = []
    while got:
        head, end, got = got.partition(b"\r\n\r\n")
        status, *lines = head.decode("utf-8", "replace").split("\r\n")
        if not end or not status.startswith("HTTP/"):
            found.append(Answer("cut", {}, head))
            break
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, line
            headers[name.lower()] = value
        if status.startswith("HTTP/1.1 100"):
            found.append(Answer(status, headers, b""))
            continue
        body, got = _body(headers, got, is_head=len(found) in heads)
        if headers.get("x-request-id") == "last":
            assert not got
            return found, False
        found.append(Answer(status, headers, body))
    return found, True


def _body(headers: dict[str, str], got: bytes, *, is_head: bool) -> tuple[bytes, bytes]:
    if is_head or ("content-length" not in headers and "content-type" not in headers):
        return b"", got
    if "content-length" in headers:
        size = int(headers["content-length"])
        return got[:size], got[size:]
    if headers.get("transfer-encoding") != "chunked":
        return got, b""
    body = b""
    while True:
        line, _, got = got.partition(b"\r\n")
        size = int(line or b"0", 16)
        body, got = body + got[:size], got[size + 2 :]
        if size == 0:
            return body, got


def _shown(answer: Answer) -> str:
    headers = {name: value for name, value in answer.headers.items() if name not in CHANGES}
    if answer.headers.get("x-request-id") == "mine":
        headers["x-request-id"] = "mine"
    if H_DECISION in headers:
        headers[H_DECISION] = " ".join(sorted(orjson.loads(headers[H_DECISION])))
    if "etag" in headers:
        headers["etag"] = "*"
    lines = [f"{name}: {value}" for name, value in sorted(headers.items())]
    return " | ".join((answer.status.removeprefix("HTTP/"), *lines, _body_shown(answer)))


def _body_shown(answer: Answer) -> str:
    """The code of an error; the hash of anything else."""
    kind, body = answer.headers.get("content-type", ""), answer.body
    if kind.startswith(("text/plain; version", "application/openmetrics")):
        return "the metrics page"
    if b'"error"' in body and kind == "application/json":
        error = orjson.loads(body)["error"]
        return f"{error['type']} {error.get('code')} {error.get('param')}"
    if b'"warm_for_s"' in body:
        return "ready"
    for pattern, instead in _VOLATILE:
        body = pattern.sub(instead, body)
    return f"{len(body)} bytes, {zlib.crc32(body):x}" if body else ""
