"""Streams over simulated engines that are killed: how many end whole, and what their clients see.

    python -m tests.programs.live.continued_streams [--streams 500] [--every 2] [--lose-region]

A real mesh of two regions. The clients of one stream chats whose answers are known, as a simulated
engine has one answer to each prompt. Every few seconds the engine of another replica is killed
(SIGKILL) and started again, or, with --lose-region, every process of the other region.
Each stream is compared with its unbroken text, token by token, and with its usage.

With --dynamo the same clients ask NVIDIA Dynamo's frontend, which moves streams to another of its
mockers. What those say is drawn by chance, so of its streams only the tokens are counted.
"""

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import click
import orjson

from agents.sim.profiles import PROFILES
from agents.sim.text import TOKEN_BYTES
from agents.simserver.requests import RequestParser
from agents.simserver.server import SimConfig
from agents.simserver.serving import serve
from tests.programs.bench.installs import ENVIRONMENTS, installed, version_of
from tests.programs.bench.processes import Processes
from tests.programs.bench.systems import dynamo
from tests.programs.bench.systems.system import Place, System, until_it_answers
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.ports import free_ports

PROFILE = PROFILES["a100-mistral-7b"]
MODEL = "mistral"
HOME, OTHER = "us", "eu"
TOKENS = 120
TIME_SCALE = 0.4
AT_ONCE = 24
DOWN_S = 0.5  # until a killed engine is started again
MIGRATION = ("--migration-limit", "3")
MOCKER = ("--block-size", str(dynamo.BLOCK_TOKENS), "--speedup-ratio", "0.25")
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class Stream:
    """What one client saw."""

    text: str = ""
    ended: str = "cut"
    first_s: float = math.nan  # until its first token
    gaps_s: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    roles: int = 0


def body_of(number: int, model: str) -> dict[str, object]:
    """Of the request of that number."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me about number {number}."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }


def unbroken(number: int, model: str) -> tuple[str, int]:
    """The whole answer, and the tokens of the prompt."""
    parser = RequestParser(models=(model,), max_model_len=10**6, seed=0)
    job = parser.chat(orjson.dumps(body_of(number, model)))
    return job.answer.text, job.prompt_tokens


async def streamed(client: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Stream:
    """Read one stream to its end."""
    seen, last = Stream(), time.monotonic()
    try:
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                seen.ended = f"{answer.status} {(await answer.text())[:160]}"
                return seen
            first = True
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    seen.ended = "whole"
                    continue
                now = time.monotonic()
                if first:
                    seen.first_s = now - last
                else:
                    seen.gaps_s.append(now - last)
                first, last = False, now
                event = orjson.loads(line[6:])
                if "error" in event:
                    seen.ended = f"error: {event['error']['message']}"
                    continue
                seen.names.add(event["id"])
                seen.usage = event.get("usage") or seen.usage
                for choice in event["choices"]:
                    seen.roles += "role" in choice["delta"]
                    seen.text += choice["delta"].get("content") or ""
    except aiohttp.ClientError as problem:
        seen.ended = f"cut: {type(problem).__name__}"
    return seen


class Engine:
    """A simulated engine in a process of its own, which starts again within a moment."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self._process = PROCESSES.Process(target=serve_engine, args=(self._port,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def serve_engine(port: int) -> None:
    """Run one until it is killed."""
    config = SimConfig(profile=PROFILE, models=(MODEL,), time_scale=TIME_SCALE)
    asyncio.run(serve(config, "127.0.0.1", port, None, lambda url: None))


