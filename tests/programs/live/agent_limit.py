"""How many requests one agent process carries, whatever its engine could.

    make bench-agent

A real nats-server, a real `mesh-agent run`, an engine in another process that answers at once, and
this process in a router's place: it hands over work as fast as it is answered. As the machine is
shared, what is measured is requests in a second of the agent's own CPU time, all that it does
besides included: so many it carries where it has a core to itself.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import click
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas import exchange, subjects
from schemas.exchange import Frame
from schemas.parcels import parcelled
from tests.programs.live.load.fleet import MODEL, REGION
from tests.programs.live.load.usage import cpu_s
from tests.support.frames import frames_of
from tests.support.nats_server import running_nats_server
from tests.support.result_page import result_page

REPLICA, ROUTER = "us-0", "r1"
UNDER_WAY = 64
START_S, WARM_S = 30.0, 2.0
HELLO = b'"messages":[{"role":"user","content":"hello"}]}'
BODIES = {
    "plain": b'{"model":"tiny",' + HELLO,
    "stream of 32": b'{"model":"tiny","stream":true,' + HELLO,
}


class Driver:
    """Hands over work; counts the answers that were whole."""

    def __init__(self, client: Client) -> None:
        self._client, self._number = client, 0
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self.done = self.refused = 0

    async def listen(self) -> None:
        """Hear answers."""
        await self._client.subscribe(subjects.inbox(REGION, ROUTER, subjects.ANY), cb=self._hear)
        await self._client.flush()

    async def _hear(self, msg: Msg) -> None:
        for inbox, frame in frames_of(msg):
            if frame.kind in (Frame.END, Frame.REFUSED):
                self._waiting.pop(inbox).set_result(frame.kind is Frame.END)

    async def ask(self, body: bytes) -> None:
        """One piece of work, to its end."""
        self._number += 1
        inbox = subjects.inbox(REGION, ROUTER, parcelled(str(self._number)))
        answered = self._waiting[inbox] = asyncio.get_running_loop().create_future()
        headers = {
            exchange.H_REQUEST: str(self._number), exchange.H_MODEL: MODEL,
            exchange.H_PATH: "/v1/chat/completions", exchange.H_ATTEMPT: "1",
            exchange.H_FROM: ROUTER, exchange.H_HANDOFF: str(self._number),
            exchange.H_DEADLINE_MS: "60000", exchange.H_MAY_QUEUE: "1",
        }  # fmt: skip
        await self._client.publish(subjects.work(REGION, REPLICA), body, inbox, headers)
        if await answered:
            self.done += 1
        else:
            self.refused += 1

    async def keep_asking(self, body: bytes, seconds: float) -> None:
        """So many at a time, for so long."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds

        async def again() -> None:
            while clock() < end:
                await self.ask(body)

        await asyncio.gather(*(again() for _ in range(UNDER_WAY)))


@contextlib.asynccontextmanager
async def program(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A module of Python as a process, killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        await process.communicate()


async def _play(rounds: int, seconds: float) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ready = directory / "ready.json"
        async with (
            running_nats_server(directory / "nats") as server,
            program("tests.programs.live.load.engine") as engine,
        ):
            assert engine.stdout is not None
            port = int(await engine.stdout.readline())
            words = ("--region", REGION, "--replica", REPLICA, "--nats-url", server.url)
            words += ("--no-speed-probe",)
            where = ("--engine-url", f"http://127.0.0.1:{port}", "--ready-file", str(ready))
            async with program("agents.cli", "run", *words, *where) as agent:
                async with asyncio.timeout(START_S):
                    while not ready.exists():
                        await asyncio.sleep(0.05)
                client = Client()
                await client.connect(server.url)
                driver = Driver(client)
                await driver.listen()
                found = await _measure(driver, agent.pid, rounds, seconds)
                await client.close()
    return found


async def _measure(driver: Driver, pid: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in BODIES}
    for kind, body in BODIES.items():
        await driver.keep_asking(body, WARM_S)
        for _ in range(rounds):
            done, spent_s = driver.done, cpu_s(pid)
            await driver.keep_asking(body, seconds)
            found[kind].append((driver.done - done) / (cpu_s(pid) - spent_s))
    assert not driver.refused, f"{driver.refused} refused"
    return found


@result_page("agent-limit", "What one agent carries")
@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=4.0, show_default=True)
def main(rounds: int, seconds: float) -> None:
    """Print requests in a second of the agent's CPU time: median, least and most."""
    for kind, rates in uvloop.run(_play(rounds, seconds)).items():
        print(f"{kind}: {statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})")


if __name__ == "__main__":
    main()
