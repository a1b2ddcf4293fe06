"""Who a router of the twin can speak to, and the meter that stands beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.core.gossip.told import Origin
from mesh.sim.ask import Answered, Ask
from mesh.sim.place import PeerRouter, Worker
from schemas.ids import RegionId, ReplicaId
from schemas.state import Digest


@dataclass(slots=True)
class Meter:
    """What deciding costs: the seconds `handle` took for requests, by a clock from outside."""

    clock: Callable[[], float] | None = None
    decisions: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The rest of the world, as a router sees it."""

    replicas: Mapping[ReplicaId, Worker]
    routers: Mapping[RegionId, Sequence[PeerRouter]]  # by where they stand
    first_byte: Callable[[Ask], None]  # the client sees it
    answered: Callable[[Ask, Answered], None]
    publish: Callable[[Origin, Digest], None]  # whose digest, to its peers
    gossip: Callable[[Origin], dict[type, Callable[[Any], None]]]  # whose effects, performed
    request_s: float  # a request's time, as no client of the twin says its own
    pick: Callable[[int], int]  # one of so many that listen in a queue group
    meter: Meter = field(default_factory=Meter)