def lost_region(mesh: MeshUp) -> None:
    """Kill every process of the other region that `mesh up` runs; it starts them again."""
    for name, pid in mesh.record["processes"].items():
        if OTHER in name.split("-"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def lose(mesh: MeshUp, every_s: float, engines: list[list[Engine]], *, region: bool) -> None:
    """Lose one set of engines after the other, for ever, and with them the other region."""
    for lost in itertools.cycle(engines):
        await asyncio.sleep(every_s)
        if region:
            lost_region(mesh)
        for engine in lost:
            engine.kill()
        await asyncio.sleep(DOWN_S)
        for engine in lost:
            engine.start()


async def asked(url: str, streams: int, model: str) -> list[Stream]:
    """So many, AT_ONCE at once, in the order of their numbers."""
    turns = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(number: int) -> Stream:
            async with turns:
                return await streamed(client, url, body_of(number, model))

        return await asyncio.gather(*map(one, range(streams)))


async def played(streams: int, every_s: float, *, lose_region: bool) -> str:
    """The table of one run."""
    PROCESSES.set_forkserver_preload(["agents.simserver.server", "agents.simserver.serving"])
    # The clients' own region has too little, so that both serve.
    replicas = {HOME: 1, OTHER: 3} if lose_region else {HOME: 3}
    ports = iter(free_ports(sum(replicas.values())))
    engines = {region: [Engine(next(ports)) for _ in range(n)] for region, n in replicas.items()}
    given = [f"--engine={region}={one.url}" for region, all_ in engines.items() for one in all_]
    lost = [engines[OTHER]] if lose_region else [[one] for one in engines[HOME]]
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        config = write_config(here, regions=tuple(replicas), replicas=1)
        async with mesh_up(here, *given, config=config, time_scale=None) as mesh:
            url = mesh.endpoint(HOME)
            loss = asyncio.create_task(lose(mesh, every_s, lost, region=lose_region))
            try:
                seen = await asked(url, streams, MODEL)
            finally:
                loss.cancel()
            async with aiohttp.ClientSession() as client:
                page = await (await client.get(f"{url}/metrics")).text()
    for engine in itertools.chain(*engines.values()):
        engine.kill()
    return table(seen, MODEL, page)


async def played_by_dynamo(streams: int, every_s: float) -> str:
    """As `played`, of its frontend before three mockers, which it is told of by files."""
    programs = await installed(dynamo.NAME, ENVIRONMENTS)
    with tempfile.TemporaryDirectory() as place:
        async with Processes(Path(place) / "logs") as processes:
            here = Place(processes, (), Path(place))
            group = await dynamo.dynamo_group(here, programs, dynamo.NAME)
            ports = free_ports(3)
            pids = dict(zip(ports, await asyncio.gather(*map(mocker(group), ports)), strict=True))
            _, url = await group.frontend(*dynamo.FRONTEND, *MIGRATION)
            await until_it_answers(here, System(dynamo.NAME, (url,), "", model=dynamo.MODEL))
            kills = 0

            async def lose_mockers() -> None:
                nonlocal kills
                for port in itertools.cycle(ports):
                    await asyncio.sleep(every_s)
                    os.killpg(pids[port], signal.SIGKILL)
                    kills += 1
                    await asyncio.sleep(DOWN_S)
                    pids[port] = await mocker(group)(port)

            loss = asyncio.create_task(lose_mockers())
            try:
                seen = await asked(url, streams, dynamo.MODEL)
            finally:
                loss.cancel()
            if loss.done():
                loss.result()  # raises why no more were killed
    return counted(seen, kills, await version_of("ai-dynamo", programs))


def mocker(group: dynamo.Group) -> Callable[[int], Awaitable[int]]:
    """What starts one whose tokens are about as far apart as the simulated engines'."""
    return lambda port: group.mocker(port, MOCKER)


def counted(seen: list[Stream], kills: int, version: str) -> str:
    """What came of streams whose text nobody knows."""
    ends: Counter[str] = Counter(one.ended[:110] for one in seen)
    whole = [one for one in seen if one.ended == "whole"]
    tokens = Counter(one.usage.get("completion_tokens") for one in whole)
    worst = sorted(max(one.gaps_s, default=0.0) for one in whole) or [math.nan]
    return "\n".join(
        (
            f"{version}: {kills} mockers killed under {len(seen)} streams, whole {len(whole)}",
            f"tokens told of {TOKENS}: {dict(tokens)}; more than one id or role: "
            f"{sum(len(one.names) != 1 or one.roles != 1 for one in whole)}",
            f"longest gap of a stream: p50 {statistics.median(worst):.2f} s, "
            f"p90 {worst[len(worst) * 9 // 10]:.2f} s, max {worst[-1]:.2f} s; {usual(seen)}",
            *(f"{count} × {end}" for end, count in ends.most_common()),
        )
    )


def usual(seen: list[Stream]) -> str:
    """What a gap is to be compared with: an engine begins anew before it goes on."""
    gaps_s = [gap for one in seen for gap in one.gaps_s]
    if not gaps_s:
        return "no stream came through"
    first_s = statistics.median(one.first_s for one in seen if not math.isnan(one.first_s))
    return f"usual gap {statistics.median(gaps_s) * 1000:.0f} ms, first token {first_s:.2f} s"


def table(seen: list[Stream], model: str, page: str) -> str:
    """What came of them."""
    ends: Counter[str] = Counter(one.ended[:110] for one in seen)
    wrong, lost, doubled, bad_usage = 0, 0, 0, 0
    for number, one in enumerate(seen):
        text, prompt_tokens = unbroken(number, model)
        if one.ended == "whole":
            wrong += one.text != text
            told = (one.usage.get("prompt_tokens"), one.usage.get("completion_tokens"))
            bad_usage += told != (prompt_tokens, TOKENS) or len(one.names) != 1 or one.roles != 1
            lost += max(0, len(text) - len(one.text)) // TOKEN_BYTES
            doubled += max(0, len(one.text) - len(text)) // TOKEN_BYTES
    worst = sorted(max(one.gaps_s, default=0.0) for one in seen if one.ended == "whole")
    continued = [line for line in page.splitlines() if line.startswith("mesh_streams_continued_t")]
    broken = sum(
        int(float(line.split()[-1])) for line in continued if 'outcome="refused"' not in line
    )
    long = worst[-broken:] if broken else []
    lines = [
        f"streams {len(seen)}, whole {ends['whole']} ({ends['whole'] / len(seen):.1%})",
        f"of the whole: wrong text {wrong}, tokens lost {lost}, doubled {doubled}, "
        f"usage, id or role wrong {bad_usage}",
        f"went on elsewhere: {broken}; their longest gap: "
        + (f"p50 {statistics.median(long):.2f} s, max {max(long):.2f} s" if long else "-")
        + f"; {usual(seen)}",
        *continued,
        *(f"{count} × {end}" for end, count in ends.most_common()),
    ]
    return "\n".join(lines)


@click.command()
@click.option("--streams", default=500, show_default=True, help="So many.")
@click.option("--every", default=2.0, show_default=True, help="Seconds between two kills.")
@click.option("--lose-region", is_flag=True, help="Kill every process of the other region instead.")
@click.option("--dynamo", "by_dynamo", is_flag=True, help="Ask NVIDIA Dynamo's frontend instead.")
def main(streams: int, every: float, lose_region: bool, by_dynamo: bool) -> None:
    """Kill engines under streams, and print how many streams their clients saw whole."""
    if by_dynamo and lose_region:
        raise click.UsageError("--dynamo has one region")
    if by_dynamo:
        click.echo(asyncio.run(played_by_dynamo(streams, every)))
    else:
        click.echo(asyncio.run(played(streams, every, lose_region=lose_region)))


if __name__ == "__main__":
    main()
