"""Memory that a router takes for an open stream: kept to go on elsewhere, and not kept.

    python -m tests.programs.live.stream_memory

A router process over scripted engines whose answers stop after some events. Private memory of the
process before and after so many streams have been opened and read as far as they go; a new router
for each figure, in turns.
"""

import asyncio
import itertools
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import click
import orjson
from aiohttp import web

from infra.bus import BusAddress
from mesh.adapters import streams
from schemas.ids import RegionId
from tests.programs.studies.tables.markdown import table
from tests.support.nats_server import running_nats_server
from tests.support.router_process import router_process
from tests.support.scripted_engine import Behaviour, event, opened, scripted_engine
from tests.support.small_mesh import chat, small_mesh

ENGINES, STREAMS, ROUNDS, EVENT_S = 4, 100, 3, 0.05
WITHIN_S = 300.0
CASES = ((1, 100), (1, 400), (32, 100))  # KiB of a prompt; events said
KEPT, OFF = "kept", "off"
TABLES = {KEPT: "", OFF: '[models."tiny"]\ncontinue_streams = "off"\n'}
COLUMNS = ("prompt, KiB", "events said", KEPT, OFF, "more")


def memory_kib(pid: int) -> dict[str, int]:
    """Of a process, by the kernel's names (`smaps_rollup` of proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def private_bytes(pid: int) -> int:
    """Memory of a process that no other one shares."""
    kib = memory_kib(pid)
    return 1024 * (kib["Private_Clean"] + kib["Private_Dirty"])


def said(events: int) -> Behaviour:
    """So many events, each by itself; then nothing."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        stream = await opened(request)
        for _ in range(events):
            await stream.write(event("word"))
            await asyncio.sleep(EVENT_S)
        await asyncio.Event().wait()
        return stream

    return behaviour


async def measured(folder: Path, table_: str, prompt_kib: int, events: int) -> float:
    """KiB for a stream."""
    folder.mkdir()
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(running_nats_server(folder / "nats"))
        await streams.set_up(BusAddress(nats.url), RegionId("us"), has_peers=False)
        mesh = await stack.enter_async_context(small_mesh({"us": nats}))
        router = await stack.enter_async_context(
            router_process(folder, nats.url, "--access-log", "off", workers=1, routing=table_)
        )
        for number in range(ENGINES):
            engine = await stack.enter_async_context(scripted_engine())
            engine.behaviour, engine.computed = said(events), itertools.count().__next__
            await mesh.agent("us", f"us-{number}", engine)
        await router.until_serves(0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )

        async def begin(number: int) -> None:
            text = f"{number} " + "word " * (prompt_kib * 1024 // 5)
            asked = http.post(
                f"{router.url}/v1/chat/completions", data=orjson.dumps(chat(text, stream=True))
            )
            answer = await stack.enter_async_context(asked)
            assert answer.status == 200, await answer.text()
            for _ in range(2 * events):
                await answer.content.readline()

        async with asyncio.timeout(WITHIN_S):
            await begin(-1)
            before = private_bytes(router.pid)
            await asyncio.gather(*map(begin, range(STREAMS)))
        return (private_bytes(router.pid) - before) / STREAMS / 1024


async def rows(folder: Path) -> list[list[str]]:
    """The table's."""
    found = []
    for prompt_kib, events in CASES:
        kib: dict[str, list[float]] = {name: [] for name in TABLES}
        for round_, name in itertools.product(range(ROUNDS), TABLES):
            here = folder / f"{prompt_kib}-{events}-{round_}-{name}"
            kib[name].append(await measured(here, TABLES[name], prompt_kib, events))
        kept, off = (statistics.median(kib[name]) for name in (KEPT, OFF))
        cells = [
            f"{statistics.median(all_):.1f} ({min(all_):.1f}–{max(all_):.1f})"
            for all_ in kib.values()
        ]
        found.append([f"{prompt_kib}", f"{events:,}", *cells, f"{kept - off:.1f}"])
        click.echo(" · ".join(found[-1]), err=True)
    return found


@click.command()
def main() -> None:
    """Open streams at routers that keep them, and at routers that do not."""
    with tempfile.TemporaryDirectory() as folder:
        print(table(COLUMNS, asyncio.run(rows(Path(folder)))))


if __name__ == "__main__":
    main()
