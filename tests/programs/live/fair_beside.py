"""A tenant's first tokens beside another one's flood, live: the mesh, sglang-router and smg.

    make bench-fair [QUICK=1]

Every system gets fresh simulated engines of one region. Tenant B chats, as in `make study-fair`, at
70 % of its half of their time: first alone, then beside tenant A, whose clients send prompts of
6,000 to 10,000 new tokens, each as soon as it has its answer. The mesh runs with fair shares of
equal weights, and without; smg with its priority scheduler (B is `interactive` with half of the
slots reserved, A `bulk`: its limits by tenant are for gRPC engines alone), sglang-router with its
limit of concurrent requests, which knows no tenants. The answers in B's histories are not those
that the engines gave, so of them nothing is cached, in no system.
"""

import asyncio
import contextlib
import hashlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import click

from agents.sim.profile_files import find_profile
from mesh.replay.client import ChatStream, new_session, request_body
from mesh.sim.workload import RequestNode, Segment, Workload
from mesh.sim.workloads.capacity import offered
from tests.programs.bench.installs import ENVIRONMENTS
from tests.programs.bench.processes import Processes
from tests.programs.bench.systems.rust_routers import start_router
from tests.programs.live.versus.systems import start_engines
from tests.programs.studies.fair import B_LOAD, B_PAUSE_S, PROFILE, A, B, chats, documents
from tests.programs.studies.tables.markdown import table
from tests.support.mesh_up import mesh_up, write_config
from tests.support.ports import free_ports
from tests.support.result_page import result_page

REGION, ENGINES, FLOOD = "us", 2, 50
SLOTS = 8 * ENGINES  # that a rival lets in at once
SHARE = 0.5  # B's
ALONE_S, BESIDE_S, WARM_UP_S, PATIENCE_S = 30.0, 60.0, 10.0, 120.0
KEYS = {A: "mesh-key-of-acme", B: "mesh-key-of-beta"}
QUEUE = ("--queue-size", "1000", "--queue-timeout-secs", str(round(PATIENCE_S)))
LIMIT = ("--max-concurrent-requests", str(SLOTS), *QUEUE)
QUEUES = f"queue_size: 1000, queue_timeout_secs: {PATIENCE_S:.0f}, starvation_threshold_secs: 30"
CLASSES = f"""\
classes:
  system: {{reserved_floor: 0, reserved_per_slot: 0, {QUEUES}, can_preempt: true}}
  interactive: {{reserved_floor: {SLOTS // 2}, reserved_per_slot: 0, {QUEUES}, can_preempt: true}}
  bulk: {{reserved_floor: 0, reserved_per_slot: 0, {QUEUES}, can_preempt: false}}
tenant_policies:
  "auth:{B}": {{max_class: interactive}}
  "auth:{A}": {{max_class: bulk}}
"""
TENANTS = "".join(
    f'[tenants.{tenant}]\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
    for tenant, key in KEYS.items()
)


@dataclass(slots=True)
class Seen:
    """What both tenants got of requests that were sent, or tokens that ended, after the warm-up."""

    ttft_s: list[float] = field(default_factory=list)  # B's
    tokens: int = 0  # of prompts and answers that were whole in time
    prompt_tokens: int = 0  # B's
    cached_tokens: int = 0
    lost: int = 0  # B's
    answers: Counter[int] = field(default_factory=Counter)  # A's, by status; 0: none in time

    def quantile(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Clients:
    """Both tenants' of one system, for one phase."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self._http, self._url, self._model = http, f"{url}/v1/chat/completions", model
        self.seen = Seen()

    async def play(self, seconds: float, seed: int, *, floods: bool) -> Seen:
        """B's chats, and A's flood, until the time is over; what is under way then is left."""
        self._from, self._until = time.monotonic() + WARM_UP_S, time.monotonic() + seconds
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(FLOOD if floods else 0):
                group.create_task(self._flood(number, seed))
            sample = chats(REGION, 0, 1.0, 600.0, B)
            work = Workload(name="sample", arrivals=tuple(sample))
            rate_per_s = ENGINES * SHARE * B_LOAD / offered(work, find_profile(PROFILE))
            for arrival in chats(REGION, seed, rate_per_s, seconds, B):
                await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
                group.create_task(self._chat(arrival.node))
        return self.seen

    async def _flood(self, number: int, seed: int) -> None:
        await asyncio.sleep(number * 0.02)
        for node in documents(number, seed, A):
            if time.monotonic() >= self._until:
                return
            await self._ask(node, A)

    async def _chat(self, node: RequestNode) -> None:
        while time.monotonic() < self._until:
            await self._ask(node, B)
            if not node.children:
                return
            [node] = node.children
            await asyncio.sleep(B_PAUSE_S)

    async def _ask(self, node: RequestNode, tenant: str) -> None:
        """One request, to its end or to the phase's."""
        text = "".join(map(words, node.prompt))
        body = request_body(self._model, text, node.answer.tokens)
        headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-smg-priority": "interactive"}
        sent_at, stream, status = time.monotonic(), ChatStream(), 0
        left_s = min(PATIENCE_S, self._until - sent_at)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                asyncio.timeout(left_s),
                self._http.post(self._url, data=body, headers=headers) as answer,
            ):
                status = answer.status
                async for data in answer.content.iter_any():
                    stream.feed(data, time.monotonic())
        if tenant == A and sent_at >= self._from:
            self.seen.answers[status] += 1
        if status not in (0, 200):
            await asyncio.sleep(1.0)  # as a client backs off
        self._count(node, tenant, sent_at, stream)

    def _count(self, node: RequestNode, tenant: str, sent_at: float, stream: ChatStream) -> None:
        if stream.fault is None and time.monotonic() >= self._from:
            self.seen.tokens += node.prompt_tokens + node.answer.tokens
        if sent_at < self._from or tenant != B:
            return
        if stream.first_content_s is not None:
            self.seen.ttft_s.append(stream.first_content_s - sent_at)
            if stream.usage is not None:
                self.seen.prompt_tokens += stream.usage.prompt_tokens
                self.seen.cached_tokens += stream.usage.cached_tokens or 0
        elif time.monotonic() < self._until:
            self.seen.lost += 1
        else:  # still waiting at the end: at least so long
            self.seen.ttft_s.append(time.monotonic() - sent_at)


