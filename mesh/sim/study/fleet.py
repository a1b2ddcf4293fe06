"""Which engines stand in a region: one profile, or a pattern of several, dealt out in turn.

`l4-llama3.1-8b*3+h100-llama3.1-8b` gives every fourth replica an H100. A pattern rather than
counts, so that the same mix holds for every number of replicas that a sweep or a plan tries.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from agents.sim.profiles import PROFILES, Profile
from mesh.sim.workload import Workload
from mesh.sim.workloads.capacity import speed_for_load
from schemas.ids import RegionId

PATTERN_MAX = 1000  # replicas before a pattern begins again
REPLICAS_MAX = 10_000  # of one region
EVERYWHERE = ""  # the key of the pattern for regions that have none of their own

Fleets = Mapping[RegionId, Sequence[Profile]]


def parse_pattern(text: str) -> tuple[str, ...]:
    """`A*3+B` as the names A, A, A, B. Raises ValueError that names the known profiles."""
    names: list[str] = []
    for part in text.split("+"):
        name, star, times = part.strip().partition("*")
        if name not in PROFILES:
            raise ValueError(f"unknown profile {name!r}: use one of {', '.join(PROFILES)}")
        if star and not re.fullmatch(r"[1-9][0-9]{0,3}", times):
            raise ValueError(f"{part!r}: write PROFILE*NUMBER, with a number from 1 to 9999")
        names += [name] * (int(times) if star else 1)
    if len(names) > PATTERN_MAX:
        raise ValueError(f"a pattern of {len(names)} replicas is longer than {PATTERN_MAX}")
    return tuple(names)


def deal(patterns: Mapping[str, tuple[str, ...]], replicas: Mapping[RegionId, int]) -> Fleets:
    """Each region's engines: its own pattern, or the one for everywhere, from its beginning."""
    return {
        region: [
            PROFILES[name]
            for name in islice(cycle(patterns.get(region, patterns[EVERYWHERE])), count)
        ]
        for region, count in replicas.items()
    }


def speed_for_fleets(workload: Workload, fleets: Fleets, load: float) -> float:
    """The speed at which the workload is `load` (1 = full) of all these engines together.

    An engine's share of the work is taken to be its share of the capacity, so speeds add up over
    kinds of engines. Raises ValueError for a closed loop, which has no speed.
    """
    engines = Counter(engine.name for fleet in fleets.values() for engine in fleet)
    return sum(
        speed_for_load(workload, PROFILES[name], count, load) for name, count in engines.items()
    )
