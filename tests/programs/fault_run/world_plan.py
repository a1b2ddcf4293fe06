"""What real processes play of a world of `tests.seeds`: its shape, and those of its faults that can
be done to them. Tenants, labels, models and batch jobs are left out; clients ask in a closed loop.
Their answers last half a second: a drain that moves streams is ordered, and finds few to move.
"""

from collections import Counter
from dataclasses import dataclass

from tests.seeds.world import Line, World

# Of one machine; a replica is two processes.
REGIONS_MAX, PROCESSES_MAX = 3, 12
STREAMS_MAX, STREAMS_A_REPLICA = 20, 4
DIES = ("engine_dies", "agent_dies", "router_dies", "bus_restarts", "store_empties")
LEAVES = ("agent_leaves", "router_leaves")
STOPS = ("engine_stops", "agent_stops", "router_stops", "bus_hangs")
BUS_AWAY = ("bus_restarts", "bus_hangs", "store_empties")
NAMESAKES = ("agent_namesake", "router_namesake")
LINKS = ("cut", "cut_one_way", "stall", "flap", "late")
ORDERS = ("drain", "routing")
PLAYED = {*DIES, *LEAVES, *STOPS, *NAMESAKES, *LINKS, *ORDERS}


@dataclass(frozen=True, slots=True)
class Plan:
    """`why_not`: why no real processes play it; empty: they do. `left_out`: of its faults."""

    seed: int
    routers: dict[str, list[str]]  # of each region
    replicas: dict[str, int]
    rtt_ms: dict[tuple[str, str], float]
    policy: str
    faults: tuple[Line, ...]
    left_out: Counter[str]
    why_not: str

    @property
    def streams(self) -> int:
        return min(STREAMS_MAX, STREAMS_A_REPLICA * sum(self.replicas.values()))

    @property
    def routers_stop_s(self) -> float:
        """So long a client may wait for a router that it has reached and that is suspended."""
        stops = Counter[str]()
        for line in self.faults:
            if line.what == "router_stops":
                stops[line.of["router"]] += line.number("for")  # type: ignore[assignment]
        return max(stops.values(), default=0.0)


def plan_of(world: World) -> Plan:
    """Times and lengths of faults are the world's."""
    [options] = [line.of for line in world.all("mesh")] or [{}]
    regions = {line.of["name"]: line for line in world.all("region")}
    counts = {name: int(line.number("routers")) for name, line in regions.items()}
    homes = Counter(line.of["region"] for line in world.all("replica"))
    played = tuple(line for line in world.faults if line.what in PLAYED)
    processes = len(regions) + sum(counts.values()) + 2 * homes.total()
    reasons = {
        f"more than {REGIONS_MAX} regions": len(regions) > REGIONS_MAX,
        f"more than {PROCESSES_MAX} processes": processes > PROCESSES_MAX,
        "no replica": not homes,
        "simulated engines make no pairs": any("role" in line.of for line in world.all("replica")),
        "no fault that real processes play": not played,
    }
    far = {name: line.number("far") for name, line in regions.items()}
    return Plan(
        seed=world.seed,
        routers={name: [f"r{n + 1}" for n in range(count)] for name, count in counts.items()},
        replicas={name: homes[name] for name in regions},
        rtt_ms={(a, b): round(2000 * (far[a] + far[b])) for a in far for b in far if a < b},
        policy=options.get("policy", "mesh"),
        faults=played,
        left_out=Counter(line.what for line in world.faults if line.what not in PLAYED),
        why_not=next((why for why, holds in reasons.items() if holds), ""),
    )


def program_of(line: Line) -> str:
    """What a fault befalls, as `mesh.demo` names it."""
    if "router" in line.of:
        return "router-" + line.of["router"].replace(".", "-")
    if "replica" in line.of:
        return f"{line.what.split('_')[0]}-{line.of['replica']}"
    return f"nats-{line.of['region']}"
