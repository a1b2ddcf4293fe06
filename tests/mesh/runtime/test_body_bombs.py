"""Bodies that become large, or take long to read: a real router keeps its memory and its time."""

import asyncio
import contextlib
import gzip
import re
import time
from pathlib import Path

import aiohttp

from infra.process import end_all
from schemas.exchange import BODY_BYTES_MAX
from tests.support.raw_http import connections
from tests.support.router_process import router_process

CHAT = "/v1/chat/completions"
ATTACKERS = 18  # two or more beyond what fits
MEMORY_MIB_MAX = 900  # 512 of bodies, one being put together, and the router itself
HEALTH_S_MAX = 5.0  # where nobody may stand still for more than 2 s
TRAILER_BYTES = 8  # of gzip
SLOW_BYTES = 3 * 1024**2  # a fifth of a second or more of reading: READ_S_MAX is far
ANSWERED_MEANWHILE = 6  # of some twenty; were nobody, two might be on their way already
BEGIN, END = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]', b"}"


def bomb() -> bytes:
    """A chat of the largest legal size, most of it spaces, in 32 KB."""
    spaces = b" " * (BODY_BYTES_MAX - len(BEGIN) - len(END))
    return gzip.compress(BEGIN + spaces + END, mtime=0)


def peak_mib(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


class Health:
    """How long a router took to say that it is alive, again and again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task: asyncio.Task[None] | None = None
        self.took: list[float] = []

    async def __aenter__(self) -> "Health":
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await end_all([self._task])

    async def more(self, times: int) -> None:
        """Wait until it has been asked so many times again."""
        wanted = len(self.took) + times
        while len(self.took) < wanted:
            assert self._task is not None and not self._task.done(), self._task
            await asyncio.sleep(0.01)

    async def _ask(self) -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                began = time.monotonic()
                async with session.get(self._url + "/health") as answer:
                    assert answer.status == 200
                self.took.append(time.monotonic() - began)
                await asyncio.sleep(0.01)


async def status_of(reader: asyncio.StreamReader) -> int:
    """0 of a connection that was cut without an answer."""
    with contextlib.suppress(ConnectionError):
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    return 0


async def test_many_bombs_take_bounded_memory(nats_server, tmp_path):
    body = bomb()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    options = ("--hold-s", "1")
    async with router_process(tmp_path, nats_server.url, *options, workers=1) as router:
        await router.until_answers("/health")
        async with connections(router.url, ATTACKERS) as pairs, Health(router.page(0)) as health:
            for _, writer in pairs:
                writer.write(head.encode() + body[:-TRAILER_BYTES])
            await health.more(50)
            for _, writer in pairs:
                writer.write(body[-TRAILER_BYTES:])
            statuses = await asyncio.gather(*(status_of(reader) for reader, _ in pairs))
        peak, longest_s = peak_mib(router.pid), max(health.took)
    print(f"peak {peak:.0f} MiB, /health {longest_s:.3f} s of {len(health.took)}, {statuses}")
    assert peak < MEMORY_MIB_MAX
    assert longest_s < HEALTH_S_MAX
    assert set(statuses) <= {429, 503}


async def test_others_are_answered_while_a_body_that_takes_long_is_read(nats_server, tmp_path):
    lists = b"[]," * (SLOW_BYTES // 3)
    body = b'{"model":7,"messages":[' + lists + b"[]]}"  # a 400, as soon as it is read
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    async with router_process(tmp_path, nats_server.url, workers=1) as router:
        await router.until_answers("/health")
        async with connections(router.url, 1) as [(reader, writer)]:
            writer.write(head.encode() + body[:-1])
            await writer.drain()
            async with Health(router.page(0)) as health:
                await health.more(10)
                before = len(health.took)
                writer.write(body[-1:])
                status = await status_of(reader)
                meanwhile = len(health.took) - before
    print(f"/health was answered {meanwhile} times")
    assert status == 400
    assert meanwhile >= ANSWERED_MEANWHILE
