"""Which faults happen, to what and for how long: a function of the seed and of the mesh's shape."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

KILL = None  # in place of the seconds of a stop
STOP_S = (0.5, 10.0)
QUICK_STOP_S = (0.5, 3.0)
# Where a whole region is suspended, the short ones have no effect: no timeout is so short.
REGION_STOP_S = (3.0, 10.0)
QUICK_REGION_STOP_S = (4.0, 5.0)
PAUSE_S = (0.5, 2.5)  # from the end of one fault to the next
REGION_STOPS = 3  # in a round: it takes a stream that is just ending to see what goes wrong then


class Kind(StrEnum):
    """What is done. Killed is SIGKILL, stopped SIGSTOP and, some seconds later, SIGCONT."""

    ENGINE_KILLED = "engine killed"
    ENGINE_STOPPED = "engine stopped"
    AGENT_KILLED = "agent killed"
    AGENT_STOPPED = "agent stopped"
    ROUTER_KILLED = "router killed"
    ROUTER_STOPPED = "router stopped"
    NATS_KILLED = "nats-server killed"
    NATS_STOPPED = "nats-server stopped"
    REPLICA_KILLED = "engine and agent killed"
    REGION_KILLED = "nats-server, routers and agents killed"
    REGION_STOPPED = "nats-server, routers and agents stopped"
    LINK_CUT = "leaf link cut"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a region consists of; every region is alike."""

    regions: Sequence[str]
    routers: Sequence[str]
    replicas: int

    @property
    def links(self) -> list[frozenset[str]]:
        """Every pair of regions."""
        return [
            frozenset((one, other))
            for at, one in enumerate(self.regions)
            for other in self.regions[at + 1 :]
        ]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Programs are named as `mesh.demo` names them."""

    kind: Kind
    programs: tuple[str, ...]
    link: frozenset[str] | None  # the regions at its ends
    lasts_s: float | None  # None: killed, and started again by its supervisor
    pause_s: float  # before it

    @property
    def what(self) -> str:
        """What it befalls, for a person."""
        return "–".join(sorted(self.link)) if self.link else ", ".join(self.programs)


def faults(
    seed: int, shape: Shape, *, kinds: Sequence[Kind] = tuple(Kind), quick: bool = False
) -> Iterator[Fault]:
    """Without end: rounds (see `one_round`) of these kinds, each in an order of its own."""
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(one_round(kinds), len(one_round(kinds))):
            yield _fault(kind, rng, shape, quick=quick)


def one_round(kinds: Sequence[Kind] = tuple(Kind)) -> list[Kind]:
    """Each of these kinds once, but for the one that needs luck to show anything."""
    return [kind for kind in kinds for _ in range(_times(kind))]


def _times(kind: Kind) -> int:
    return REGION_STOPS if kind is Kind.REGION_STOPPED else 1


def _fault(kind: Kind, rng: random.Random, shape: Shape, *, quick: bool) -> Fault:
    region = rng.choice(list(shape.regions))
    router = f"router-{region}-{rng.choice(list(shape.routers))}"
    number = rng.randrange(shape.replicas)
    engine, agent = f"engine-{region}-{number}", f"agent-{region}-{number}"
    link = rng.choice(shape.links)
    everything = (
        f"nats-{region}",
        *(f"router-{region}-{name}" for name in shape.routers),
        *(f"agent-{region}-{at}" for at in range(shape.replicas)),
    )
    programs: Mapping[Kind, tuple[str, ...]] = {
        Kind.ENGINE_KILLED: (engine,),
        Kind.ENGINE_STOPPED: (engine,),
        Kind.AGENT_KILLED: (agent,),
        Kind.AGENT_STOPPED: (agent,),
        Kind.ROUTER_KILLED: (router,),
        Kind.ROUTER_STOPPED: (router,),
        Kind.NATS_KILLED: (f"nats-{region}",),
        Kind.NATS_STOPPED: (f"nats-{region}",),
        Kind.REPLICA_KILLED: (engine, agent),
        Kind.REGION_KILLED: everything,
        Kind.REGION_STOPPED: everything,
        Kind.LINK_CUT: (),
    }
    usual, whole_region = (QUICK_STOP_S, QUICK_REGION_STOP_S) if quick else (STOP_S, REGION_STOP_S)
    between = whole_region if kind is Kind.REGION_STOPPED else usual
    lasts_s = math.exp(rng.uniform(*map(math.log, between)))  # short ones as often as long ones
    return Fault(
        kind=kind,
        programs=programs[kind],
        link=link if kind is Kind.LINK_CUT else None,
        lasts_s=KILL if kind.endswith("killed") else lasts_s,
        pause_s=rng.uniform(*PAUSE_S),
    )
