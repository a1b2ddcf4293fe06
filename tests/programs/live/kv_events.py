"""Estimates of what engines have cached against their KV events, over real vLLM on the CPU.

    make bench-kv-events

Conversations over two vLLM, each with a KV cache for fewer of them than go on, so that much is
evicted. The same load is placed twice on the same engines, first with agents that follow the
engines' KV events, then with agents that don't (the order turns round by round); texts differ, so
neither finds the other's prefixes. Each answer is the next turn's history. Each vLLM has a core of
its own: with several, the thread that publishes its events may wait for answers' ends.

A prediction is the number of prompt tokens that the router took for cached at the chosen replica
(`matched_tokens` of the receipt); what was cached, vLLM reports with the answer. It is wrong if
they differ by more than a text block and an engine's block (96 tokens), and by more than a tenth of
the prompt. The first quarter of a run is left out: the router still learns how many tokens a text
has.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import click
import orjson
from nats.aio.msg import Msg

from infra import bus
from schemas.decision import decode_decision
from schemas.http import H_DEBUG, H_DECISION
from tests.engines import install
from tests.engines.engine import MODEL
from tests.engines.mesh_over_engines import MeshOverEngines
from tests.engines.vllm_server import Vllm
from tests.programs.bench.proc import cpu_s
from tests.programs.bench.processes import Absent, Processes
from tests.programs.studies.tables.markdown import table
from tests.support.nats_server import running_nats_server
from tests.support.result_page import result_page
from tests.support.router_process import router_process

EXACT, ESTIMATED = "KV events", "estimates"
BLOCK_TOKENS = 32
BLOCKS = 192  # 6,144 tokens in each engine
ENGINES = 2
WRONG_TOKENS, WRONG_SHARE = 96, 0.1
TURNS = 6
CLIENTS = 4
CONVERSATIONS = 24  # that go on at any time: more than both caches hold
ANSWER_TOKENS = 32
WARM_SHARE = 0.25
LOST = "no place"


class SmallVllm(Vllm):
    """With a cache that is too small, and KV events."""

    more = ("--num-gpu-blocks-override", str(BLOCKS))
    publishes_kv_events = True


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: tokens of its prompt, those predicted and reported to be cached, seconds."""

    prompt: int
    predicted: int
    cached: int
    seconds: float

    @property
    def is_wrong(self) -> bool:
        off = abs(self.predicted - self.cached)
        return off > WRONG_TOKENS and off > WRONG_SHARE * self.prompt


@dataclass(slots=True)
class Arm:
    """What one kind of agents came to, over all rounds."""

    answered: list[Answered] = field(default_factory=list)
    agent_us: list[float] = field(default_factory=list)  # of CPU for a request, one a round
    bus_bytes: list[float] = field(default_factory=list)  # of blocks and deltas, for a request

    def row(self, name: str) -> list[str]:
        """Of the report's table."""
        wrong = [one for one in self.answered if one.is_wrong]
        over = sum(one.predicted > one.cached for one in wrong)
        count = max(1, len(self.answered))
        prompt = max(1, sum(one.prompt for one in self.answered))
        return [
            name,
            f"{len(self.answered):,}",
            f"{len(wrong) / count:.2%}",
            f"{over:,} / {len(wrong) - over:,}",
            f"{median([abs(one.predicted - one.cached) for one in self.answered] or [0]):.0f}",
            f"{sum(one.cached for one in self.answered) / prompt:.3f}",
            f"{1000 * median([one.seconds for one in self.answered] or [0]):.0f}",
            f"{median(self.agent_us or [0]):,.0f}",
            f"{median(self.bus_bytes or [0]):,.0f}",
        ]


COLUMNS = (
    *("agents with", "requests", "wrong predictions", "too many / too few cached"),
    *("off by, tokens (median)", "cached tokens / prompt tokens", "whole answer, ms (median)"),
    *("agents' CPU for a request, us", "bytes on the bus for a request"),
)


class Conversations:
    """Many chats, of which a random one goes on next."""

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self._seed, self._begun = seed, 0
        self._idle: list[list[dict[str, str]]] = [self._new() for _ in range(CONVERSATIONS)]

    def take(self) -> list[dict[str, str]]:
        """One that nobody continues now, with its next question."""
        place = self._dice.randrange(len(self._idle))
        chat = self._idle.pop(place)
        chat.append({"role": "user", "content": self._text(self._dice.randint(60, 140))})
        return chat

    def give_back(self, chat: list[dict[str, str]], answer: str) -> None:
        """It was answered; after TURNS another begins in its place."""
        chat.append({"role": "assistant", "content": answer})
        self._idle.append(chat if len(chat) < 2 * TURNS else self._new())

    def _new(self) -> list[dict[str, str]]:
        self._begun += 1
        about = f"Conversation {self._begun} of {self._seed}. "
        return [{"role": "system", "content": about + self._text(120)}]

    def _text(self, words: int) -> str:
        return " ".join(self._dice.choices(WORDS, k=words))


WORDS = (
    *("the", "of", "a", "router", "network", "queue", "cache", "token", "prompt", "engine"),
    *("block", "region", "agent", "request", "answer", "time", "memory", "server", "message"),
    *("stream", "client", "policy", "price", "load", "batch", "prefix", "tree", "hash"),
)