def words(segment: Segment) -> str:
    """Its text: four letters are a token of simulated engines."""
    return (f"{segment.id:016x}" * (segment.tokens // 4 + 1))[: 4 * segment.tokens]


@contextlib.asynccontextmanager
async def the_mesh(directory: Path, more: str) -> AsyncIterator[str]:
    """`more`: lines of its mesh.toml."""
    config = write_config(directory, regions=(REGION,), replicas=ENGINES)
    config.write_text(config.read_text() + more)
    async with mesh_up(directory, "--profile", PROFILE, config=config, time_scale=1.0) as mesh:
        yield mesh.endpoint(REGION)


@contextlib.asynccontextmanager
async def rival(directory: Path, name: str, options: Sequence[str]) -> AsyncIterator[str]:
    async with Processes(directory / "logs") as processes:
        (directory / "classes.yaml").write_text(CLASSES)
        own = await start_engines(processes, ENGINES, "--profile", PROFILE)
        [port] = free_ports(1)
        given = [option.format(directory=directory) for option in options]
        urls = [f"http://{address}" for address in own]
        verb = ("launch", *given)
        router = await start_router(processes, ENVIRONMENTS, name, verb, urls, port)
        await processes.until(f"{name} with all engines", lambda: _has_all(router.url))
        yield router.url


async def _has_all(url: str) -> bool:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/readiness") as answer:
        found: dict[str, object] = await answer.json()
    return found["healthy_workers"] == ENGINES


SMG = (
    *(option for tenant, key in KEYS.items() for option in ("--tenant-api-key", f"{tenant}:{key}")),
    *("--priority-scheduler-enabled", "--priority-scheduler-config", "{directory}/classes.yaml"),
    *LIMIT,
)
SYSTEMS = {
    "mesh, one queue": lambda directory: the_mesh(directory, ""),
    "mesh, fair shares": lambda directory: the_mesh(directory, TENANTS),
    "sglang-router": lambda directory: rival(directory, "sglang-router", LIMIT),
    "smg": lambda directory: rival(directory, "smg", SMG),
}


async def _system(name: str, seed: int) -> tuple[Seen, Seen]:
    with tempfile.TemporaryDirectory() as folder:
        async with SYSTEMS[name](Path(folder)) as url, new_session(timeout_s=PATIENCE_S) as http:
            model = find_profile(PROFILE).model
            alone = await Clients(http, url, model).play(ALONE_S, seed, floods=False)
            beside = await Clients(http, url, model).play(BESIDE_S, seed + 1000, floods=True)
    return alone, beside


def _row(name: str, rounds: Sequence[tuple[Seen, Seen]]) -> list[str]:
    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    cells = [name]
    for share in (0.5, 0.99):
        alone, beside = ([seen.quantile(share) for seen in of] for of in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        cells += [spread(alone), spread(beside), f"{ratio:.1f}×"]
    floods = [beside for _, beside in rounds]
    cached = statistics.median(one.cached_tokens / max(1, one.prompt_tokens) for one in floods)
    tokens = statistics.median(one.tokens / (BESIDE_S - WARM_UP_S) for one in floods)
    lost = sum(one.lost for one in floods)
    asked = lost + sum(len(one.ttft_s) for one in floods)
    answers = sum((one.answers for one in floods), Counter())
    refused = sum(count for status, count in answers.items() if status not in (0, 200))
    flood = f"{refused} of {answers.total()}"
    return [*cells, f"{tokens:,.0f}", f"{cached:.0%}", f"{lost} of {asked}", flood]


HEAD = (
    *("system", "B's p50 alone, s", "beside A", "ratio", "p99 alone, s", "beside A", "ratio"),
    *("tokens/s of both", "cached of B's", "lost of B's", "refused of A's"),
)


@result_page("fair-beside", "Fair shares beside other routers")
@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One round.")
@click.option("--only", default="", help="Parts of systems' names, with commas.")
def main(rounds: int, quick: bool, only: str) -> None:
    """Play a tenant's chats beside another one's flood, through each system in turns."""
    parts = [part for part in only.split(",") if part]
    names = [name for name in SYSTEMS if not parts or any(part in name for part in parts)]
    found: dict[str, list[tuple[Seen, Seen]]] = {name: [] for name in names}
    for number in range(1 if quick else rounds):
        for name in random.Random(number).sample(names, len(names)):
            found[name].append(asyncio.run(_system(name, number)))
            click.echo(" · ".join(_row(name, found[name][-1:])), err=True)
    click.echo(
        f"{ENGINES} simulated engines ({PROFILE}, real time); A has {FLOOD} clients. Rivals let in"
        f" {SLOTS} requests at once.\nMedians of the rounds, least and most in brackets.\n"
    )
    click.echo(table(HEAD, [_row(name, rounds) for name, rounds in found.items()]))


if __name__ == "__main__":
    main()
