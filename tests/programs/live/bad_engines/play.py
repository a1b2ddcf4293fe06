"""One play: a mesh over two healthy engines and one that turns bad, under random requests."""

import asyncio
import random
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import orjson

from tests.programs.live.bad_engines.engine import FREE_S, MODEL, TOKENS, Engine
from tests.support.mesh_up import MeshUp, mesh_up, write_config

REGION, BAD = "us", "us-2"
PER_S = 15.0
CLIENT_S = 30.0  # a client's patience
LEFT_S = 0.3  # after which a client that leaves does so
DOCTOR_AT_S = (6.0, 11.0)  # after it turned bad
WORDS = "".join(f"t{n} " for n in range(TOKENS))
OK, LEFT = "ok", "left"
# Metrics of a router, each with the value that says that nothing is wrong with a replica.
WELL = {
    "mesh_replica_failures_total": " 0.0",
    "mesh_replica_left_out": " 0.0",
    "mesh_replica_share": " 1.0",
    "mesh_replicas_page_broken": " 0.0",
    "mesh_replicas_failing": " 0.0",
}


@dataclass(slots=True)
class Outcome:
    """What a play showed. Times in seconds."""

    requests: int = 0
    errors: int = 0
    what: dict[str, int] = field(default_factory=dict)
    p50_s: float = 0.0
    p99_s: float = 0.0
    tried: int = 0  # requests that reached the bad engine
    doctor: str = ""  # the first finding about it
    doctor_s: float | None = None  # after it turned bad
    explain: str = ""
    metrics: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def play(kind: type[Engine] | None, like: type[Engine], seconds: float, seed: int) -> Outcome:
    """`kind`: the third engine; without one it is healthy, too. `like`: what agents take it for."""
    engines = [Engine(), Engine(), (kind or Engine)()]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        given = [part for e in engines for part in ("--engine", f"{REGION}={_url(e)}")]
        config = write_config(folder, regions=(REGION,))
        kinds = ("--engine-kind", like.kind)
        mesh = await stack.enter_async_context(
            mesh_up(folder, *given, *kinds, config=config, time_scale=None)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        load = _Load(session, mesh.endpoint(REGION), seed, leaving=like.kind == "openai")
        await load.run(FREE_S)
        load.counted = True
        bad = engines[2]
        if kind is not None:
            bad.turn_bad()
        examined = asyncio.create_task(_examine(mesh, folder))
        await load.run(seconds)
        await load.finish()
        outcome = load.outcome()
        outcome.tried = len(bad.seen)
        outcome.doctor, outcome.doctor_s = await examined
        outcome.explain = await _explained(bad.seen, folder)
        outcome.metrics = await _measured(session, mesh)
        return outcome


def _url(engine: Engine) -> str:
    return f"http://127.0.0.1:{engine.port}"


class _Load:
    """Clients of the region's router."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, seed: int, *, leaving: bool
    ) -> None:
        self._session, self._url, self._leaving = session, url, leaving
        self._dice = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[tuple[str, float]] = []
        self.counted = False

    async def run(self, seconds: float) -> None:
        """Requests leave at random moments, whatever becomes of them."""
        begin = at = monotonic()
        while (at := at + self._dice.expovariate(PER_S)) < begin + seconds:
            await asyncio.sleep(max(0.0, at - monotonic()))
            self._tasks.append(asyncio.create_task(self._ask(self.counted)))

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    def outcome(self) -> Outcome:
        found = [(what, s) for what, s in self._ends if what != LEFT]
        took = sorted(s for what, s in found if what == OK) or [0.0, 0.0]
        what = Counter(what for what, _ in found)
        return Outcome(
            requests=len(found),
            errors=len(found) - what.pop(OK, 0),
            what=dict(what),
            p50_s=statistics.median(took),
            p99_s=took[min(len(took) - 1, int(0.99 * len(took)))],
        )

    async def _ask(self, counted: bool) -> None:
        words = " ".join(f"w{self._dice.getrandbits(24)}" for _ in range(40))
        is_stream = self._dice.random() < 0.5
        leaves = self._dice.random() < 0.1 and self._leaving
        message = {"role": "user", "content": words}
        body = {"model": MODEL, "messages": [message], "stream": is_stream, "max_tokens": TOKENS}
        began = monotonic()
        try:
            async with asyncio.timeout(LEFT_S if leaves else CLIENT_S):
                what = await self._answer(body, is_stream)
        except TimeoutError:
            what = LEFT if leaves else "no answer in 30 s"
        except aiohttp.ClientError as error:
            what = type(error).__name__
        if counted:
            self._ends.append((what, monotonic() - began))

    async def _answer(self, body: dict[str, Any], is_stream: bool) -> str:
        """`ok`, or what was wrong."""
        url = self._url + "/v1/chat/completions"
        async with self._session.post(url, json=body) as answer:
            given = await answer.read()
        if answer.status != 200:
            return str(answer.status)
        return OK if _said(given, is_stream) == WORDS else "wrong or cut answer"


def _said(given: bytes, is_stream: bool) -> str:
    """The answer's words, or what is no whole answer."""
    try:
        if not is_stream:
            return str(orjson.loads(given)["choices"][0]["message"]["content"])
        events = [line[6:] for line in given.splitlines() if line.startswith(b"data: {")]
        choices = [orjson.loads(event)["choices"][0] for event in events]
        if choices[-1]["finish_reason"] is None:
            return "cut"
        return "".join(choice["delta"].get("content", "") for choice in choices)
    except (ValueError, LookupError, TypeError):
        return "broken"


async def _command(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return (await process.communicate())[0]


def _where(folder: Path) -> tuple[str, ...]:
    credentials = folder / ".mesh/config"
    return ("--config", str(folder / "mesh.toml"), "--credentials", str(credentials))


async def _examine(mesh: MeshUp, folder: Path) -> tuple[str, float | None]:
    """The first finding of `mesh doctor` about the bad replica, and when it was printed."""
    begin = monotonic()
    for at in DOCTOR_AT_S:
        await asyncio.sleep(max(0.0, begin + at - monotonic()))
        printed = await _command("doctor", "--json", "--listen-s", "1", *_where(folder))
        for finding in orjson.loads(printed)["findings"]:
            texts = f"{finding['about']} {finding['detail']}"
            if finding["verdict"] not in ("ok", "unknown") and BAD in texts:
                return f"{finding['check']}: {finding['detail']}", monotonic() - begin
    return "", None


async def _explained(seen: list[str], folder: Path) -> str:
    """What `mesh explain` says of the bad replica in the last request that reached it."""
    for request in [id for id in reversed(seen) if id][:1]:
        printed = await _command("explain", request, *_where(folder))
        lines = [line.strip() for line in printed.decode().splitlines()]
        about = [line for line in lines if BAD in line and "fail" in line]
        return about[-1] if about else ""
    return ""


async def _measured(session: aiohttp.ClientSession, mesh: MeshUp) -> str:
    """Metrics of the router that say what is wrong with the bad replica."""
    async with session.get(mesh.endpoint(REGION) + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [
        line.replace("mesh_", "").replace(f'region="{REGION}",', "")
        for line in lines
        for name, well in WELL.items()
        if line.startswith((name + "{", name + " ")) and not line.endswith(well)
        if BAD in line or "replica=" not in line
    ]
    return "; ".join(found[:3])
