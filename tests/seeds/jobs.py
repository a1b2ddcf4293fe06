"""A client of batch jobs: uploads a file, creates a job, waits for its end, downloads its files."""

import asyncio
import json
from typing import Any

import httptools

from tests.seeds.loop import VirtualLoop
from tests.seeds.sockets import Sockets
from tests.seeds.world import Line

BOUNDARY = "b0undary"
CALL_S = 12.0
AGAIN_S = 1.0


class Call(asyncio.Protocol):
    """One request on a connection of its own. `answer`: its status and body; (0, b"") if none."""

    def __init__(self, head: str, body: bytes) -> None:
        self._data = f"{head}\r\nhost: mesh\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(0, b"")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self._end(self._parser.get_status_code(), self._body)
        self.transport.close()

    def _end(self, status: int, body: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result((status, body))


class Job:
    """`job`: its record as it was seen last, once its creation was acknowledged; `lines`: of its
    output file and error file, by `custom_id`, how often each was there and what it says."""

    def __init__(self, loop: VirtualLoop, sockets: Sockets, line: Line) -> None:
        self.loop, self.sockets, self.line = loop, sockets, line
        self.record: dict[str, Any] = {}
        self.lines: list[tuple[str, int, str]] = []
        self.is_read = False

    async def run(self) -> None:
        """Until its files are read; a call that fails is made again."""
        form = (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
            f"{self._input()}\r\n--{BOUNDARY}--\r\n"
        )
        kind = f"content-type: multipart/form-data; boundary={BOUNDARY}"
        file = await self._until_good("POST /v1/files", form.encode(), kind)
        wanted = {"input_file_id": json.loads(file)["id"], "completion_window": "24h"}
        body = json.dumps(wanted | {"endpoint": "/v1/chat/completions"}).encode()
        kind = "content-type: application/json"
        self.record = json.loads(await self._until_good("POST /v1/batches", body, kind))
        while self.record["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(AGAIN_S)
            self.record = json.loads(await self._until_good(f"GET /v1/batches/{self.record['id']}"))
        for name in ("output_file_id", "error_file_id"):
            if file_id := self.record.get(name):
                content = await self._until_good(f"GET /v1/files/{file_id}/content")
                self.lines += map(read, content.splitlines())
        self.is_read = True

    def _input(self) -> str:
        of = self.line
        lines = []
        for number in self.numbers:
            content = f"n={number} tokens={of.of.get('tokens', 3)} gap={of.of.get('gap', 0.01)}"
            body = {"model": of.of["model"], "messages": [{"role": "user", "content": content}]}
            url = {"method": "POST", "url": "/v1/chat/completions"}
            lines.append(json.dumps({"custom_id": str(number), **url, "body": body}))
        return "\n".join(lines)

    @property
    def numbers(self) -> range:
        """Of its lines, beside those of asks."""
        first = 1000 * int(self.line.number("n"))
        return range(first, first + int(self.line.number("lines")))

    async def _until_good(self, what: str, body: bytes = b"", kind: str = "accept: */*") -> bytes:
        while True:
            key = self.line.of.get("key", "nobody's")
            call = Call(f"{what} HTTP/1.1\r\nauthorization: Bearer {key}\r\n{kind}", body)
            try:
                self.sockets.connect(self.line.of["router"], call)
                async with asyncio.timeout(CALL_S):
                    status, answer = await call.answer
                if status == 200:
                    return answer
            except (OSError, TimeoutError):
                if call.transport is not None:
                    call.transport.abort()
            await asyncio.sleep(AGAIN_S)


def read(line: bytes) -> tuple[str, int, str]:
    """Of a line of an output or error file: its custom_id, status and answer."""
    fields = json.loads(line)
    response = fields.get("response") or {}
    choices = (response.get("body") or {}).get("choices") or [{"message": {"content": ""}}]
    return fields["custom_id"], response.get("status_code", 0), choices[0]["message"]["content"]
