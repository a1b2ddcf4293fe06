"""Small worlds: a fast engine whose times can be worked out by hand, and ways to ask it."""

from collections.abc import Iterator
from typing import Any

from agents.sim.profiles import Profile
from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.network import BUS_S, HTTP_S
from mesh.sim.workload import Arrival, ClosedLoopClient, RequestNode, Segment, Workload
from mesh.sim.world import World
from schemas.ids import RegionId

US, EU, AP = RegionId("us"), RegionId("eu"), RegionId("ap")

# 10 ms an iteration, 1 ms a prompt token beyond the tenth in it: 100 tokens of prefill are 100 ms.
PLAIN = Profile(
    name="plain",
    knots=((10, 0.010),),
    token_s=0.001,
    sequence_s=0.0,
    context_s=0.0,
    arrival_s=0.0,
    batch_tokens=1000,
    kv_tokens=16_000,
    max_seqs=8,
)
# Client to router to agent, and back: what every answer's first byte pays beside its engine.
LOCAL_S = 2 * (HTTP_S + BUS_S)


def prefill_s(tokens: int) -> float:
    """The first token of an idle PLAIN engine."""
    return PLAIN.linear_s(tokens)


def node(prompt: int = 100, answer: int = 5, *, name: int = 1, **fields: Any) -> RequestNode:
    """A request whose content is its own, if its name is."""
    return RequestNode(
        prompt=(Segment(name, prompt),), answer=Segment(name + 1_000_000, answer), **fields
    )


def arrivals(*rows: tuple[float, RegionId, RequestNode], **fields: Any) -> Workload:
    """Open loop."""
    return Workload(name="test", arrivals=tuple(Arrival(*row) for row in rows), **fields)


def steady(
    count: int, every_s: float, *regions: RegionId, prompt: int = 100, answer: int = 20
) -> Workload:
    """Requests at a steady pace from regions in turn, none like another."""
    rows = [
        (n * every_s, regions[n % len(regions)], node(prompt, answer, name=10 + n))
        for n in range(count)
    ]
    return arrivals(*rows)


def users(region: RegionId, count: int, trees: int, tree: RequestNode | None = None) -> Workload:
    """Closed loop: each user plays so many trees, the same or each its own."""
    clients = tuple(
        ClosedLoopClient(region, iter(_trees(trees, 1000 * number, tree)))
        for number in range(count)
    )
    return Workload(name="test", clients=clients)


def _trees(count: int, first: int, tree: RequestNode | None) -> Iterator[RequestNode]:
    for number in range(count):
        yield tree or node(name=first + number)


def config(regions: dict[RegionId, int] | None = None, **fields: Any) -> WorldConfig:
    """A replica of PLAIN in us, unless given otherwise. `policy` and other settings by name."""
    fleet = {region: (PLAIN,) * count for region, count in (regions or {US: 1}).items()}
    named = {name: fields.pop(name) for name in list(fields) if name in RouterSettings.__slots__}
    return WorldConfig(regions=fleet, settings=RouterSettings(**named), **fields)


def played(workload: Workload, world_config: WorldConfig) -> World:
    """A world that has come to its end."""
    world = World(workload, world_config)
    world.run()
    return world


def leftovers(world: World) -> dict[str, object]:
    """What is left in any table of a world at its end; empty when nothing leaked."""
    found: dict[str, object] = {}
    routers = world.all_routers()
    for router in routers:
        place = f"{router.site} {router.name}"
        if router.core is not None:
            held = [request.key for request in router.core.held]
            found |= {f"{place} inflight": router.core.inflight, f"{place} held": held}
        found[f"{place} open"] = router.open_requests
    for name, replica in world.replicas.items():
        found[f"{name} outstanding"] = replica.outstanding
        found[f"{name} running"] = replica.engine.sim.running
        found[f"{name} answers"] = [router.name for router in routers if replica.answers_to(router)]
    return {name: value for name, value in found.items() if value}
