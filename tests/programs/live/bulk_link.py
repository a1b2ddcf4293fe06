"""What large bodies do to ordinary requests on a link between regions, over real nats-servers.

    make bulk-link

us has no engine and forwards everything to eu; the leaf link passes a proxy with a round trip, a
bandwidth and a queue. Ordinary streams of a few words go at an even pace; large bodies (chats with
an image), or large answers, go beside them, some at a time.
"""

import asyncio
import base64
import random
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import orjson

from infra import topology
from mesh.demo.wan_proxy import WanProxy
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import ScriptedEngine, event, opened, scripted_engine
from tests.support.small_mesh import SmallMesh, chat, small_mesh, upload

MEBIBYTE = 1024 * 1024
QUEUE_BYTES = 256 * 1024
REQUEST_S_MAX = 180.0
JSON = {"content-type": "application/json"}


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


@dataclass
class Found:
    """Results of ordinary requests and of large ones."""

    statuses: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    big: Counter[str] = field(default_factory=Counter)
    big_s: list[float] = field(default_factory=list)
    cuts: int = 0

    def __str__(self) -> str:
        failed = sum(n for status, n in self.statuses.items() if status != "200")
        first = sorted(self.first_s)
        p99 = first[int(0.99 * (len(first) - 1))] if first else 0.0
        middle = statistics.median(first) if first else 0.0
        return (
            f"ordinary failed {failed} of {self.statuses.total()} {dict(self.statuses)}; first "
            f"byte median {middle:.3f} s, p99 {p99:.3f} s, most {max(first, default=0.0):.3f} s; "
            f"large {dict(self.big)}, longest {max(self.big_s, default=0.0):.1f} s; "
            f"link cut {self.cuts} times"
        )


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


async def play(load: Load, directory: Path) -> Found:
    mesh_file = topology.parse(mesh_toml(("eu", "us")), "mesh.toml")
    [link] = mesh_file.links
    rate = load.mbits * 1e6 / 8
    wan = WanProxy(
        mesh_file.regions[link.acceptor].leaf[0],
        one_way_s=load.rtt_ms / 2000,
        bytes_per_s=rate,
        held_bytes_max=QUEUE_BYTES + int(rate * load.rtt_ms / 2000),
    )
    found = Found()
    async with wan:
        target = str(mesh_file.regions[link.acceptor].leaf[0])

        def through_proxy(region: str, config: dict[str, Any]) -> None:
            leafnodes = config.get("leafnodes", {})
            for remote in leafnodes.get("remotes", []):
                remote["url"] = remote["url"].replace(target, str(wan.address))
            if leafnodes.get("advertise") == target:  # which is dialled, too, after a cut
                leafnodes["advertise"] = str(wan.address)

        regions = NatsRegions(mesh_file, directory, edit=through_proxy)
        await regions.start()
        try:
            async with scripted_engine() as engine, small_mesh(regions) as mesh:
                engine.behaviour = answer
                await _run(load, mesh, engine, found)
        finally:
            await regions.stop()
        logs = "".join(regions.log(name) for name in ("us", "eu"))
        found.cuts = logs.count("Stale Connection") + logs.count("WriteDeadline")
    return found


async def _run(load: Load, mesh: SmallMesh, engine: ScriptedEngine, found: Found) -> None:
    for region in ("us", "eu"):
        await mesh.router(region)
    await mesh.agent("eu", "eu-0", engine)
    await mesh.until_ready("eu", 1)
    await mesh.until_peer("us", "eu")
    bodies = [orjson.dumps(large(load, seed)) for seed in range(load.big)]
    gate = asyncio.Semaphore(load.at_a_time)
    clock = asyncio.get_running_loop().time

    async def ordinary(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number * load.seconds / load.ordinary)
        body = orjson.dumps(chat(f"hello {number}", stream=True))
        status, first_s = await ask(mesh.urls["us"], body, http)
        found.statuses[status] += 1
        found.first_s.append(first_s)

    async def big(http: aiohttp.ClientSession, body: bytes) -> None:
        await asyncio.sleep(1.0)
        async with gate:
            began = clock()
            status, _ = await ask(mesh.urls["us"], body, http)
            found.big[status] += 1
            found.big_s.append(clock() - began)

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX),
        connector=aiohttp.TCPConnector(limit=0),
    ) as http:
        await asyncio.gather(
            *(ordinary(http, number) for number in range(load.ordinary)),
            *(big(http, body) for body in bodies),
        )


@click.command()
@click.option("--mbits", type=float, default=20.0, show_default=True)
@click.option("--rtt-ms", type=float, default=80.0, show_default=True)
@click.option("--big", type=int, default=1, show_default=True)
@click.option("--at-a-time", type=int, default=100, show_default=True)
@click.option("--mebibytes", type=float, default=8.0, show_default=True)
@click.option("--ordinary", type=int, default=200, show_default=True)
@click.option("--seconds", type=float, default=30.0, show_default=True)
@click.option("--answers", is_flag=True, help="Large answers instead of large bodies.")
def main(**options: Any) -> None:
    """One run."""
    load = Load(**options)
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(play(load, Path(name)))
    click.echo(f"{load.mbits:g} Mbit/s, {load.rtt_ms:g} ms, {load.big} large: {found}")


if __name__ == "__main__":
    main()
