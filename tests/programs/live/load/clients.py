"""Clients of one HTTP endpoint, as a process that costs little: raw sockets, requests made before.

    python -m tests.programs.live.load.clients --port 8101 --connections 64 --seconds 10

In a closed loop, every connection asks again when it has its answer; with --rate, requests leave
when their time has come, over whichever connection is free. Prints one line of JSON: how many were
answered with which status (`failed`: without one), latencies, how late requests left when none of
their connections was to blame, and the CPU time that all this took here.
"""

import asyncio
import re
import statistics
import time
from collections import Counter
from random import Random

import click
import orjson
import uvloop

CHARS_A_BLOCK = 256
SYSTEM_PROMPTS = 32
STATUS = re.compile(rb"^HTTP/1.1 (\d+) ")
FAILED = "failed"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
AGAIN_S = 0.01  # after a failure: on a closed port a failure takes no time at all

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Asks:
    """The requests: a beginning that others share, and an end of its own."""

    def __init__(self, port: int, prompt_blocks: int, tokens: int, seed: int) -> None:
        self._dice, self._port = Random(seed), port
        own = max(1, prompt_blocks // 4)
        shared = prompt_blocks - own
        self._beginnings = [
            f"{n:04}".ljust(shared * CHARS_A_BLOCK, "s") for n in range(SYSTEM_PROMPTS)
        ]
        self._own_chars = own * CHARS_A_BLOCK
        self._stream = {"stream": True} if tokens > 1 else {}
        self._tokens = tokens

    def next(self) -> bytes:
        """One HTTP request."""
        own = f"{self._dice.getrandbits(64):016x}".ljust(self._own_chars, "o")
        content = self._dice.choice(self._beginnings) + own
        body = orjson.dumps({
            "model": "tiny", **self._stream, "max_tokens": self._tokens,
            "messages": [{"role": "user", "content": content}],
        })  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Load:
    """What became of all requests."""

    def __init__(self, port: int, asks: Asks) -> None:
        self._port, self._asks = port, asks
        self.statuses: Counter[str] = Counter()
        self.took_s: list[float] = []
        self.late_s: list[float] = []

    async def closed(self, connections: int, seconds: float) -> None:
        """Every connection asks again and again."""
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(self._again(end) for _ in range(connections)))

    async def _again(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        connection: Connection | None = await self._connect()
        while loop.time() < end:
            connection = await self._one(connection, loop.time())
            if connection is None:
                await asyncio.sleep(AGAIN_S)
        if connection is not None:
            connection[1].close()

    async def open(self, connections: int, seconds: float, rate: float) -> None:
        """Requests leave on time; latency counts from when they should have left."""
        loop = asyncio.get_running_loop()
        free: asyncio.LifoQueue[Connection | None] = asyncio.LifoQueue()
        for _ in range(connections):
            free.put_nowait(await self._connect())
        began = loop.time()

        async def ask(due: float) -> None:
            free.put_nowait(await self._one(await free.get(), due))

        async with asyncio.TaskGroup() as group:
            for number in range(int(seconds * rate)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - loop.time()))
                self.late_s.append(loop.time() - due)
                group.create_task(ask(due))
        while not free.empty():
            if (connection := free.get_nowait()) is not None:
                connection[1].close()

    async def _connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _one(self, connection: Connection | None, due: float) -> Connection | None:
        """Ask once, over a new connection if there is none.

        Returns the one that it was answered over, with whatever status; None if it was not.
        """
        try:
            reader, writer = connection = connection or await self._connect()
            writer.write(self._asks.next())
            head = await reader.readuntil(b"\r\n\r\n")
            status = STATUS.search(head)
            length = LENGTH.search(head)
            if length is None:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                await reader.readexactly(int(length[1]))
        except (OSError, asyncio.IncompleteReadError):
            status = None
        if status is None and connection is not None:
            connection[1].close()
            connection = None
        self.statuses[FAILED if status is None else status[1].decode()] += 1
        self.took_s.append(asyncio.get_running_loop().time() - due)
        return connection


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--connections", type=click.IntRange(1), default=64)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=10.0)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests/s; else closed.")
@click.option("--prompt-blocks", type=click.IntRange(2), default=8)
@click.option("--tokens", type=click.IntRange(1), default=1, help="More than one: streamed.")
@click.option("--seed", type=int, default=1)
def main(
    port: int,
    connections: int,
    seconds: float,
    rate: float | None,
    prompt_blocks: int,
    tokens: int,
    seed: int,
) -> None:
    """Ask, and print what became of it."""
    load = Load(port, Asks(port, prompt_blocks, tokens, seed))
    asking = load.open(connections, seconds, rate) if rate else load.closed(connections, seconds)
    before_s = time.process_time()
    uvloop.run(asking)
    p50, p99 = (statistics.quantiles(load.took_s, n=100)[n] for n in (49, 98))
    report = {
        "statuses": load.statuses,
        "p50_s": p50,
        "p99_s": p99,
        "late_p99_s": statistics.quantiles(load.late_s, n=100)[98] if rate else 0.0,
        "cpu_s": time.process_time() - before_s,
        "seconds": seconds,
    }
    click.echo(orjson.dumps(report))


if __name__ == "__main__":
    main()
