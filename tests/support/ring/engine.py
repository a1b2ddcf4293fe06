"""An inference engine in memory: HTTP/1.1 responses by what a request's body asks for.

Every answer has a stamp of its own in each of its events, and what it said is kept: so a client's
bytes can be held against it.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """What an engine said to one request, as far as it got. `status`: of HTTP."""

    number: int
    stamp: str
    status: int = 200
    said: bytes = b""
    is_whole: bool = False


def event(stamp: str, index: int, size: int) -> bytes:
    """The event of one token, of about that many bytes."""
    text = f"<{stamp}:{index}>".ljust(size, "x")
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class Engine:
    """One replica's engine. It outlives its agents."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, dice: Random) -> None:
        self.name, self.loop, self.dice = name, loop, dice
        self.answers: list[Answer] = []
        self.open: list[EngineConnection] = []

    def connect(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        connection = EngineConnection(self, protocol)
        self.open.append(connection)
        return connection

    def asked(self, connection: "EngineConnection", body: bytes) -> None:
        """A whole request has arrived."""
        wanted = json.loads(body)
        stamp = f"{self.name}.{len(self.answers)}"
        answer = Answer(wanted["n"], stamp)
        self.answers.append(answer)
        self.loop.create_task(getattr(self, f"_{wanted['kind']}")(connection, answer, wanted))

    async def _stream(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        await self._events(to, answer, wanted, wanted["events"])
        if not to.is_over:
            self._say(to, answer, DONE)
            to.send(b"0\r\n\r\n")
            answer.is_whole = True

    async def _cut(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        await self._events(to, answer, wanted, wanted["events"] // 2)
        to.end()

    async def _stall(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        """It begins, and says no more."""
        await self._events(to, answer, wanted, wanted["events"] // 2)

    async def _plain(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        await asyncio.sleep(wanted["gap_s"])
        text = f"<{answer.stamp}>".ljust(wanted["size"] * wanted["events"], "y")
        self._whole(to, answer, json.dumps({"text": text}).encode())

    async def _error(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        await asyncio.sleep(wanted["gap_s"])
        answer.status = 500
        self._whole(to, answer, b'{"error": "it broke"}')

    async def _hang(self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any]) -> None:
        """It takes the request and says nothing."""

    async def _events(
        self, to: "EngineConnection", answer: Answer, wanted: dict[str, Any], count: int
    ) -> None:
        for index in range(count):
            await asyncio.sleep(wanted["gap_s"])
            while to.is_paused and not to.is_over:  # a full socket
                await asyncio.sleep(0.05)
            if to.is_over:
                return
            if index == 0:
                to.send(STREAM_HEAD)
            self._say(to, answer, event(answer.stamp, index, wanted["size"]))

    def _say(self, to: "EngineConnection", answer: Answer, data: bytes) -> None:
        answer.said += data
        to.send(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, to: "EngineConnection", answer: Answer, body: bytes) -> None:
        if not to.is_over:
            answer.said, answer.is_whole = body, True
            head = f"HTTP/1.1 {answer.status} Odd\r\nContent-Type: application/json\r\n"
            to.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


class EngineConnection(asyncio.Transport):
    """The agent's end of one connection. Sends are cut into two pieces now and then."""

    def __init__(self, engine: Engine, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._engine, self._protocol = engine, protocol
        self._request = b""
        self._unread: list[bytes] = []
        self.is_paused = self.is_over = False

    def send(self, data: bytes) -> None:
        """The engine sends."""
        at = self._engine.dice.randrange(len(data)) if self._engine.dice.random() < 0.1 else 0
        self._unread += [piece for piece in (data[:at], data[at:]) if piece]
        self._pass_on()

    def end(self) -> None:
        """The engine closes it."""
        if not self.is_over:
            self._over()

    def _pass_on(self) -> None:
        while self._unread and not (self.is_paused or self.is_over):
            self._protocol.data_received(self._unread.pop(0))

    def _over(self) -> None:
        self.is_over = True
        self._engine.open.remove(self)
        self._engine.loop.call_soon(self._protocol.connection_lost, None)

    # asyncio.Transport.

    def write(self, data: Any) -> None:
        self._request += data
        head, found, body = self._request.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if found and len(body) >= length:
            self._request = b""
            self._engine.asked(self, body)

    def writelines(self, list_of_data: Sequence[Any]) -> None:  # type: ignore[override]
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over

    def abort(self) -> None:
        self.end()

    def close(self) -> None:
        self.end()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        self._pass_on()
