"""What agents promise that follow the KV events of a real engine, as tests: a class for each kind
inherits them. Its engine's cache must hold one of the prompts below and less than eleven.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nats.aio.msg import Msg

from infra import bus
from schemas.held import HeldDelta
from schemas.wire import decode
from tests.engines.engine import RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines
from tests.programs.bench.processes import Processes
from tests.support.nats_server import running_nats_server
from tests.support.router_process import router_process

NAME = "us-0"


class Followed(MeshOverEngines):
    """One engine, and the deltas of its agent."""

    deltas: list[HeldDelta]
    held: set[int]

    def take(self, delta: HeldDelta) -> None:
        if delta.cleared:
            self.held.clear()
        self.held |= set(delta.gpu)
        self.held -= set(delta.lost)
        self.deltas.append(delta)

    async def until_followed(self) -> None:
        """Until routers send prompts' blocks to the agent: it knows all that its engine holds."""
        await self.until(
            lambda: NAME in self.beats and self.beats[NAME].held_seq is not None,
            "the agent to follow its engine",
        )


@asynccontextmanager
async def followed(kind: type[RealEngine], folder: Path, *options: str) -> AsyncIterator[Followed]:
    """An engine of the kind, and the mesh over it. `options`: more of its agent's."""
    async with (
        running_nats_server(folder / "nats") as nats,
        router_process(folder, nats.url, workers=1) as router,
        Processes(folder / "logs", ready_within_s=kind.start_within_s) as processes,
    ):
        mesh = Followed(router, nats.url, processes, folder)
        mesh.deltas, mesh.held = [], set()

        async def keep(message: Msg) -> None:
            if isinstance(delta := decode(message.data), HeldDelta):
                mesh.take(delta)

        client = await bus.connect(bus.BusAddress(nats.url), name="test", inbox_prefix="_INBOX")
        await client.subscribe(f"mesh.us.replica.{NAME}.held", cb=keep)
        await client.subscribe("mesh.us.heartbeat.*", cb=mesh.keep_beat)
        engine = mesh.engines[NAME] = kind(processes, kind.kind, folder)
        await engine.start()
        addresses = ("--kv-events", engine.kv_events, "--kv-events-replay", engine.kv_events_replay)
        await mesh.agent(NAME, engine, *addresses, *options)
        await router.until_serves(0)
        await mesh.until_ready()
        await mesh.until_followed()
        yield mesh
        await client.close()


def text(topic: int) -> str:
    return f"Topic {topic}. " + " ".join(f"router {topic} queue {n}" for n in range(120))


async def predicted_and_cached(mesh: Followed, topic: int, **fields: object) -> tuple[int, int]:
    """Tokens that the router took for cached, and those that the engine reports."""
    asked = await mesh.ask(text(topic), 4, **fields)
    assert asked.whole, asked
    [place] = asked.decision.candidates
    usage = asked.stream.usage
    return place.matched_tokens, usage.cached_tokens or 0


class KvEventsContract:
    """Inherit it in a module with a fixture `mesh`: `followed` over an engine of the kind."""

    async def test_prompts_are_confirmed_and_predicted(self, mesh):
        await predicted_and_cached(mesh, 1)
        await mesh.until(lambda: bool(mesh.held), "the prompt to be reported")
        predicted, cached = await predicted_and_cached(mesh, 1)
        assert cached > 300 and abs(predicted - cached) <= 0.25 * cached

    async def test_what_the_engine_evicts_is_lost_and_not_predicted(self, mesh):
        await predicted_and_cached(mesh, 2)
        before = len(mesh.deltas)
        for topic in range(10, 20):  # more than its cache holds
            await predicted_and_cached(mesh, topic)
        await mesh.until(
            lambda: any(delta.lost for delta in mesh.deltas[before:]), "blocks to be evicted"
        )
        predicted, cached = await predicted_and_cached(mesh, 2)
        assert predicted <= 64 and cached <= 64

    async def test_a_restart_of_the_engine_has_cleared_everything(self, mesh):
        await predicted_and_cached(mesh, 3)
        await mesh.until(lambda: bool(mesh.held), "the prompt to be reported")
        engine = mesh.engines[NAME]
        before = len(mesh.deltas)
        await engine.kill()
        await engine.start()
        await mesh.until(
            lambda: any(delta.cleared for delta in mesh.deltas[before:]), "everything to be lost"
        )
        await mesh.until_ready()
        await mesh.until_followed()
        assert await predicted_and_cached(mesh, 3) == (0, 0)

        async def is_reported() -> bool:
            await predicted_and_cached(mesh, 3)  # once more: the router may not have known that it
            return bool(mesh.held)  # is followed again

        await mesh.until(is_reported, "the new engine's prompt to be reported")
