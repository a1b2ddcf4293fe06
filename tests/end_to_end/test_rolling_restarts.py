"""Routers, agents and the nats-server of a region are restarted in turn, under load over kept
connections and with requests that are sent early: none fails."""

import asyncio
import os
import re
import signal
from collections import Counter

import orjson
import pytest

from infra.process import end_all
from tests.end_to_end.test_drain import is_ready
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.until import until

pytestmark = pytest.mark.drill

ROUTERS = ("r1", "r2")
AGENTS = ("agent-us-0", "agent-us-1")
RESTARTED = ("nats-us", *(f"router-us-{name}" for name in ROUTERS), *AGENTS)
MET = 30  # answers between two of them
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Load:
    """Clients that keep their connections; `ends` counts answers by what was going on."""

    def __init__(self, mesh: MeshUp) -> None:
        self.spell = "nothing"
        self.ends: Counter[tuple[str, str]] = Counter()
        self.told_to_close = self.sent_again = 0
        self._places = [
            mesh.endpoint("us", name).removeprefix("http://").split(":") for name in ROUTERS
        ]
        self._model = mesh.model

    @property
    def answered(self) -> int:
        return self.ends.total()

    async def client(self, number: int, early: int) -> None:
        """Asks for ever, `early` requests at once; a refused connection means the other router."""
        at, left = number, 0
        while True:
            host, port = self._places[at % len(self._places)]
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                at += 1
                await asyncio.sleep(0.02)
                continue
            try:
                while await self._ask(reader, writer, early):
                    pass
            finally:
                writer.transport.abort()
            left += 1
            at += left % 2  # not always to the router that comes first

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, early: int
    ) -> bool:
        """Whether the connection goes on."""
        spell = self.spell
        writer.write(b"".join(self._request() for _ in range(early)))
        for number in range(early):
            try:
                head, body = await answer(reader)
            except (OSError, asyncio.IncompleteReadError) as problem:
                # RFC 9112, 9.3.2: who sends early has to send again what has no answer when a
                # connection ends after another one.
                if number:
                    self.sent_again += early - number
                else:
                    self.ends[spell, f"cut: {type(problem).__name__}"] += 1
                return False
            whole = b" 200 " in head[:20] and body.endswith(b"data: [DONE]\n\n")
            ended = "whole" if whole and b'"error"' not in body else repr(head[9:12] + body[-300:])
            self.ends[spell, ended] += 1
            if b"\r\nconnection: close" in head.lower():
                self.told_to_close += 1
                self.sent_again += early - number - 1
                return False
        await asyncio.sleep(0.02)
        return True

    def _request(self) -> bytes:
        message = {"role": "user", "content": os.urandom(8).hex()}
        asked = {"model": self._model, "messages": [message], "max_tokens": 8, "stream": True}
        body = orjson.dumps(asked)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        return (head % len(body)).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and whole body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if (length := _LENGTH.search(head)) is not None:
        return head, await reader.readexactly(int(length[1]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return head, body


async def test_restarts_in_turn_fail_no_request(tmp_path):
    config = write_config(tmp_path, regions=("us",), replicas=2, routers=ROUTERS)
    async with mesh_up(tmp_path, config=config) as mesh:
        load = Load(mesh)
        clients = [asyncio.create_task(load.client(n, 1 if n % 2 else 3)) for n in range(6)]
        try:
            for name in RESTARTED:
                load.spell = name.partition("-")[0]
                await restart(mesh, name)
                before = load.answered
                await until(lambda b=before: load.answered >= b + MET)
        finally:
            await end_all(clients)
            print(dict(load.ends), f"told to close {load.told_to_close}", load.sent_again)
    failed = {what: count for what, count in load.ends.items() if what[1] != "whole"}
    assert failed == {}
    assert load.told_to_close


async def restart(mesh: MeshUp, name: str) -> None:
    """As a service manager does; returns when it serves again."""
    old = mesh.record["processes"][name]
    os.kill(old, signal.SIGTERM)
    await until(lambda: mesh.record["processes"].get(name, old) != old)
    for router in ROUTERS:
        await is_ready(mesh.endpoint("us", router))
