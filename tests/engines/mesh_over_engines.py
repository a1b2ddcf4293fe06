"""A region with a real bus, a real router process, and an agent process beside each real engine."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
from nats.aio.msg import Msg

from infra import bus
from mesh.replay.client import ChatStream
from schemas.decision import Decision, decode_decision
from schemas.http import H_DEBUG, H_DECISION, H_PRIORITY
from schemas.state import Heartbeat, ReplicaState, decode_heartbeat
from tests.engines.engine import EXACT, MODEL, RealEngine
from tests.programs.bench.processes import Processes
from tests.support.nats_server import running_nats_server
from tests.support.router_process import RouterProcess, router_process, runs

ANSWER_WITHIN_S = 90.0
STATE_WITHIN_S = 40.0
LOOK_EVERY_S = 0.02
ANSWERED_BY = re.compile(rb'"model": ?"([^"]*)"')
DONE = b"data: [DONE]\n\n"
CHUNK = re.compile(rb'data: \{(?!"error")')
# The default policy goes by speeds that it learns; on a busy machine those are anything. A test of
# prefixes alone, and one that needs work on every replica, ask with these priorities.
BY_PREFIX, BY_TURNS = "low", "high"
ROUTING = f'policy_by_priority = {{ {BY_PREFIX} = "prefix-tree", {BY_TURNS} = "round-robin" }}'


@dataclass
class Asked:
    """One streamed chat, and what came of it."""

    status: int | None = None  # None: no answer came
    replica: str | None = None  # who answers, by the receipt
    decision: Decision | None = None
    stream: ChatStream = field(default_factory=ChatStream)
    body: bytes = b""  # of an answer that is no stream
    problem: str = ""  # of the connection
    begun: bool = False  # a chunk has come, with content or without
    models: set[str] = field(default_factory=set)  # named in its chunks

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.problem and self.stream.fault is None

    def __str__(self) -> str:
        """For a test that fails."""
        fault = self.stream.fault if self.status == 200 else self.body.decode(errors="replace")
        places = (
            [(each.name, each.why) for each in self.decision.candidates] if self.decision else ()
        )
        return f"{self.replica}: HTTP {self.status} {fault or 'whole'} {self.problem} {places}"


class MeshOverEngines:
    """Region us; replicas are named us-0, us-1 and so on, in the order of the engines."""

    def __init__(
        self, router: RouterProcess, nats_url: str, processes: Processes, directory: Path
    ) -> None:
        self.router, self.directory = router, directory
        self._nats_url, self._processes = nats_url, processes
        self.engines: dict[str, RealEngine] = {}
        self.beats: dict[str, Heartbeat] = {}  # the last of each replica
        self._last: Asked | None = None

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def _any(self) -> RealEngine:
        """One of them: they are of one kind."""
        return next(iter(self.engines.values()))

    async def listen(self, stack: AsyncExitStack) -> None:
        """Keep the heartbeats."""
        address = bus.BusAddress(self._nats_url)
        client = await bus.connect(address, name="test", inbox_prefix="_INBOX")
        stack.push_async_callback(client.close)
        await client.subscribe("mesh.us.heartbeat.*", cb=self.keep_beat)

    async def keep_beat(self, message: Msg) -> None:
        beat = decode_heartbeat(message.data)
        self.beats[beat.replica] = beat

    async def agent(
        self, replica: str, engine: RealEngine, *options: str, **environment: str
    ) -> int:
        """Start an agent beside the engine; its process id."""
        return await self._processes.start(
            f"agent-{replica}",
            (
                *(sys.executable, "-m", "agents.cli", "run", "--region", "us"),
                *("--replica", replica, "--nats-url", self._nats_url),
                *("--engine-kind", engine.kind, "--engine-url", engine.url),
                *("--metrics-url", engine.metrics_url, "--no-speed-probe"),
                *(*engine.agent_options, *options),
            ),
            environment=environment,
        )

    @asynccontextmanager
    async def another_agent(
        self, replica: str, engine: RealEngine, *options: str, **environment: str
    ) -> AsyncIterator[Path]:
        """One more agent for a while; its log."""
        pid = await self.agent(replica, engine, *options, **environment)
        try:
            yield self.directory / "logs" / f"agent-{replica}.log"
        finally:
            os.kill(pid, signal.SIGTERM)
            await self.until(lambda: not runs(pid), f"the agent of {replica} to leave")
            self.beats.pop(replica, None)

    def key_file(self, name: str, key: str) -> Sequence[str]:
        """Options for the agent of an engine with that key; none where it is empty."""
        if not key:
            return ()
        file = self.directory / f"{name}.key"
        file.touch(mode=0o600)
        file.write_text(f"{key}\n")
        return ("--engine-key-file", str(file))

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        """Wait until it is so."""
        try:
            async with asyncio.timeout(STATE_WITHIN_S):
                while True:
                    held = condition()
                    if held if isinstance(held, bool) else await held:
                        return
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise AssertionError(
                f"waited {STATE_WITHIN_S:g} s for {what}; the last asked: {self._last}; "
                f"heartbeats: {self.beats}"
            ) from None

    async def until_ready(self, *replicas: str) -> None:
        """Wait until these replicas, if not all, are ready, idle, and placed on again."""
        names = replicas or tuple(self.engines)

        def idle() -> bool:
            beats = [self.beats.get(name) for name in names]
            return all(
                beat is not None
                and beat.state is ReplicaState.READY
                and not (beat.full or beat.outstanding or beat.running or beat.pending)
                for beat in beats
            )

        await self.until(idle, f"{', '.join(names)} to be ready")
        await self.until(lambda: self._placed_on(set(names)), f"work on {', '.join(names)}")

    async def _placed_on(self, names: set[str]) -> bool:
        """Whether the router considers all of these as places that it could choose."""
        self._last = await self.ask("Who is there?", 1)
        decision = self._last.decision
        found = decision.candidates if decision else ()
        return names <= {place.name for place in found if place.available}

    async def ask(
        self,
        text: str,
        tokens: int,
        *,
        into: Asked | None = None,
        within_s: float = ANSWER_WITHIN_S,
        priority: str = "normal",
        **fields: object,
    ) -> Asked:
        """One chat of exactly so many tokens, as a stream, to its end. `into`: filled meanwhile."""
        asked = into or Asked()
        try:
            async with asyncio.timeout(within_s), self._session(priority) as http:
                await self._read(http, asked, body(text, tokens, self._any.exact, **fields))
        except TimeoutError:
            asked.problem = f"not ended after {within_s:g} s"
        except aiohttp.ClientError as problem:
            asked.problem = repr(problem)
        return asked

    async def _read(self, http: aiohttp.ClientSession, asked: Asked, data: bytes) -> None:
        clock = asyncio.get_running_loop().time
        async with http.post(f"{self.url}/v1/chat/completions", data=data) as answer:
            asked.status = answer.status
            if (receipt := answer.headers.get(H_DECISION)) is not None:
                asked.decision = decode_decision(receipt.encode())
                asked.replica = asked.decision.replica
            if answer.status != 200:
                asked.body = await answer.read()
                return
            async for chunk in answer.content.iter_any():
                asked.stream.feed(chunk, clock())
                asked.begun |= CHUNK.search(chunk) is not None
                asked.models |= {name.decode() for name in ANSWERED_BY.findall(chunk)}
            if not self._any.ends_done:
                asked.stream.feed(DONE, clock())

    def _session(self, priority: str) -> aiohttp.ClientSession:
        headers = {H_DEBUG: "1", H_PRIORITY: priority, "content-type": "application/json"}
        return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def placements(self) -> float:
        """Attempts that the router has made so far."""
        async with aiohttp.ClientSession() as http:
            return await self.router.sample(http, 0, "mesh_placements_total") or 0.0

    async def continued(self) -> float:
        """How many streams went on at another engine."""
        async with aiohttp.ClientSession() as http:
            return await self.router.sample(http, 0, "mesh_streams_continued_total") or 0.0

    async def tokens(self) -> tuple[float, float]:
        """Prompt and output tokens that the router has counted."""
        names = ("mesh_prompt_tokens_total", "mesh_output_tokens_total")
        async with aiohttp.ClientSession() as http:
            prompt, output = [await self.router.sample(http, 0, name) or 0.0 for name in names]
        return prompt, output

    async def counted(self, prompt: float, output: float) -> bool:
        """Whether it has counted at least so many."""
        found = await self.tokens()
        return found[0] >= prompt and found[1] >= output


def body(text: str, tokens: int, exact: Mapping[str, object] = EXACT, **fields: object) -> bytes:
    """A streamed chat of exactly so many tokens."""
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **exact,
            **fields,
        }
    )


@asynccontextmanager
async def mesh_over(
    kind: type[RealEngine], directory: Path, keys: Sequence[str] = ("", "")
) -> AsyncIterator[MeshOverEngines]:
    """Engines of the kind, one for each key (empty: it asks for none), and the mesh over them."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(running_nats_server(directory / "nats"))
        listed = kind.listed_route
        router = await stack.enter_async_context(
            router_process(
                *(directory, nats.url),
                workers=1,
                table=f'routes = ["{listed}"]' if listed else "",
                routing=ROUTING,
            )
        )
        processes = await stack.enter_async_context(
            Processes(directory / "logs", ready_within_s=kind.start_within_s)
        )
        mesh = MeshOverEngines(router, nats.url, processes, directory)
        await mesh.listen(stack)
        for number, key in enumerate(keys):
            engine = kind(processes, f"{kind.kind}-{number}", directory, key)
            mesh.engines[f"us-{number}"] = engine
        await asyncio.gather(*(engine.start() for engine in mesh.engines.values()))
        route = ("--route", listed) if listed else ()
        for replica, engine in mesh.engines.items():
            await mesh.agent(replica, engine, *mesh.key_file(replica, engine.api_key), *route)
        await router.until_serves(0)
        await mesh.until_ready()
        yield mesh
