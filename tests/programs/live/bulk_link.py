"""What large bodies do to ordinary requests on a link between regions, over real nats-servers.

    make bulk-link [WRITE=docs/benchmarks]

us has no engine and forwards everything to eu; the leaf link passes a proxy with a round trip, a
bandwidth and a queue. Ordinary streams of a few words go at an even pace, at first alone. Then
large bodies (chats with an image), or large answers, go beside them, some at a time. With `--both`
every other ordinary request goes from eu to a model that us alone has. The link, the
engine, the large requests and each region's router (with eu's agent) have processes of their own:
that of the ordinary requests does nothing else.
"""

import asyncio
import base64
import contextlib
import itertools
import multiprocessing
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import click
import orjson

from infra import topology
from infra.address import Address
from mesh.demo.wan_proxy import WanProxy
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.result_page import result_page
from tests.support.scripted_engine import ScriptedEngine, event, opened, scripted_engine
from tests.support.small_mesh import chat, small_mesh, upload

MEBIBYTE = 1024 * 1024
QUEUE_BYTES = 256 * 1024
REQUEST_S_MAX, READY_S = 180.0, 60.0
JSON = {"content-type": "application/json"}
MODELS = {"us": "tiny", "eu": "tiny-us"}  # by who asks: each is served in the other region


@dataclass
class Load:
    """What is sent in one run."""

    mbits: float
    rtt_ms: float
    big: int
    at_a_time: int
    mebibytes: float
    ordinary: int
    seconds: float
    answers: bool
    both: bool = False


@dataclass
class Found:
    """Results of ordinary requests, alone and beside large ones, and of these."""

    statuses: Counter[str] = field(default_factory=Counter)
    alone_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    big: Counter[str] = field(default_factory=Counter)
    big_s: list[float] = field(default_factory=list)
    cuts: int = 0

    def __str__(self) -> str:
        """The cells of a row."""
        alone_s, beside_s = p99(self.alone_s), p99(self.first_s)
        ordinary, big = self.statuses.total(), self.big.total()
        cells = (
            f"{ordinary - self.statuses['200']} of {ordinary}",
            *(f"{statistics.median(each):.3f}" for each in (self.alone_s, self.first_s)),
            *(f"{alone_s:.3f}", f"{beside_s:.3f}", f"{beside_s / alone_s:.2f}"),
            f"{big - self.big['200']} of {big}, {max(self.big_s, default=0.0):.1f}",
            str(self.cuts),
        )
        return " | ".join(cells)


HEAD = (
    *("link", "large", "failed", "p50 alone, s", "p50 beside, s", "p99 alone, s", "p99 beside, s"),
    *("p99 ratio", "large: failed, longest s", "link cut"),
)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


async def answer(request: Any, body: Any) -> Any:
    stream = await opened(request)
    if str(body["messages"][0]["content"]).startswith("long"):
        for _ in range(int(str(body["messages"][0]["content"]).split()[1])):
            await stream.write(event(base64.b64encode(random.randbytes(12_000)).decode()))
    for word in range(3):
        await stream.write(event(f"word {word}"))
        await asyncio.sleep(0.02)
    await stream.write(b"data: [DONE]\n\n")
    return stream


def large(load: Load, seed: int) -> dict[str, Any]:
    if load.answers:
        return chat(f"long {int(load.mebibytes * 64)} {seed}", stream=True)
    size = int(load.mebibytes * MEBIBYTE)
    data = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [{"type": "text", "text": f"what is {seed}"}, image]
    return chat() | {"messages": [{"role": "user", "content": content}], "stream": True}


async def ask(url: str, body: bytes, http: aiohttp.ClientSession) -> tuple[str, float]:
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        async with http.post(
            f"{url}/v1/chat/completions", data=upload(body), headers=JSON
        ) as reply:
            first = await reply.content.readany()
            first_s = clock() - began
            rest = await reply.read()
            whole = (first + rest).rstrip().endswith(b"[DONE]")
            if reply.status == 200 and whole:
                return "200", first_s
            return f"{reply.status} {(first + rest)[-120:]!r}", first_s
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__, clock() - began


# Each of these runs in a process of its own until that is ended, and sends what others need.


async def link(told: Connection, target: Address, load: Load) -> None:
    rate = load.mbits * 1e6 / 8
    one_way_s = load.rtt_ms / 2000
    held = QUEUE_BYTES + int(rate * one_way_s)
    proxy = WanProxy(target, one_way_s=one_way_s, bytes_per_s=rate, held_bytes_max=held)
    async with proxy:
        told.send(proxy.address)
        await asyncio.Event().wait()


async def engine(told: Connection, model: str) -> None:
    async with scripted_engine(model) as made:
        made.behaviour = answer
        told.send(made.port)
        await asyncio.Event().wait()


async def region(
    told: Connection, regions: NatsRegions, name: str, peer: str, engine_port: int, *, asks: bool
) -> None:
    """`engine_port`: of its replica's engine; 0: it has none. `asks`: whether its clients do."""
    async with small_mesh(regions) as mesh:
        url, model = await mesh.router(name), MODELS[peer]
        if engine_port:
            beside = ScriptedEngine(model)
            beside.port = engine_port
            await mesh.agent(name, f"{name}-0", beside)
            await mesh.until_ready(name, 1, model)
        told.send(url)
        if asks:
            await mesh.until_peer(name, peer, MODELS[name])
        told.send("all is there")
        await asyncio.Event().wait()


