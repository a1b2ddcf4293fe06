"""A router knows what a replica's engine has cached, by the engine's KV events."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import orjson
import pytest
import zmq
from aiohttp import web

from agents.simserver.server import SimServer
from mesh.core.gossip.held_prefixes import HeldPrefixes
from mesh.core.model.prompt import prompt_text
from tests.agents.simserver.support import MODEL, config
from tests.support.ports import free_ports
from tests.support.small_mesh import PATIENT, SmallMesh, post, small_mesh
from tests.support.until import PATIENCE_S, until

REPLICA = "us-0"
REPORTED: Counter[HeldPrefixes] = Counter()  # blocks of deltas and parts, by router
KV_TOKENS = 2048
WORDS = [
    "network",
    "queue",
    "cache",
    "router",
    "region",
    "token",
    "engine",
    "prompt",
    "block",
    "answer",
]


def prompt(topic: int, tokens: int = 600) -> str:
    """Text of about so many of the simulated engine's tokens, four bytes each."""
    words = [f"{WORDS[(topic + n) % len(WORDS)]} {topic}.{n}" for n in range(tokens // 2)]
    return " ".join(words)[: tokens * 4]


def chat(topic: int) -> dict:
    messages = [{"role": "user", "content": prompt(topic)}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8}


class Scene:
    """A region with one replica, whose engine can be ended and started again."""

    def __init__(self, mesh: SmallMesh, *, replays: bool) -> None:
        self.mesh = mesh
        self.port, events, replay = free_ports(3)
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in (events, replay))
        self.replay = self.replay if replays else None
        self.runner: web.AppRunner | None = None
        self.server: SimServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start_engine(self) -> None:
        settings = config(kv_tokens=KV_TOKENS, kv_events=self.events, kv_events_replay=self.replay)
        self.server = SimServer(settings)
        self.runner = web.AppRunner(self.server.app(), handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def end_engine(self) -> None:
        assert self.runner is not None
        runner, self.runner = self.runner, None
        await runner.cleanup()

    async def lose_connection(self) -> None:
        """The events' socket ends and begins anew; all else goes on."""
        publisher = self.server._kv_events
        publisher._events.close(linger=0)
        publisher._events = publisher._context.socket(zmq.PUB)

        def is_bound() -> bool:  # ZeroMQ closes the other socket in a thread of its own
            with contextlib.suppress(zmq.ZMQError):
                publisher._events.bind(self.events)
                return True
            return False

        await until(is_bound)

    def index(self, router: str = "us"):
        [index] = self.mesh.routers[router].core.state.placer.replica_indexes
        return index

    def reported(self, router: str = "us") -> int:
        return REPORTED[self.mesh.routers[router].core.held_prefixes]

    def blocks(self, topic: int, router: str = "us") -> int:
        """How many blocks of that prompt the router takes for held."""
        body = chat(topic)
        requests = self.mesh.routers[router].requests
        read = requests._prompts.read(MODEL, prompt_text(body, chat=True))
        return self.index(router).depth(REPLICA, read.hashes)[0]

    async def until_reporting(self) -> None:
        """Routers send their prompts' blocks to an agent that knows all that its engine holds."""
        replicas = self.mesh.routers["us"].core.replicas
        await self.mesh.until(
            lambda: all(one.heartbeat.held_seq is not None for one in replicas),
            "the agent to follow its engine",
        )

    async def ask(self, topic: int) -> dict:
        status, answer, _ = await post(self.mesh, chat(topic))
        assert status == 200, answer
        return orjson.loads(answer)["usage"]


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    REPORTED.clear()
    take = HeldPrefixes._take

    def count(self, name, message, indexes, now):
        REPORTED[self] += len(message.gpu) + len(message.cpu) + len(message.disk)
        take(self, name, message, indexes, now)

    monkeypatch.setattr(HeldPrefixes, "_take", count)


@contextlib.asynccontextmanager
async def running(nats_server, *, replays: bool = True) -> AsyncIterator[Scene]:
    async with small_mesh({"us": nats_server}) as mesh:
        scene = Scene(mesh, replays=replays)
        await scene.start_engine()
        try:
            await mesh.router("us", policy="mesh", **PATIENT)
            await mesh.agent(
                "us", REPLICA, scene, kv_events=scene.events, kv_events_replay=scene.replay
            )
            await mesh.until_ready("us", 1, MODEL)
            if replays:
                await scene.until_reporting()
            yield scene
        finally:
            if scene.runner is not None:
                await scene.end_engine()


@pytest.fixture
async def scene(nats_server):
    async with running(nats_server) as scene:
        yield scene


async def test_prompts_are_confirmed_and_evicted_ones_are_forgotten(scene):
    await scene.ask(1)
    whole = scene.blocks(1)
    assert whole >= 5
    await scene.mesh.until(lambda: scene.reported() >= whole, "the prompt to be reported")
    for topic in (2, 3, 4, 5):  # 2,400 tokens more, in a cache of 2,048
        await scene.ask(topic)
    await scene.mesh.until(lambda: scene.blocks(1) < whole, "the oldest prompt to be forgotten")
    assert scene.blocks(5) == whole


async def test_an_engine_that_restarts_has_lost_everything(scene):
    await scene.ask(1)
    await scene.mesh.until(lambda: scene.reported() > 0, "the prompt to be reported")
    asking = [asyncio.create_task(post(scene.mesh, chat(topic))) for topic in (2, 3)]
    await scene.end_engine()
    await scene.start_engine()
    await asyncio.gather(*asking)
    await scene.mesh.until(lambda: scene.blocks(1) == 0, "the prompt to be forgotten")
    await scene.mesh.until_ready("us", 1, MODEL)
    await scene.until_reporting()
    before = scene.reported()
    assert (await scene.ask(4))["prompt_tokens_details"]["cached_tokens"] == 0
    # What an engine published before its new subscriber was connected, nobody has.
    last = 4
    async with asyncio.timeout(PATIENCE_S):
        while scene.reported() <= before:
            last += 1
            await scene.ask(last)
    await scene.mesh.until(lambda: scene.blocks(last) > 0, "the last prompt to be known")


async def test_a_lost_connection_alone_is_no_phantom_hit(nats_server):
    """The engine still answers, and nothing repeats what it published."""
    async with running(nats_server, replays=False) as scene:
        await scene.ask(1)  # before its first event the agent knows nothing
        await scene.until_reporting()
        await scene.ask(2)
        whole = scene.blocks(2)
        await scene.mesh.until(lambda: scene.reported() >= whole > 0, "the prompt to be reported")
        await scene.lose_connection()
        await scene.mesh.until(lambda: scene.blocks(2) == 0, "the prompt to be forgotten")
        replica = scene.mesh.routers["us"].core.replicas.get(REPLICA)
        await scene.mesh.until(
            lambda: replica.heartbeat.held_seq is None, "the agent to say that it knows no more"
        )
        await scene.ask(3)
        seen = replica.heartbeat.seq
        await scene.mesh.until(
            lambda: replica.heartbeat.seq > seen + 1, "a heartbeat sent after the answer"
        )
        assert (scene.blocks(1), scene.blocks(2)) == (0, 0), "it answers, and they stay unknown"


async def test_a_router_that_starts_later_learns_what_is_held(scene):
    await scene.ask(1)
    await scene.mesh.until(lambda: scene.reported() > 0, "the prompt to be reported")
    await scene.mesh.router("us", "r2", policy="mesh", **PATIENT)
    await scene.mesh.until(lambda: scene.reported("us/r2") > 0, "the whole set")
    assert scene.blocks(1, "us/r2") == scene.blocks(1)
