"""Real engines behind the mesh, and the twin with an engine made of what was measured of them.

    make fidelity-engines
    make fidelity-engines ONLY=vLLM-GPU    # the `vllm` on PATH, of a machine with a GPU

Each round measures one vLLM or llama.cpp (`mesh-agent profile --calibrate`), then plays
conversations through a real router, bus and agent over it, then the same requests in the twin with
that profile: the same arrivals and pauses, prompts of as many tokens as the engine counted,
answers as long. What the mesh's own processes take, which is nothing in the twin, is measured
before: prompts to the engine and to the mesh over it, in turns. A round's two sides are minutes
apart on one machine, so rounds are compared one by one.

vLLM's processes on the CPU have one core, and everything else the others. Otherwise its core and
its worker wait for each other in loops on a core each, and the core's thread that sends tokens gets
its turn when the answer is over. llama.cpp waits in no loop; vLLM on a GPU is for machines with a
core for every process.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import click
import orjson

from agents.config import EngineConfig
from agents.core.engine_curves import CalibratedEngine, encode_calibrated
from agents.core.made_up_text import WORDS
from agents.profiler.curves import measured
from agents.profiler.engine import ProfiledEngine
from agents.sim.profile_files import find_profile
from agents.sim.profiles import Profile
from mesh.core.model.settings import RouterSettings
from mesh.replay.client import ChatStream
from mesh.replay.tally import percentile
from mesh.sim.config import WorldConfig
from mesh.sim.workload import Arrival, Segment, Workload, chain
from mesh.sim.workloads.content import segment
from mesh.sim.world import run
from schemas.ids import RegionId
from tests.engines import install, tiny_gguf
from tests.engines.engine import MODEL, RealEngine
from tests.engines.llamacpp import LlamaCpp
from tests.engines.mesh_over_engines import MeshOverEngines
from tests.engines.vllm_gpu import VllmOnGpu
from tests.engines.vllm_server import Vllm
from tests.programs.bench.processes import Absent, Processes
from tests.programs.studies.tables.markdown import table
from tests.support.cores import on_cores
from tests.support.nats_server import running_nats_server
from tests.support.result_page import result_page
from tests.support.router_process import router_process

HOME = RegionId("us")
CHUNK_TOKENS = 2048  # of all engines
TURNS, PAUSE_S, ANSWER_TOKENS = 3, 1.0, 32
WITHIN_S = 120.0
TTFT_MOST = 0.15
PAIRS, PAIR_WORDS = 25, 20  # short prompts to the engine and to the mesh, in turns
COLUMNS = (
    *("engine", "figure", "live (lowest–highest)", "twin (lowest–highest)"),
    *("apart, by rounds (lowest–highest)", "at most"),
)


class BatchingVllm(Vllm):
    batch_max = 8
    has_own_core = True
    more = ("--max-num-batched-tokens", str(CHUNK_TOKENS))


class BatchingVllmOnGpu(VllmOnGpu):
    batch_max = 8
    has_own_core = False
    more = ("--max-num-batched-tokens", str(CHUNK_TOKENS))


class BatchingLlamaCpp(LlamaCpp):
    has_own_core = False
    batch_max = 4  # as many slots, and a conversation's prefix stays in its own


class Load(NamedTuple):
    """Conversations a second, words of what begins one, of a question and of an answer's text."""

    per_s: float
    opening: int
    question: int
    reply: int


ON_GPU = "vLLM-GPU"
LOADS: dict[str, tuple[type[BatchingVllm | BatchingVllmOnGpu | BatchingLlamaCpp], Load]] = {
    "vLLM": (BatchingVllm, Load(0.5, 560, 280, 20)),
    "llama.cpp": (BatchingLlamaCpp, Load(0.2, 160, 80, 8)),
    ON_GPU: (BatchingVllmOnGpu, Load(1.5, 3600, 900, 20)),
}
INSTALLED = [name for name in LOADS if name != ON_GPU]


@dataclass(slots=True)
class Played:
    """One conversation: when it begins, its messages, and what came of each turn."""

    at_s: float
    opening: str
    questions: list[str]
    replies: list[str]  # said to be the answers: those of a random model have no known length
    prompt_tokens: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    cached: int = 0
    problem: str = ""


