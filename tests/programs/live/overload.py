"""A region that is asked for five times what it can do: who is answered, who is refused, and when.

    make bench-overload

A real `mesh up` of one region: nats-server, router, agents, simulated engines in real time. First a
closed loop of many clients finds the peak, in answers a second. Then, once without options and once
with an objective for each request, requests leave at a multiple of it for so long, whatever becomes
of them (an open loop), and a part of those who are refused come back after their Retry-After. When
the load has ended single requests show when a first token is as quick as before it.

What a Retry-After should have been is seen afterwards. A retry is *sure* to be admitted once no
client is refused any more; before that, while most are refused, it is luck. So the share of those
who came back and were admitted is what counts, and the seconds until it was sure are beside those
of the answers.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from tests.programs.live.load.usage import rss_mib
from tests.support.mesh_up import mesh_up, write_config
from tests.support.result_page import result_page

REGION = "us"
PROFILE = ("--profile", "l4-llama3.1-8b")
PROMPT_WORDS, ANSWER_TOKENS = 330, 64  # some 500 tokens, none shared
CLIENTS = 96  # of the closed loop: what two engines run at a time, and some who wait
SETTLE_S = 15.0  # from a loop's start until engines are full and answers end; not counted
RETURNS = 0.25  # of those refused come back
NORMAL = 3  # probes in a row with a quick first token: it has recovered
PROBE_S, RECOVERY_S_MAX, CLIENT_S_MAX = 0.5, 180.0, 150.0
TOO_MANY = 429


@dataclass(slots=True)
class Ask:
    """One request; times in seconds on the monotonic clock."""

    at: float
    is_return: bool = False
    is_whole: bool = False  # its answer was read to the end
    status: int = 0
    first_at: float | None = None
    end_at: float = 0.0
    told_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """From sending it until its first token; None if there was none."""
        return None if self.first_at is None else self.first_at - self.at


class Load:
    """Clients of one router."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self.session, self.url, self.model = session, url, model
        self._dice = random.Random(seed)
        self.slo_ms: int | None = None
        self.asks: list[Ask] = []

    async def ask(self, *, is_return: bool = False) -> Ask:
        """One request, to its end."""
        words = " ".join(f"w{self._dice.getrandbits(16)}" for _ in range(PROMPT_WORDS))
        body = {
            "model": self.model, "prompt": words, "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        headers = {"x-mesh-slo-ttft-ms": str(self.slo_ms)} if self.slo_ms else {}
        ask = Ask(monotonic(), is_return)
        self.asks.append(ask)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(
                self.url + "/v1/completions", json=body, headers=headers
            ) as answer:
                ask.status = answer.status
                ask.told_s = float(answer.headers.get("retry-after", 0))
                async for _ in answer.content.iter_any():
                    if ask.first_at is None and ask.status == 200:
                        ask.first_at = monotonic()
                ask.is_whole = ask.status == 200
        ask.end_at = monotonic()
        return ask

    async def closed(self, clients: int, seconds: float) -> float:
        """The most that can be done: answers a second, after it has settled."""
        begin = monotonic()

        async def again() -> None:
            while monotonic() < begin + SETTLE_S + seconds:
                if (ask := await self.ask()).status == TOO_MANY:
                    await asyncio.sleep(ask.told_s)

        await asyncio.gather(*(again() for _ in range(clients)))
        return self.done_per_s(begin + SETTLE_S, begin + SETTLE_S + seconds)

    def done_per_s(self, begin: float, end: float) -> float:
        """Whole answers a second."""
        ends = (ask.end_at for ask in self.asks if ask.status == 200)
        return sum(begin <= at < end for at in ends) / (end - begin)

    def begun_per_s(self, begin: float, end: float) -> float:
        """Goodput: answers a second whose first token came in that time, and that were whole.

        Not by their ends: engines are empty when a load begins, and full when it is over.
        """
        firsts = (ask.first_at for ask in self.asks if ask.is_whole)
        return sum(at is not None and begin <= at < end for at in firsts) / (end - begin)

    async def opened(self, per_s: float, seconds: float) -> None:
        """Requests at random moments; some of the refused come back once."""
        begin, tasks = monotonic(), []
        at = begin
        while (at := at + self._dice.expovariate(per_s)) < begin + seconds:
            await asyncio.sleep(max(0.0, at - monotonic()))
            tasks.append(asyncio.create_task(self._ask_and_return()))
        self.over_at = monotonic()
        self._tasks = tasks

    async def _ask_and_return(self) -> None:
        ask = await self.ask()
        if ask.status == TOO_MANY and self._dice.random() < RETURNS:
            await asyncio.sleep(ask.told_s)
            await self.ask(is_return=True)

    async def finish(self) -> None:
        """Until the last of them has ended."""
        await asyncio.gather(*self._tasks)


async def _watch_memory(pid: int, most: list[float]) -> None:
    while True:
        most.append(rss_mib(pid))
        await asyncio.sleep(0.25)


async def _recovery_s(load: Load, usual_s: float) -> float:
    """From the end of the load until first tokens are as quick as usual."""
    prober, quick, since = Load(load.session, load.url, load.model, 9), 0, load.over_at
    while quick < NORMAL and monotonic() - load.over_at < RECOVERY_S_MAX:
        began = monotonic()
        ttft_s = (await prober.ask()).ttft_s
        is_quick = ttft_s is not None and ttft_s <= 3 * usual_s
        quick, since = (quick + 1, since) if is_quick else (0, monotonic())
        await asyncio.sleep(max(0.0, began + PROBE_S - monotonic()))
    return since - load.over_at


def _at(values: Sequence[float | None], *shares: float) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    return " / ".join(f"{known[min(len(known) - 1, int(p * len(known)))]:.2f}" for p in shares)


def _rows(load: Load, begin: float, peak: float, memory: Sequence[float]) -> dict[str, str]:
    asks = [ask for ask in load.asks if not ask.is_return]
    refused = [ask for ask in asks if ask.status == TOO_MANY]
    returns = [ask for ask in load.asks if ask.is_return]
    answered = [ask for ask in asks if ask.status == 200]
    done = load.begun_per_s(begin + SETTLE_S, load.over_at)
    sure_at = max((ask.end_at for ask in load.asks if ask.status == TOO_MANY), default=begin)
    came = f"{sum(ask.status == 200 for ask in returns)} of {len(returns)}"
    late = [ask for ask in returns if ask.at >= load.over_at]
    after = f"{sum(ask.status == 200 for ask in late)} of {len(late)}"
    return {
        "requests": str(len(asks)),
        "answered, refused, failed": f"{len(answered)}, {len(refused)}, "
        f"{len(asks) - len(answered) - len(refused)}",
        "goodput: answers begun a second, of the peak": f"{done:.2f}, {done / peak:.0%}",
        "TTFT of the answered p50 / p90 / p99, s": _at(
            [a.ttft_s for a in answered], 0.5, 0.9, 0.99
        ),
        "time to refuse p50 / p99, s": _at([a.end_at - a.at for a in refused], 0.5, 0.99),
        "first refusal after, s": _at([a.end_at - begin for a in refused], 0.0),
        "Retry-After p10 / p50 / p90, s": _at([a.told_s for a in refused], 0.1, 0.5, 0.9),
        "sure to be admitted after p10 / p50 / p90, s": _at(
            [sure_at - a.end_at for a in refused], 0.1, 0.5, 0.9
        ),
        "came back and were admitted": came,
        "of these after the load": after,
        "router's memory, before and most, MiB": f"{memory[0]:.0f}, {max(memory):.0f}",
    }


async def _play(
    times: float, seconds: float, slo_ms: int, replicas: int, limit_s: float | None
) -> dict[str, dict[str, str]]:
    played: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = write_config(directory, regions=(REGION,), replicas=replicas)
        if limit_s is not None:
            config.write_text(config.read_text() + f"[routing]\nqueue_delay_s_max = {limit_s}\n")
        limits = aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(total=CLIENT_S_MAX)
        async with (
            mesh_up(directory, *PROFILE, config=config, time_scale=1.0) as mesh,
            aiohttp.ClientSession(connector=limits, timeout=patience) as session,
        ):
            url, model = mesh.endpoint(REGION), mesh.model
            pid = next(id for name, id in mesh.record["processes"].items() if "router" in name)
            quiet = Load(session, url, model, 1)
            alone = [(await quiet.ask()).ttft_s or 0.0 for _ in range(5)]
            usual_s = statistics.median(alone)
            peak = await quiet.closed(CLIENTS, seconds)
            print(f"peak {peak:.2f} answers a second; first token alone after {usual_s:.2f} s")
            for kind, slo in (("without options", None), (f"SLO {slo_ms} ms", slo_ms)):
                load, memory = Load(session, url, model, 2), [rss_mib(pid)]
                load.slo_ms = slo
                watcher = asyncio.create_task(_watch_memory(pid, memory))
                begin = monotonic()
                await load.opened(times * peak, seconds)
                recovery_s = await _recovery_s(load, usual_s)
                await load.finish()
                watcher.cancel()
                played[kind] = _rows(load, begin, peak, memory)
                played[kind]["as quick as before after, s"] = f"{recovery_s:.1f}"
    return played


@result_page("overload", "Overload")
@click.command()
@click.option("--times", type=click.FloatRange(1.0), default=5.0, show_default=True)
@click.option("--seconds", type=click.FloatRange(15), default=30.0, show_default=True)
@click.option("--slo-ms", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True)
@click.option("--limit-s", type=click.FloatRange(0), help="queue_delay_s_max; 0: as without it.")
def main(times: float, seconds: float, slo_ms: int, replicas: int, limit_s: float | None) -> None:
    """Ask a region for so many times what it can do."""
    played = asyncio.run(_play(times, seconds, slo_ms, replicas, limit_s))
    table = Table("", *played)
    for row in next(iter(played.values())):
        table.add_row(row, *(rows[row] for rows in played.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
