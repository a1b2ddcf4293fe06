"""One client: its request, what it was sent, and how that ended."""

import asyncio
import json
from typing import Any

import httptools

from tests.seeds.loop import VirtualLoop
from tests.seeds.sockets import Sockets
from tests.seeds.world import Line

STREAM_END = b"\n\n"


class Client(asyncio.Protocol):
    """`outcome`: "ok", "left", "lost" (the connection ended too soon), "unreached", or an error's
    code; None while it waits. `ends`: how often it was told an end."""

    def __init__(self, loop: VirtualLoop, ask: Line, before: "Client | None" = None) -> None:
        """`before`: whose answer it goes on with."""
        self.before, self.response = before, ""
        self.loop, self.ask = loop, ask
        self.number = int(ask.number("n"))
        self.sent_at, self.ended_at = loop.time(), 0.0
        self.first_at: float | None = None
        self.outcome: str | None = None
        self.ends = 0
        self.status = 0
        self.text = ""
        self.detail = ""
        self.headers: dict[str, str] = {}
        self.is_done = False
        self._error = ""
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)
        self.transport: Any = None

    def open(self, sockets: Sockets) -> None:
        try:
            sockets.connect(self.ask.of["router"], self)
        except OSError:
            self._end("unreached")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, ask = transport, self.ask
        answer = f"n={self.number} tokens={ask.of.get('tokens', 3)} gap={ask.of.get('gap', 0.005)}"
        content = f"{answer} {'p' * int(ask.number('pad'))}"
        body: dict[str, object] = {"model": ask.of["model"], "stream": "plain" not in ask.of}
        body["messages"] = [{"role": "user", "content": content}]
        body["max_tokens"] = 1000
        path = "chat/completions"
        if "responses" in ask.of:
            path, body = "responses", {"model": ask.of["model"], "input": content}
            if self.before is not None and self.before.response:
                body["previous_response_id"] = self.before.response
        if "stamp" in ask.of:
            body["logprobs"] = True
        head = [
            f"POST /v1/{path} HTTP/1.1",
            "host: mesh",
            "content-type: application/json",
        ]
        head.append(f"x-request-id: q{self.number}")
        names = {
            "wants": "x-mesh-residency", "timeout": "x-mesh-timeout-s",
            "slo_ms": "x-mesh-slo-ttft-ms",
            "priority": "x-mesh-priority", "session": "x-mesh-session",
        }  # fmt: skip
        if "key" in ask.of:
            head.append(f"authorization: Bearer {ask.of['key']}")
        head += [f"{names[name]}: {value}" for name, value in ask.of.items() if name in names]
        data = json.dumps(body).encode()
        head.append(f"content-length: {len(data)}\r\n\r\n")
        self.transport.write("\r\n".join(head).encode() + data)
        if "leaves" in ask.of:
            self.loop.call_later(ask.number("leaves"), self._leave)

    def _leave(self) -> None:
        if self.outcome is None:
            self._end("left")
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.outcome == "left":
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as problem:
            self._end(f"unreadable: {problem}")
            self.transport.abort()
        if every_s := self.ask.number("reads_every"):
            self.transport.pause_reading()
            self.loop.call_later(every_s, self.transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.outcome is None:
            self._end("lost")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body += data
        if "event-stream" not in self.headers.get("content-type", ""):
            return
        *events, self._body = self._body.split(STREAM_END)
        for event in events:
            self._event(event)

    def _event(self, event: bytes) -> None:
        if not event.startswith(b"data: "):
            return
        data = event[6:]
        if self.is_done or self._error:
            self.detail = f"after its end: {data[:80]!r}"
            self.ends += 1
        if data == b"[DONE]":
            self.is_done = True
            return
        fields = json.loads(data)
        if error := fields.get("error"):
            self._error = str(error.get("code") or error.get("message"))
            self.detail = str(error.get("message"))
            return
        for choice in fields.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            if text and self.first_at is None:
                self.first_at = self.loop.time()
            self.text += text

    def on_message_complete(self) -> None:
        if "event-stream" in self.headers.get("content-type", ""):
            self._end("ok" if self.is_done else self._error or "no [DONE]")
            return
        try:
            fields = json.loads(self._body)
        except ValueError:
            self._end("no JSON")
            return
        if error := fields.get("error"):
            self.detail = str(error.get("message"))
            self._end(str(error.get("code")))
        else:
            self.response = fields["id"] if "output" in fields else ""
            of = fields["output"][0]["content"][0] if self.response else fields["choices"][0]
            self.text = of["text"] if self.response else of["message"]["content"]
            self._end("ok")

    def _end(self, outcome: str) -> None:
        self.ends += 1
        if self.outcome is None:
            self.outcome, self.ended_at = outcome, self.loop.time()
            if self.transport is not None:
                self.transport.close()