def conversations(seed: str, count: int, load: Load) -> list[Played]:
    """The same for the same seed."""
    dice, at_s = random.Random(seed), 0.0
    found = []
    for _ in range(count):
        at_s += dice.expovariate(load.per_s)

        def text(words: int) -> str:
            return " ".join(dice.choices(WORDS, k=round(words * dice.uniform(0.6, 1.4))))

        questions = [text(load.question) for _ in range(TURNS)]
        replies = [text(load.reply) for _ in range(TURNS)]
        found.append(Played(at_s, text(load.opening), questions, replies))
    return found


async def calibrated(engine: RealEngine, seconds: float, file: Path) -> None:
    """Measure it into the file."""
    config = EngineConfig(
        engine_kind=engine.kind, engine_url=engine.url, batch_max=engine.batch_max
    )
    profiled = ProfiledEngine(config, random.Random())
    try:
        await profiled.connect()
        curves = await measured(profiled, seconds, CHUNK_TOKENS, lambda text: None)
    finally:
        await profiled.close()
    found = CalibratedEngine(
        engine=engine.kind, model=profiled.model, measured_at=int(time.time()), curves=curves
    )
    file.write_bytes(encode_calibrated(found))


async def mesh_s(engine: RealEngine, url: str) -> float:
    """What the mesh adds to a time to first token, the median of pairs."""
    added_s = []
    for _ in range(PAIRS):
        ttft_s = []
        for at in (engine.url, url):
            text = " ".join(random.choices(WORDS, k=PAIR_WORDS))
            chat = Played(0.0, text, [text], [""])
            await live(at, [chat])
            ttft_s += chat.ttft_s
        added_s.append(ttft_s[1] - ttft_s[0])
    return max(0.0, median(added_s))


async def live(url: str, chats: Sequence[Played]) -> dict[str, Any]:
    """Play them at the mesh; figures as the twin's report has them."""
    began = asyncio.get_running_loop().time()
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers) as http:
        await asyncio.gather(*(_converse(http, chat, began) for chat in chats))
    problems = [chat.problem for chat in chats if chat.problem]
    assert not problems, problems
    ttft_s = sorted(seconds for chat in chats for seconds in chat.ttft_s)
    prompts = sum(sum(chat.prompt_tokens) for chat in chats)
    return {
        "ttft_s": {"p50": percentile(ttft_s, 0.5), "p90": percentile(ttft_s, 0.9)},
        "cached_token_ratio": sum(chat.cached for chat in chats) / prompts,
    }


async def _converse(http: aiohttp.ClientSession, chat: Played, began: float) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(began + chat.at_s - clock())
    messages = [{"role": "system", "content": chat.opening}]
    for turn in range(len(chat.questions)):
        messages.append({"role": "user", "content": chat.questions[turn]})
        stream, sent_at = ChatStream(), clock()
        async with http.post("/v1/chat/completions", data=_body(messages)) as answer:
            if answer.status != 200:
                chat.problem = f"HTTP {answer.status}: {await answer.text()}"
                return
            async for data in answer.content.iter_any():
                stream.feed(data, clock())
        if stream.fault or stream.usage is None or stream.first_content_s is None:
            chat.problem = f"a stream that ends with {stream.fault}"
            return
        chat.ttft_s.append(stream.first_content_s - sent_at)
        chat.prompt_tokens.append(stream.usage.prompt_tokens)
        chat.cached += stream.usage.cached_tokens or 0
        messages.append({"role": "assistant", "content": chat.replies[turn]})
        if turn < len(chat.questions) - 1:
            await asyncio.sleep(PAUSE_S)


def _body(messages: Sequence[dict[str, str]]) -> bytes:
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def twin(chats: Sequence[Played], profile: Profile, seed: int) -> dict[str, Any]:
    """The same requests in the twin, with an engine of that profile."""
    arrivals = []
    for number, chat in enumerate(chats, 1):
        prompt: tuple[Segment, ...] = ()
        turns, before = [], 0
        for turn, tokens in enumerate(chat.prompt_tokens):
            prompt = (*prompt, segment(tokens - before, "prompt", number, turn))
            turns.append((prompt, segment(ANSWER_TOKENS, "answer", number, turn)))
            before = tokens
        arrivals.append(Arrival(chat.at_s, HOME, chain(turns, number, PAUSE_S)))
    config = WorldConfig(
        regions={HOME: [profile]},
        settings=RouterSettings(policy="mesh"),
        seed=seed,
    )
    return run(Workload(name="conversations", arrivals=tuple(arrivals)), config)


