"""What it costs that nats-server syncs what it acknowledges, through the store of batch jobs.

    make bench-sync [WRITE=docs/benchmarks]

Rounds in turns, each on an empty nats-server with NATS' default and with `sync_interval: always`,
as it is rendered: one file, small files one after the other, lines queued, results of 64 at once.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import click
import uvloop

from infra.batch_table import BatchTable
from mesh.batch.records import Line, NewFile, Result
from mesh.batch.store import BatchStore
from schemas.batch import Purpose
from schemas.http import CHAT
from tests.support.batch_store import batch_store, make_streams, once
from tests.support.nats_server import running_nats_server
from tests.support.result_page import result_page

SYNCS = {"default": {}, "always": {"sync_interval": "always"}}
SMALL_FILES, SMALL_BYTES, BODY = 500, 3_000, b"x" * 1_500
CHUNK = b"x" * 100_000
AT_ONCE = 64
JOB = "batch_1"


@result_page("sync-cost", "What syncs of the batch store cost")
@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--mebibytes", type=click.IntRange(1), default=100, show_default=True)
@click.option("--lines", type=click.IntRange(1), default=10_000, show_default=True)
def main(rounds: int, mebibytes: int, lines: int) -> None:
    """Measure both in turns, and print medians with the least and the most."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in SYNCS}
    for _ in range(rounds):
        for name, rates in found.items():
            for what, rate in uvloop.run(_measured(name, mebibytes, lines)).items():
                rates.setdefault(what, []).append(rate)
    click.echo("| what | default | always | default / always |\n|---|--:|--:|--:|")
    for what, default in found["default"].items():
        always = found["always"][what]
        ratio = statistics.median(default) / statistics.median(always)
        click.echo(f"| {what} | {_spread(default)} | {_spread(always)} | {ratio:.1f} |")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


async def _measured(sync: str, mebibytes: int, lines: int) -> dict[str, float]:
    """Of each kind of write, how many a second."""
    limits = BatchTable(lines_max=max(lines, 1_000))
    with tempfile.TemporaryDirectory() as name:
        async with running_nats_server(Path(name), **SYNCS[sync]) as server:
            await make_streams(server.url, limits)
            async with batch_store(server.url, limits) as store:
                return {
                    f"MiB a second, a file of {mebibytes}": await _rate(
                        mebibytes, _file(store, mebibytes)
                    ),
                    "files of 3 kB a second": await _rate(SMALL_FILES, _files(store)),
                    "lines of 1.5 kB queued a second": await _rate(lines, _queue(store, lines)),
                    f"results of 1.5 kB a second, {AT_ONCE} at once": await _rate(
                        lines, _results(store, lines)
                    ),
                }


async def _rate(count: int, work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return count / (time.perf_counter() - began)


async def _file(store: BatchStore, mebibytes: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(mebibytes * 2**20 // len(CHUNK)):
            yield CHUNK

    await store.files.put(NewFile(filename="large.jsonl", purpose=Purpose.BATCH), chunks())


async def _files(store: BatchStore) -> None:
    for _ in range(SMALL_FILES):
        new = NewFile(filename="small.jsonl", purpose=Purpose.BATCH)
        await store.files.put(new, once(b"x" * SMALL_BYTES))


async def _queue(store: BatchStore, lines: int) -> None:
    await store.lines.add(
        Line(job=JOB, number=number, custom_id=str(number), url=CHAT, body=BODY)
        for number in range(lines)
    )


async def _results(store: BatchStore, lines: int) -> None:
    for start in range(0, lines, AT_ONCE):
        numbers = range(start, min(lines, start + AT_ONCE))
        results = (
            Result(job=JOB, number=number, status=200, custom_id=str(number), body=BODY)
            for number in numbers
        )
        await asyncio.gather(*(store.results.put(result) for result in results))


if __name__ == "__main__":
    main()
