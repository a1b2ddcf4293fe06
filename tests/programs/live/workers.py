"""What a second worker of a router brings, by the CPU time that requests cost.

    make bench-workers

Twice a real nats-server, a fleet by script that answers at once, clients in a process of their own,
and `mesh router`: with one worker here and with two there, both asked at the same time, because on
a machine with other work even the CPU time of a request doubles from one minute to the next. All of
them share the machine's cores, so requests per second of wall time would measure the machine. What
is measured instead is how many requests each worker's process answers in a second of its own CPU
time, all that it does besides included: so many it answers where it has a core to itself. Those of
both added, over that of one alone, is what the second one brings. What it costs is in the figure:
both receive all heartbeats, and each receives what the other placed.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from tests.programs.live.load import programs
from tests.programs.live.load.usage import cpu_s
from tests.support.nats_server import running_nats_server
from tests.support.result_page import result_page
from tests.support.router_process import RouterProcess, router_process

KINDS = {"plain": 1, "stream of 32": 32}
CONNECTIONS = 48  # of each worker, so that both have as many under way
WARM_S = 2.0


@result_page("workers", "Workers of one router")
@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=6.0, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=16, show_default=True)
def main(rounds: int, seconds: float, replicas: int) -> None:
    """Compare one worker with two."""
    played = asyncio.run(_play(rounds, seconds, replicas))
    table = Table("requests in a CPU second", "1 worker", "2 workers", "times", "least-most")
    for kind in KINDS:
        one, two = zip(*played[kind], strict=True)
        times = [b / a for a, b in played[kind]]
        table.add_row(
            kind,
            f"{statistics.median(one):.0f}",
            f"{statistics.median(two):.0f}",
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
        )
    Console(width=100).print(table)


async def _play(rounds: int, seconds: float, replicas: int) -> dict[str, list[tuple[float, float]]]:
    played: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            one, two = [
                await _raised(stack, Path(name) / str(workers), workers, replicas)
                for workers in (1, 2)
            ]
            for kind, tokens in KINDS.items():
                await asyncio.gather(*(each.rate(tokens, WARM_S) for each in (one, two)))
                for _ in range(rounds):
                    rates = await asyncio.gather(
                        one.rate(tokens, seconds), two.rate(tokens, seconds)
                    )
                    played[kind].append((rates[0], rates[1]))
    return played


async def _raised(stack: AsyncExitStack, directory: Path, workers: int, replicas: int) -> "Side":
    directory.mkdir()
    server = await stack.enter_async_context(running_nats_server(directory / "nats"))
    await stack.enter_async_context(programs.fleet(server.url, replicas))
    key = ("--prefix-key", "a secret")
    process = router_process(directory, server.url, *key, workers=workers)
    router = await stack.enter_async_context(process)
    for worker in range(workers):
        await router.until_serves(worker)
    http = await stack.enter_async_context(aiohttp.ClientSession())
    return Side(router, http, router.workers() if workers > 1 else [router.pid])


class Side:
    """One of the two routers."""

    def __init__(
        self, router: RouterProcess, http: aiohttp.ClientSession, pids: Sequence[int]
    ) -> None:
        self._router, self._http, self._pids = router, http, pids

    async def rate(self, tokens: int, seconds: float) -> float:
        """Requests in a CPU second of each worker, added."""
        before = await self._spent()
        load = {"connections": CONNECTIONS * len(self._pids), "tokens": tokens}
        report = await programs.ask(self._router.http_port, seconds=seconds, **load)
        assert set(report["statuses"]) == {"200"}, report
        return sum(
            (now[0] - then[0]) / (now[1] - then[1])
            for then, now in zip(before, await self._spent(), strict=True)
        )

    async def _spent(self) -> list[tuple[float, float]]:
        """Of each worker, requests answered so far and CPU seconds."""
        return [
            (await self._router.sample(self._http, n, "mesh_requests_total") or 0.0, cpu_s(pid))
            for n, pid in enumerate(self._pids)
        ]


if __name__ == "__main__":
    main()