async def play(
    rounds: int, requests: int, clients: int, show: Callable[[str], None]
) -> dict[str, Arm]:
    """Both arms, `rounds` times in turn. Raises Absent."""
    arms = {EXACT: Arm(), ESTIMATED: Arm()}
    with tempfile.TemporaryDirectory() as name:
        async with _engines(Path(name)) as (engines, processes):
            for number in range(rounds):
                order = (EXACT, ESTIMATED) if number % 2 == 0 else (ESTIMATED, EXACT)
                for arm in order:
                    folder = Path(name) / f"{number}-{arm[:2]}"
                    folder.mkdir()
                    seed = f"round {number}, {arm}"
                    await _run(
                        arms[arm], arm, seed, engines, processes, folder, (requests, clients)
                    )
                    show(f"round {number + 1}: {arms[arm].row(arm)}")
    return arms


@asynccontextmanager
async def _engines(folder: Path) -> AsyncIterator[tuple[Sequence[SmallVllm], Processes]]:
    async with Processes(folder / "logs", ready_within_s=Vllm.start_within_s) as processes:
        engines = [SmallVllm(processes, f"vllm-{n}", folder) for n in range(ENGINES)]
        for engine in engines:  # one after the other: each takes a while of a core to start
            await engine.start()
        yield engines, processes


async def _run(
    arm: Arm,
    kind: str,
    seed: str,
    engines: Sequence[SmallVllm],
    processes: Processes,
    folder: Path,
    load: tuple[int, int],
) -> None:
    """One run of one arm: a new bus, router and agents over the engines that are there."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(running_nats_server(folder / "nats"))
        router = await stack.enter_async_context(router_process(folder, nats.url, workers=1))
        own = await stack.enter_async_context(Processes(folder / "logs"))
        mesh = MeshOverEngines(router, nats.url, own, folder)
        await mesh.listen(stack)
        taken = await _count_bytes(stack, nats.url)
        agents = []
        for number, engine in enumerate(engines):
            mesh.engines[f"us-{number}"] = engine
            options = _kv_options(engine) if kind == EXACT else ()
            agents.append(await mesh.agent(f"us-{number}", engine, *options, "--metrics-port", "0"))
        await router.until_serves(0)
        await mesh.until_ready()
        chats, (requests, clients) = Conversations(seed), load
        warm = round(requests * WARM_SHARE)
        await _ask_all(mesh.url, chats, warm, clients)
        before, bytes_before = cpu_s(agents), sum(taken)
        answered = await _ask_all(mesh.url, chats, requests - warm, clients)
        arm.agent_us.append(1e6 * (cpu_s(agents) - before) / max(1, len(answered)))
        arm.bus_bytes.append((sum(taken) - bytes_before) / max(1, len(answered)))
        arm.answered += answered


def _kv_options(engine: SmallVllm) -> tuple[str, ...]:
    return ("--kv-events", engine.kv_events, "--kv-events-replay", engine.kv_events_replay)


async def _count_bytes(stack: AsyncExitStack, url: str) -> list[int]:
    """Sizes of what agents and routers send each other of blocks."""
    sizes: list[int] = []

    async def count(message: Msg) -> None:
        sizes.append(len(message.data))

    client = await bus.connect(bus.BusAddress(url), name="count", inbox_prefix="_INBOX")
    stack.push_async_callback(client.close)
    for last in ("held", "blocks"):
        await client.subscribe(f"mesh.us.replica.*.{last}", cb=count)
    return sizes


async def _ask_all(url: str, chats: Conversations, requests: int, clients: int) -> list[Answered]:
    """So many requests, `clients` at a time."""
    found: list[Answered] = []
    left = iter(range(requests))
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(headers={H_DEBUG: "1"}, timeout=timeout) as http:

        async def client() -> None:
            for _ in left:
                chat = chats.take()
                answer, one = await _ask(http, url, chat)
                chats.give_back(chat, answer)
                if one is not None:
                    found.append(one)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())
    return found


async def _ask(
    http: aiohttp.ClientSession, url: str, chat: Sequence[dict[str, str]]
) -> tuple[str, Answered | None]:
    body = {"model": MODEL, "messages": list(chat), "max_tokens": ANSWER_TOKENS, "temperature": 0.8}
    began = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        data = orjson.loads(await response.read())
        header = response.headers.get(H_DECISION)
        if response.status != 200 or header is None:
            return LOST, None
    decision = decode_decision(header.encode())
    chosen = [one for one in decision.candidates if one.name == decision.replica]
    usage = data["usage"]
    text = data["choices"][0]["message"]["content"] or ""
    if not chosen:
        return text, None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    predicted = chosen[0].matched_tokens or 0
    seconds = time.perf_counter() - began
    return text, Answered(usage["prompt_tokens"], predicted, cached, seconds)


def report(arms: dict[str, Arm]) -> str:
    """The table."""
    return table(COLUMNS, [arm.row(name) for name, arm in arms.items()])


@result_page("kv-events", "KV events against estimates")
@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--requests", default=400, show_default=True, type=click.IntRange(min=8))
@click.option("--clients", default=CLIENTS, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One round of 80 requests.")
def main(rounds: int, requests: int, clients: int, quick: bool) -> None:
    """Compare what routers take for cached with what vLLM reports, with its events and without."""
    if quick:
        rounds, requests = 1, 80
    try:
        asyncio.run(install.main())
        arms = asyncio.run(play(rounds, requests, clients, lambda line: click.echo(line, err=True)))
    except Absent as problem:
        sys.exit(str(problem))
    print(report(arms))


if __name__ == "__main__":
    main()
