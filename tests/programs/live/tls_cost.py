"""What https at a router's own port costs it: CPU of a plain request with TLS, to one without.

    make bench-tls

Two routers, each with a nats-server and an agent of its own over one scripted engine, are asked in
turns: over kept connections, and over a new one for each request (a whole handshake of TLS 1.3 with
a key of P-256, nothing resumed). A ratio is to the other router in the same round.
"""

import asyncio
import os
import ssl
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import orjson

from infra.bus import BusAddress
from mesh.adapters import streams
from schemas.ids import RegionId
from tests.support.certificates import MadeCertificate, made_certificate
from tests.support.nats_server import running_nats_server
from tests.support.router_process import RouterProcess, router_process
from tests.support.scripted_engine import ScriptedEngine, say, scripted_engine
from tests.support.small_mesh import chat, small_mesh

KEPT, NEW = "kept connection", "new connection"
CONNECTIONS = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BODY = orjson.dumps(chat())


@dataclass(frozen=True, slots=True)
class Side:
    """One router; `tls`: what trusts its certificate."""

    router: RouterProcess
    tls: ssl.SSLContext | None

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.router.pid}/stat").read_text().rpartition(")")[2].split()
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
        head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
        address = ("127.0.0.1", self.router.http_port)
        writer = None
        for _ in range(requests):
            if writer is None:
                reader, writer = await asyncio.open_connection(*address, ssl=self.tls)
            writer.write(head.encode() + BODY)
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
async def raised(
    folder: Path, engine: ScriptedEngine, made: MadeCertificate | None
) -> AsyncIterator[Side]:
    """A router over that engine, with TLS if there is a certificate."""
    table = f'tls = {{ cert = "{made.cert}", key = "{made.key}" }}\n' if made else ""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(running_nats_server(folder / "nats"))
        await streams.set_up(BusAddress(nats.url), RegionId("us"), has_peers=False)
        mesh = await stack.enter_async_context(small_mesh({"us": nats}))
        options = ("--access-log", "off")
        router = await stack.enter_async_context(
            router_process(folder, nats.url, *options, workers=1, table=table)
        )
        await mesh.agent("us", "us-0", engine)
        await router.until_serves(0)
        yield Side(router, made.client if made else None)


async def play(rounds: int, requests: int, show: Callable[[str], None]) -> dict[str, list[float]]:
    """The ratio of each kind in each round."""
    ratios: dict[str, list[float]] = {KEPT: [], NEW: []}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(scripted_engine())
        engine.behaviour = say("hello")
        (folder / "plain").mkdir()
        plain = await stack.enter_async_context(raised(folder / "plain", engine, None))
        (folder / "tls").mkdir()
        made = made_certificate(folder / "tls")
        tls = await stack.enter_async_context(raised(folder / "tls", engine, made))
        for side in (plain, tls):
            await side.turn(KEPT, requests)  # imports and caches: left out
        for number in range(rounds):
            for kind, found in ratios.items():
                order = (plain, tls) if number % 2 else (tls, plain)
                took = {side: await side.turn(kind, requests) for side in order}
                found.append(took[tls] / max(took[plain], 1e-9))
                show(f"{kind}: {took[plain]:.0f} us plain, {took[tls]:.0f} with TLS")
    return ratios


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--requests", default=800, show_default=True, help="Of each kind in each round.")
@click.option("--quick", is_flag=True, help="A round of few requests.")
def main(rounds: int, requests: int, quick: bool) -> None:
    """Measure what https costs a router."""
    rounds, requests = (1, 40) if quick else (rounds, requests)
    for kind, found in asyncio.run(play(rounds, requests, click.echo)).items():
        low, middle, high = min(found), statistics.median(found), max(found)
        click.echo(f"{kind}: CPU with TLS / without {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
