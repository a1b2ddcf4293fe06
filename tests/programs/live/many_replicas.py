"""One router and a thousand replicas: what their heartbeats cost, and requests with a full index.

    make bench-replicas

A real nats-server and a real `mesh router`; replicas are one process that publishes a heartbeat of
each ten times a second and answers requests at once, clients another; the router begins with a
million blocks in its index. First no request is sent, then requests come, of 64 blocks each. CPU
time and memory are those of the router's process. What a heartbeat costs is its CPU time over those
received, so that it is true on a machine that has other things to do too; there the router may
receive fewer in a second than it could. A heartbeat is missed when its number never arrived. The
time of a decision is the router's own: from a request's arrival in its core to the effects. The
last rows show whether the router was what is measured: clients that are late, and what the others
took of the machine.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import click
import orjson
from rich.console import Console
from rich.table import Table

from tests.programs.live.load import programs
from tests.programs.live.load.usage import cpu_s, rss_mib
from tests.support.nats_regions import mesh_toml
from tests.support.nats_server import running_nats_server
from tests.support.ports import free_ports
from tests.support.result_page import result_page

PROMPT_BLOCKS = 64
CONNECTIONS = 200
SHED = ("429", "503")
READY_S = 60.0
END_S = 30.0


@result_page("many-replicas", "A router with a thousand replicas")
@click.command()
@click.option("--replicas", type=click.IntRange(1), default=1000, show_default=True)
@click.option(
    "--each-per-s",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Heartbeats.",
)
@click.option("--quiet-s", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option("--blocks", type=click.IntRange(0), default=1_000_000, show_default=True)
@click.option("--rate", type=click.FloatRange(1), default=500.0, show_default=True)
@click.option("--busy-s", type=click.FloatRange(1), default=20.0, show_default=True)
def main(**options: Any) -> None:
    """Measure a router with many replicas."""
    rows = asyncio.run(_play(**options))
    table = Table("figure", "measured", title=f"{options['replicas']} replicas")
    for name, text in rows.items():
        table.add_row(name, text)
    Console(width=100).print(table)


async def _play(
    replicas: int, each_per_s: float, quiet_s: float, blocks: int, rate: float, busy_s: float
) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as name:
        directory, watched = Path(name), Path(name) / "watched.json"
        async with (
            running_nats_server(directory / "nats") as server,
            programs.fleet(server.url, replicas, each_per_s=each_per_s) as fleet,
            _router(directory, server.url, watched, blocks, replicas) as (router, port),
        ):
            await _until_all_known(port, replicas)
            watch = Watched(router.pid, watched)
            # After the start, when last values of the stream come too.
            first = await watch.figures()
            rows = await _quiet(watch, quiet_s, replicas * each_per_s)
            load = {"connections": CONNECTIONS, "rate": rate, "prompt_blocks": PROMPT_BLOCKS}
            others = {"nats-server": server.pid, "replicas": fleet.pid}
            rows |= await _busy(watch, port, busy_s, load, others)
            await programs.sent_by(fleet)
            seen = await watch.at_last()
            os.kill(router.pid, signal.SIGTERM)
            async with asyncio.timeout(END_S):
                await router.wait()
    received, missed = (int(seen[name] - first[name]) for name in ("beats", "missed"))
    # Below zero: some that the stream's last values had overtaken at the start came after all.
    return rows | {"heartbeats heard and missed in all": f"{received}, {max(0, missed)}"}


class Watched:
    """The router's process, and its own figures."""

    def __init__(self, pid: int, file: Path) -> None:
        self.pid, self._file = pid, file
        self.beat_s = 0.0  # of CPU time for a heartbeat, once `_quiet` knows it

    async def figures(self) -> dict[str, float]:
        """What it has seen so far."""
        self._file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        async with asyncio.timeout(END_S):
            while not self._file.exists():
                await asyncio.sleep(0.02)
        seen: dict[str, float] = orjson.loads(self._file.read_bytes())
        return seen

    async def at_last(self) -> dict[str, float]:
        """The same, when it has received all that was on its way."""
        seen = await self.figures()
        while True:
            await asyncio.sleep(1.0)
            before, seen = seen, await self.figures()
            if seen == before:
                return seen


async def _quiet(watch: Watched, seconds: float, beats_per_s: float) -> dict[str, str]:
    """Heartbeats alone."""
    before, spent_s = (await watch.figures())["beats"], cpu_s(watch.pid)
    await asyncio.sleep(seconds)
    received, spent_s = (await watch.figures())["beats"] - before, cpu_s(watch.pid) - spent_s
    each_s = watch.beat_s = spent_s / received
    return {
        "heartbeats heard": f"{received / seconds:.0f}/s, in {spent_s / seconds:.2f} cores",
        "a heartbeat": f"{1e6 * each_s:.1f} us",
        f"so {beats_per_s:.0f}/s are": f"{each_s * beats_per_s:.2f} cores",
        "memory": f"{rss_mib(watch.pid):.0f} MiB",
    }


async def _busy(
    watch: Watched, port: int, seconds: float, load: dict[str, Any], others: Mapping[str, int]
) -> dict[str, str]:
    """Requests besides. `others`: processes by what they are."""
    before, spent_s = (await watch.figures())["beats"], cpu_s(watch.pid)
    others_s = {name: cpu_s(pid) for name, pid in others.items()}
    report = await programs.ask(port, seconds=seconds, seed=2, **load)
    others_s = {name: cpu_s(pid) - others_s[name] for name, pid in others.items()}
    seen, spent_s = await watch.figures(), cpu_s(watch.pid) - spent_s
    p10, p50, p90 = (1e6 * seen[name] for name in ("p10_s", "p50_s", "p90_s"))
    cores = {**others_s, "clients": report["cpu_s"]}
    beats, asked = seen["beats"] - before, sum(report["statuses"].values())
    return {
        "requests": what_became(report["statuses"]),
        "latency": f"p50 {report['p50_s']:.3f} s, p99 {report['p99_s']:.3f} s",
        "CPU for them and heartbeats": f"{spent_s:.1f} s, {spent_s / seconds:.2f} cores, "
        f"{beats:.0f} heartbeats",
        "so a request": f"{1e6 * (spent_s - beats * watch.beat_s) / asked:.0f} us",
        "a decision": f"{p50:.0f} us ({p10:.0f}-{p90:.0f})",
        "memory with blocks": f"{rss_mib(watch.pid):.0f} MiB",
        "clients were late by": f"p99 {1000 * report['late_p99_s']:.1f} ms",
        "cores of": ", ".join(f"{name} {used / seconds:.2f}" for name, used in cores.items()),
    }


def what_became(statuses: Mapping[str, int]) -> str:
    """Of requests, by HTTP status: answered, shed, and gone wrong."""
    shed = sum(statuses.get(status, 0) for status in SHED)
    answered = statuses.get("200", 0)
    other = sum(statuses.values()) - answered - shed
    return f"{answered} answered, {shed} shed, {other} failed"


@contextlib.asynccontextmanager
async def _router(
    directory: Path, nats_url: str, watched: Path, blocks: int, replicas: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    config = directory / "mesh.toml"
    config.write_text(mesh_toml(("us",)))
    [port] = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.programs.live.load.watched_router", str(watched)),
        *(str(blocks), str(replicas)),
        *("--region", "us", "--config", str(config), "--http", f"127.0.0.1:{port}"),
        *("--nats-url", nats_url, "--prefix-key", "a secret"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until_all_known(port: int, replicas: int) -> None:
    wanted = f'mesh_replicas{{state="ready"}} {float(replicas)}'
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    if wanted in await answer.text():
                        return
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
