"""What https, and what keys, limits and fair shares cost a router: CPU of a plain request.

    make bench-tls

Routers, each with a nats-server and an agent of its own over one scripted engine, are asked in
turns: over kept connections, and over a new one for each request (a whole handshake of TLS 1.3 with
a key of P-256, nothing resumed). sglang-router and smg stand before a simulated engine, with https
and without. A ratio is to the same router's without, in the same round.
"""

import asyncio
import hashlib
import os
import ssl
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import orjson

from infra.bus import BusAddress
from mesh.adapters import streams
from schemas.ids import RegionId
from tests.programs.bench.installs import ENVIRONMENTS
from tests.programs.bench.processes import Processes
from tests.programs.bench.systems.rust_routers import start_router
from tests.programs.live.versus.systems import start_engines
from tests.support.certificates import made_certificate
from tests.support.nats_server import running_nats_server
from tests.support.ports import free_ports
from tests.support.router_process import router_process
from tests.support.scripted_engine import ScriptedEngine, say, scripted_engine
from tests.support.small_mesh import chat, small_mesh

MODEL = "tiny"
KEPT, NEW = "kept connection", "new connection"
PLAIN, TLS, KEYS = "plain", "https", "key, limits, fair shares"
RIVALS = ("sglang-router", "smg")
CONNECTIONS = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KEY = "mesh-key-of-acme"
LIMITS = "".join(
    f"{name} = 1000000000\n"
    for name in ("requests_per_minute", "requests_per_day", "tokens_per_minute", "tokens_per_day")
)
TENANTS = f"""\
[auth]
required = true
[tenants.acme]
key_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
[tenants.acme.limits]
{LIMITS}concurrent_requests = 1000
[tenants.acme.key_limits]
{LIMITS}[tenants.beta]
weight = 3
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One router; `tls`: what trusts its certificate."""

    pid: int
    port: int
    tls: ssl.SSLContext | None = None

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    async def turn(self, kind: str, requests: int) -> float:
        """CPU of the router for a request, in microseconds."""
        before = self.cpu_s()
        share = requests // CONNECTIONS
        await asyncio.gather(*(self._ask(kind, share) for _ in range(CONNECTIONS)))
        return (self.cpu_s() - before) * 1e6 / (share * CONNECTIONS)

    async def _ask(self, kind: str, requests: int) -> None:
        last = "connection: close\r\n" if kind == NEW else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{last}"
        body = orjson.dumps(chat())
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"authorization: Bearer {KEY}\r\n\r\n"
        address = ("127.0.0.1", self.port)
        writer = None
        for _ in range(requests):
            if writer is None:
                reader, writer = await asyncio.open_connection(*address, ssl=self.tls)
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert answer.startswith("http/1.1 200"), answer
            await reader.readexactly(int(answer.partition("content-length:")[2].split()[0]))
            if kind == NEW:
                writer.close()
                await writer.wait_closed()
                writer = None
        if writer is not None:
            writer.close()


@asynccontextmanager
async def the_mesh(folder: Path, engine: ScriptedEngine, kind: str) -> AsyncIterator[Side]:
    """A router over that engine: PLAIN, TLS or KEYS."""
    folder.mkdir()
    made = made_certificate(folder) if kind == TLS else None
    table = f'tls = {{ cert = "{made.cert}", key = "{made.key}" }}\n' if made else ""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(running_nats_server(folder / "nats"))
        await streams.set_up(BusAddress(nats.url), RegionId("us"), has_peers=False)
        mesh = await stack.enter_async_context(small_mesh({"us": nats}))
        options = ("--access-log", "off")
        tenants = TENANTS if kind == KEYS else ""
        router = await stack.enter_async_context(
            router_process(folder, nats.url, *options, workers=1, table=table, routing=tenants)
        )
        await mesh.agent("us", "us-0", engine)
        await router.until_serves(0)
        yield Side(router.pid, router.http_port, made.client if made else None)


@asynccontextmanager
async def rival(folder: Path, engine: str, name: str, kind: str) -> AsyncIterator[Side]:
    """That router, with https or without. Raises Absent."""
    folder.mkdir()
    made = made_certificate(folder)
    given = ("--tls-cert-path", str(made.cert), "--tls-key-path", str(made.key))
    async with Processes(folder / "logs") as processes:
        [port] = free_ports(1)
        verb = ("launch", *(given if kind == TLS else ()))
        scheme = "https" if kind == TLS else "http"
        started = await start_router(
            processes, ENVIRONMENTS, name, verb, [engine], port, scheme=scheme
        )
        body = orjson.dumps(chat())
        takes = processes.takes(f"{started.url}/v1/chat/completions", body)
        await processes.until(f"{name} with its engine", takes)
        yield Side(started.pid, port, made.client if kind == TLS else None)


async def play(
    rounds: int, requests: int, show: Callable[[str], None], rivals: Sequence[str] = ()
) -> dict[str, list[float]]:
    """The ratio of each kind of connection, and of each thing that costs, in each round."""
    ratios: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scripted = await stack.enter_async_context(scripted_engine())
        scripted.behaviour = say("hello")
        pairs: list[tuple[str, Side, Side]] = []
        ours = {
            kind: await stack.enter_async_context(the_mesh(folder / str(number), scripted, kind))
            for number, kind in enumerate((PLAIN, TLS, KEYS))
        }
        pairs += [(kind, ours[PLAIN], ours[kind]) for kind in (TLS, KEYS)]
        if rivals:
            processes = await stack.enter_async_context(Processes(folder / "logs"))
            [engine] = await start_engines(processes, 1, "--time-scale", "1000", "--model", MODEL)
        for name in rivals:
            sides = [
                await stack.enter_async_context(
                    rival(folder / f"{name}-{kind}", f"http://{engine}", name, kind)
                )
                for kind in (PLAIN, TLS)
            ]
            pairs.append((f"{name}, {TLS}", sides[0], sides[1]))
        for side in {side for _, *both in pairs for side in both}:
            await side.turn(KEPT, requests)  # imports and caches: left out
        for number in range(rounds):
            for what, without, having in pairs:
                for kind in (KEPT, NEW):
                    order = (without, having) if number % 2 else (having, without)
                    took = {side: await side.turn(kind, requests) for side in order}
                    found = ratios.setdefault(f"{what}, {kind}", [])
                    found.append(took[having] / max(took[without], 1e-9))
                    show(f"{what}, {kind}: {took[without]:.0f} us, {took[having]:.0f} with it")
    return ratios


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--requests", default=800, show_default=True, help="Of each kind in each round.")
@click.option("--quick", is_flag=True, help="A round of few requests.")
def main(rounds: int, requests: int, quick: bool) -> None:
    """Measure what https, keys, limits and fair shares cost a router."""
    rounds, requests = (1, 40) if quick else (rounds, requests)
    for kind, found in asyncio.run(play(rounds, requests, click.echo, RIVALS)).items():
        low, middle, high = min(found), statistics.median(found), max(found)
        click.echo(f"{kind}: CPU with it / without {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