@asynccontextmanager
async def _mesh_over(engine: RealEngine, folder: Path) -> AsyncIterator[str]:
    """The endpoint of a new mesh over an engine that is there."""
    async with (
        running_nats_server(folder / "nats") as nats,
        router_process(folder, nats.url, workers=1) as router,
        Processes(folder / "logs") as processes,
    ):
        mesh = MeshOverEngines(router, nats.url, processes, folder)
        mesh.engines["us-0"] = engine
        await mesh.agent("us-0", engine, "--batch-max", str(engine.batch_max))
        await router.until_serves(0)
        await router.until_answers("/v1/models")
        yield router.url


Rounds = list[tuple[dict[str, Any], dict[str, Any]]]  # live, twin


async def play(name: str, rounds: int, seconds: float, calibration_s: float) -> Rounds:
    """Rounds of one engine. Raises Absent."""
    kind, load = LOADS[name]
    count = max(1, round(seconds * load.per_s))
    found: Rounds = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tiny_gguf.write(place / "tiny.gguf")
        async with Processes(place / "logs", ready_within_s=kind.start_within_s) as processes:
            engine = kind(processes, "engine", place)
            first, *others = sorted(os.sched_getaffinity(0))
            is_apart = kind.has_own_core and bool(others)
            with on_cores({first} if is_apart else set()):
                await engine.start()
            with on_cores(set(others) if is_apart else set()):
                for number in range(1, rounds + 1):
                    own = place / str(number)
                    own.mkdir()
                    found.append(await _round(name, number, engine, own, count, calibration_s))
    return found


async def _round(
    name: str, number: int, engine: RealEngine, own: Path, count: int, calibration_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Live and in the twin."""
    load = LOADS[name][1]
    await calibrated(engine, calibration_s, own / "profile.json")
    chats = conversations(f"{name}, round {number}", count, load)
    async with _mesh_over(engine, own) as url:
        added_s = await mesh_s(engine, url)
        was = await live(url, chats)
    profile = find_profile(str(own / "profile.json"))
    profile = replace(profile, arrival_s=profile.arrival_s + added_s)
    would = twin(chats, profile, number)
    shown = [f"{_ms(one['ttft_s'][p])}" for one in (was, would) for p in ("p50", "p90")]
    text = f"{name}, round {number}: p50, p90 live and twin, ms: {shown}; the mesh {_ms(added_s)}"
    click.echo(text, err=True)
    return was, would


FIGURES = (
    ("TTFT p50, ms", lambda result: result["ttft_s"]["p50"], TTFT_MOST),
    ("TTFT p90, ms", lambda result: result["ttft_s"]["p90"], TTFT_MOST),
    ("cached prompt tokens, %", lambda result: result["cached_token_ratio"] / 10, None),
)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def rows(name: str, found: Rounds) -> list[list[str]]:
    """Of the report's table: medians over the rounds; a round's own two sides are compared."""
    made = []
    for figure, read, most in FIGURES:
        sides = [[read(result) for result in side] for side in zip(*found, strict=True)]
        apart = [would / was - 1.0 if was else 0.0 for was, would in zip(*sides, strict=True)]
        spread = f"{median(apart):+.1%} ({min(apart):+.1%}–{max(apart):+.1%})"
        missed = most is not None and abs(median(apart)) > most
        made.append([
            name, figure,
            *(f"{_ms(median(side))} ({_ms(min(side))}–{_ms(max(side))})" for side in sides),
            f"{spread}{': **miss**' if missed else ''}",
            "–" if most is None else f"{most:.0%}",
        ])  # fmt: skip
    return made


@result_page("fidelity-engines", "The twin beside real engines")
@click.command()
@click.option("--only", type=click.Choice(list(LOADS)), help="One engine, as that on a GPU.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", default=50.0, show_default=True, type=click.FloatRange(min=1))
@click.option("--calibration-s", default=25.0, show_default=True, type=click.FloatRange(min=1))
@click.option("--quick", is_flag=True, help="One round of a few conversations.")
def main(only: str | None, rounds: int, seconds: float, calibration_s: float, quick: bool) -> None:
    """Compare time to first token over real engines with the twin's."""
    if quick:
        rounds, seconds, calibration_s = 1, 10.0, 5.0
    made: list[list[str]] = []
    try:
        if only != ON_GPU:
            asyncio.run(install.main())
        for name in (only,) if only else INSTALLED:
            made += rows(name, asyncio.run(play(name, rounds, seconds, calibration_s)))
    except Absent as problem:
        sys.exit(str(problem))
    print(table(COLUMNS, made))


if __name__ == "__main__":
    main()
