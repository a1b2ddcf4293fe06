"""What a second worker of a router brings, by the CPU time that requests cost.

    make bench-workers

A real nats-server, a fleet by script that answers at once, clients in a process of their own, and
`mesh router` with one worker and with two, in turns. Router, server, fleet and clients share the
machine's cores, so requests per second of wall time would measure the machine. What is measured
instead is how many requests each worker's process answers in a second of its own CPU time, all
that it does besides included: so many it answers where it has a core to itself. Those of both
added, over that of one alone, is what the second one brings. What it costs is in the figure: both
hear all heartbeats, and each hears what the other placed.
"""

import asyncio
import statistics
import tempfile
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from tests.benchmarks.load import programs
from tests.benchmarks.load.usage import cpu_s
from tests.support.nats_server import running_nats_server
from tests.support.router_process import RouterProcess, router_process

KINDS = {"plain": 1, "stream of 32": 32}
CONNECTIONS = 48  # of each worker, so that both have as many under way
WARM_S = 2.0


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=6.0, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=16, show_default=True)
def main(rounds: int, seconds: float, replicas: int) -> None:
    """Compare one worker with two."""
    found = asyncio.run(_play(rounds, seconds, replicas))
    table = Table("requests in a CPU second", "1 worker", "2 workers", "times", "least-most")
    for kind in KINDS:
        one, two = ([each[kind] for each in found[workers]] for workers in (1, 2))
        times = [b / a for a, b in zip(one, two, strict=True)]
        table.add_row(
            kind,
            f"{statistics.median(one):.0f}",
            f"{statistics.median(two):.0f}",
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
        )
    Console(width=100).print(table)


async def _play(rounds: int, seconds: float, replicas: int) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with (
            running_nats_server(directory / "nats") as server,
            programs.fleet(server.url, replicas),
        ):
            for number in range(rounds):
                # Turn about, so that whatever else the machine does meets both alike.
                for workers in ((1, 2), (2, 1))[number % 2]:
                    options = ("--prefix-key", "a secret")
                    async with router_process(
                        directory, server.url, *options, workers=workers
                    ) as router:
                        found[workers].append(await _measure(router, workers, seconds))
    return found


async def _measure(router: RouterProcess, workers: int, seconds: float) -> dict[str, float]:
    for worker in range(workers):
        await router.until_serves(worker)
    pids = router.workers() if workers > 1 else [router.pid]
    rates = {}
    async with aiohttp.ClientSession() as http:
        for kind, tokens in KINDS.items():
            load = {"connections": CONNECTIONS * workers, "tokens": tokens}
            await programs.ask(router.http_port, seconds=WARM_S, **load)
            before = [await _spent(router, http, worker, pid) for worker, pid in enumerate(pids)]
            said = await programs.ask(router.http_port, seconds=seconds, **load)
            assert set(said["statuses"]) == {"200"}, said
            after = [await _spent(router, http, worker, pid) for worker, pid in enumerate(pids)]
            rates[kind] = sum(
                (now[0] - then[0]) / (now[1] - then[1])
                for then, now in zip(before, after, strict=True)
            )
    return rates


async def _spent(
    router: RouterProcess, http: aiohttp.ClientSession, worker: int, pid: int
) -> tuple[float, float]:
    """Requests answered so far, and CPU seconds."""
    return await router.sample(http, worker, "mesh_requests_total") or 0.0, cpu_s(pid)


if __name__ == "__main__":
    main()