async def large_ones(told: Connection, load: Load, url: str) -> None:
    """Begins when it is told to; sends status and seconds of each."""
    bodies = [orjson.dumps(large(load, seed)) for seed in range(load.big)]
    gate = asyncio.Semaphore(load.at_a_time)
    clock = asyncio.get_running_loop().time
    told.send(len(bodies))
    await asyncio.to_thread(told.recv)

    async def one(http: aiohttp.ClientSession, body: bytes) -> tuple[str, float]:
        async with gate:
            began = clock()
            status, _ = await ask(url, body, http)
            return status, clock() - began

    async with session() as http:
        told.send(await asyncio.gather(*(one(http, body) for body in bodies)))
    await asyncio.Event().wait()


@contextlib.contextmanager
def role(work: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Connection]:
    """A process for it, which is ended at the end."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(work, theirs, *arguments), kwargs=options, daemon=True
    )
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _run(work: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    asyncio.run(work(*arguments, **options))


async def said(by: Connection) -> Any:
    """Its next word. Raises EOFError if it ended instead."""
    async with asyncio.timeout(READY_S):
        while not by.poll():
            await asyncio.sleep(0.02)
    return by.recv()


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def play(load: Load, directory: Path) -> Found:
    mesh_file = topology.parse(mesh_toml(("eu", "us")), "mesh.toml")
    [between] = mesh_file.links
    target = mesh_file.regions[between.acceptor].leaf[0]
    found = Found()
    with contextlib.ExitStack() as roles:
        address = str(await said(roles.enter_context(role(link, target, load))))

        def through_proxy(name: str, config: dict[str, Any]) -> None:
            leafnodes = config.get("leafnodes", {})
            for remote in leafnodes.get("remotes", []):
                remote["url"] = remote["url"].replace(str(target), address)
            if leafnodes.get("advertise") == str(target):  # which is dialled, too, after a cut
                leafnodes["advertise"] = address

        regions = NatsRegions(mesh_file, directory, edit=through_proxy)
        await regions.start()
        try:
            asked, started = {}, []
            for name, peer in (("eu", "us"), ("us", "eu")):
                port = 0
                if name == "eu" or load.both:
                    port = await said(roles.enter_context(role(engine, MODELS[peer])))
                asks = name == "us" or load.both
                one = role(region, regions, name, peer, port, asks=asks)
                started.append(roles.enter_context(one))
                url = await said(started[-1])
                if asks:
                    asked[name] = url
            for each in started:
                await said(each)
            large_load = roles.enter_context(role(large_ones, load, asked["us"]))
            await said(large_load)
            await _ordinary(load, asked, found.alone_s, found.statuses)
            found.statuses.clear()
            large_load.send("now")
            await _ordinary(load, asked, found.first_s, found.statuses)
            for status, took_s in await asyncio.to_thread(large_load.recv):
                found.big[status] += 1
                found.big_s.append(took_s)
        finally:
            roles.close()
            await regions.stop()
        logs = "".join(regions.log(name) for name in ("us", "eu"))
        found.cuts = logs.count("Stale Connection") + logs.count("WriteDeadline")
    return found


async def _ordinary(
    load: Load, asked: Mapping[str, str], first_s: list[float], statuses: Counter[str]
) -> None:
    """`asked`: routers, by region; in turn."""
    turn = itertools.cycle(asked.items())

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        name, url = next(turn)
        await asyncio.sleep(number * load.seconds / load.ordinary)
        body = orjson.dumps(chat(f"hello {number}", stream=True, model=MODELS[name]))
        status, took_s = await ask(url, body, http)
        statuses[status] += 1
        first_s.append(took_s)

    async with session() as http:
        await asyncio.gather(*(one(http, number) for number in range(load.ordinary)))


@result_page("bulk-link", "Large bodies beside ordinary requests on a link")
@click.command()
@click.option("--mbits", type=float, multiple=True, default=(10, 20, 50, 200), show_default=True)
@click.option("--rtt-ms", type=float, multiple=True, default=(80, 300), show_default=True)
@click.option("--big", type=int, default=4, show_default=True)
@click.option("--at-a-time", type=int, default=2, show_default=True)
@click.option("--mebibytes", type=float, default=8.0, show_default=True)
@click.option("--ordinary", type=int, default=200, show_default=True)
@click.option("--seconds", type=float, default=30.0, show_default=True)
@click.option("--answers", is_flag=True, help="Large answers instead of large bodies.")
@click.option("--both", is_flag=True, help="Ordinary requests from both regions, in turn.")
def main(mbits: tuple[float, ...], rtt_ms: tuple[float, ...], **options: Any) -> None:
    """Play each link, and print a table: first bytes of ordinary requests, alone and beside."""
    click.echo(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for each, round_trip in itertools.product(mbits, rtt_ms):
        load = Load(mbits=each, rtt_ms=round_trip, **options)
        with tempfile.TemporaryDirectory() as name:
            found = asyncio.run(play(load, Path(name)))
        kind = "answers" if load.answers else "bodies"
        size = f"{load.big} {kind} of {load.mebibytes:g} MiB, {load.at_a_time} at a time"
        size += ", ordinary requests both ways" * load.both
        click.echo(f"| {each:g} Mbit/s, {round_trip:g} ms | {size} | {found} |")


if __name__ == "__main__":
    main()
