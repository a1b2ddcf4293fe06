"""The batch runner's tunables, with units, where each default comes from, and what it trades."""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from schemas.residency import OPEN_GROUND, Ground
from schemas.settings import Above0, AtLeast0, IntAbove0, UnitRatio


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class OfflineSettings:
    """Validated at construction: a value out of range raises ValueError that names its setting."""

    # Lines in memory: enough for the order by prefix to find neighbours, and for some seconds of a
    # few hundred replicas' work. A line that waits costs an in-progress message now and then.
    window_lines: IntAbove0 = 4096
    window_bytes: IntAbove0 = 268_435_456  # of their bodies
    # Share of choices by prefix, the others by age (HyGen's algorithm 4).
    utility_ratio: UnitRatio = 0.9
    # Share of the window, and of hand-outs, that goes to jobs in turn and not by deadline.
    fair_share: UnitRatio = 0.25
    failures_max: IntAbove0 = 5  # failed attempts of a line before its result is an error
    unserved_s_max: Above0 = 120.0  # a model without a replica for so long is not found
    attempt_s_max: Above0 = 3600.0  # deadline of one attempt
    drain_s_max: AtLeast0 = 20.0  # for what runs, when the runner is to end
    # Of a GPU hour here, in the unit that all regions share; None: no price is given.
    price: AtLeast0 | None = None
    takes_peers: bool = True  # whether peers' lines are placed here
    ground: Ground = OPEN_GROUND  # which region carries which residency labels
