"""From the operator's choices, in mesh.toml and on a command line, to a router's settings."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from infra.routing import Routing
from infra.topology import Topology
from mesh.core.federation.geo import Location
from mesh.core.policies import find_maker, make_policy
from mesh.core.policies.base import Following
from mesh.core.region.pushing import Pushing, parse_pushing
from mesh.core.settings import RouterSettings
from mesh.core.waiting.hold_order import HoldOrder
from mesh.runtime.config import Entry
from schemas.ids import RegionId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given:
    """What a command line says; None leaves it to the file. All of it was checked there."""

    policy: str | None = None
    pushing: Pushing | None = None
    hold_order: HoldOrder | None = None


NOTHING_GIVEN = Given()


def router_settings(
    topology: Topology, region: RegionId, given: Given = NOTHING_GIVEN, **others: Any
) -> RouterSettings:
    """The settings of a region's routers; `others` are passed on.

    A policy that the command line gives holds for all classes of requests. Raises TopologyError
    that names the key for a choice that this version doesn't know, and ValueError for others.
    """
    routing = topology.routing_of(region)
    chosen: dict[str, Any] = dict(others)
    if topology.ground.labels:
        chosen["ground"] = topology.ground_for(region)
    if given.policy is not None:
        chosen["policy"] = given.policy
    else:
        if routing.policy is not None:
            chosen["policy"] = _known(topology, region, "policy", _policy, routing.policy)
        chosen["policy_by_priority"] = tuple(
            (priority, _known(topology, region, "policy_by_priority", _policy, name))
            for priority, name in routing.policy_by_priority.items()
        )
    if given.pushing is not None:
        chosen["pushing"] = given.pushing
    elif routing.pushing is not None:
        chosen["pushing"] = _known(topology, region, "pushing", parse_pushing, routing.pushing)
    if given.hold_order is not None:
        chosen["hold_order"] = given.hold_order
    elif routing.hold_order is not None:
        chosen["hold_order"] = HoldOrder(routing.hold_order)
    # Gossip behind the others' choices: who has no secret tells nothing.
    chosen = _gossip(routing) | _exchange(routing) | _proactive(routing) | chosen
    settings = RouterSettings(**chosen)
    if settings.warm_idle_share and not isinstance(
        make_policy(settings.policy, settings, Random(0)), Following
    ):
        table = _table_of(topology, region, "proactive")
        raise topology.error(
            f"{table}.proactive",
            f"policy {settings.policy!r} doesn't know what replicas hold; "
            "leave idle_share 0, or take a policy that follows prefixes",
        )
    return settings


def entries(topology: Topology) -> dict[RegionId, Entry]:
    """How clients come to each region."""
    return {
        name: Entry(region.endpoint, region.location and Location(*region.location))
        for name, region in topology.regions.items()
    }


def _exchange(routing: Routing) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if routing.hops_max is not None:
        chosen["hops_max"] = routing.hops_max
    if routing.queue_delay_s_max is not None:
        chosen["queue_delay_s_max"] = routing.queue_delay_s_max
    if routing.own_ttft_goal_ms is not None:
        chosen["own_ttft_goal_s"] = routing.own_ttft_goal_ms / 1000
    return chosen


def _gossip(routing: Routing) -> dict[str, Any]:
    kib_per_s = routing.gossip_kib_per_s
    if kib_per_s is None:
        return {}
    settings = {"trie_bytes_per_s": 1024 * kib_per_s}
    return settings if kib_per_s else settings | {"siblings_bytes_per_s": 0}


def _proactive(routing: Routing) -> dict[str, Any]:
    table = routing.proactive
    if table is None:
        return {}
    chosen: dict[str, Any] = {"warm_idle_share": table.idle_share}
    if table.kv_used_max is not None:
        chosen["warm_kv_used_max"] = table.kv_used_max
    if table.memory_mib is not None:
        chosen["warm_bytes_max"] = 1024 * 1024 * table.memory_mib
    if table.trend_minutes is not None:
        chosen["warm_trend_s"] = 60.0 * table.trend_minutes
    return chosen


def check(topology: Topology) -> None:
    """Raises TopologyError for the first choice of any region that this version doesn't know."""
    for region in topology.regions:
        router_settings(topology, region)


def _policy(name: str) -> str:
    find_maker(name)
    return name


def _known(
    topology: Topology, region: RegionId, key: str, read: Callable[[str], T], text: str
) -> T:
    try:
        return read(text)
    except ValueError as error:
        table = _table_of(topology, region, key)
        raise topology.error(f"{table}.{key}", str(error)) from error


def _table_of(topology: Topology, region: RegionId, key: str) -> str:
    """Where it was said: the region's own table goes before the mesh's."""
    own: Routing = topology.regions[region].routing
    return f"regions.{region}.routing" if getattr(own, key) else "routing"
