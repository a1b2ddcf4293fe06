"""`[routing]`: how routers place requests, for the whole mesh and, where it differs, for a region.

What a table does not say is left as it was: a region's over the mesh's, the mesh's over the
router's own default; a command line is over both. Policies are known to the router alone, so here
only the form of their names is checked; `mesh router` and `mesh up` check them before they start.
"""

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from infra.table import Table
from schemas.exchange import HOPS_MAX, SLO_MS_MAX, Priority

POLICY_CHARS_MAX = 100
PUSHING_PATTERN = r"^(blind|pending|outstanding:[0-9]{1,6})$"
HOLD_ORDERS = ("first-come", "hit-ratio")


class Shape(StrEnum):
    """Whom a region's requests may go to."""

    MESH = "mesh"
    REGION_LOCAL = "region-local"


def _shape(value: object) -> object:
    if isinstance(value, str) and value.startswith("central"):
        raise ValueError(
            "one router for all regions is known to the simulator only (mesh sim --topology); "
            'write "mesh" or "region-local"'
        )
    if value not in [each.value for each in Shape]:
        raise ValueError('write "mesh" or "region-local"')
    return value


def _classes(value: object) -> object:
    known = [each.value for each in Priority]
    if not isinstance(value, dict):
        raise ValueError('write a table, like { low = "least-load" }')
    for name in value:
        if name not in known:
            raise ValueError(f'no class "{name}"; there are {", ".join(known)}')
    return value


def _pushing(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(PUSHING_PATTERN, value):
        raise ValueError('write "blind", "pending" or "outstanding:N"')
    return value


def _hold_order(value: object) -> object:
    if value not in HOLD_ORDERS:
        raise ValueError('write "first-come" or "hit-ratio"')
    return value


def _hops(value: object) -> object:
    if type(value) is not int or not 0 <= value <= HOPS_MAX:
        raise ValueError(
            f"write a whole number from 0 (forwards nothing) to {HOPS_MAX}: how many regions a "
            "request may pass"
        )
    return value


Policy = Annotated[str, Field(strict=True, min_length=1, max_length=POLICY_CHARS_MAX)]
PolicyByPriority = Annotated[dict[Priority, Policy], BeforeValidator(_classes)]
PushingRule = Annotated[
    str,
    BeforeValidator(_pushing),
    WithJsonSchema({"type": "string", "pattern": PUSHING_PATTERN}),
]
Order = Annotated[
    str,
    BeforeValidator(_hold_order),
    WithJsonSchema({"type": "string", "enum": list(HOLD_ORDERS)}),
]


Hops = Annotated[
    int,
    BeforeValidator(_hops),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": HOPS_MAX}),
]
GoalMs = Annotated[int, Field(strict=True, ge=1, le=SLO_MS_MAX)]
DelayS = Annotated[float, Field(ge=0, le=3600)]


PartOfOne = Annotated[float, Field(ge=0.0, le=1.0)]


class Proactive(Table):
    """Hot prefixes computed on idle replicas before they are asked for; None: the default."""

    idle_share: PartOfOne = 0.0  # of the time that replicas stand idle; 0: nothing is warmed
    kv_used_max: PartOfOne | None = None  # a replica that uses more of its KV memory is left alone
    memory_mib: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None  # of kept prompts
    trend_minutes: Annotated[float, Field(gt=0, le=1440)] | None = None  # demand rises over this


class Routing(Table):
    """The operator's choices; None where the table says nothing."""

    policy: Policy | None = None
    policy_by_priority: PolicyByPriority = Field(default_factory=dict)
    pushing: PushingRule | None = None
    hold_order: Order | None = None
    topology: Annotated[Shape, BeforeValidator(_shape)] | None = None
    hops_max: Hops | None = None  # regions that a request may pass: 0 forwards nothing
    queue_delay_s_max: DelayS | None = None  # requests without an objective; 0: no limit
    own_ttft_goal_ms: GoalMs | None = None  # peers' work must leave this to the own clients
    proactive: Proactive | None = None
    # Prefix gossip on each link; 0: nothing is told, to siblings neither.
    gossip_kib_per_s: Annotated[int, Field(strict=True, ge=0, le=65_536)] | None = None

    def over(self, whole: "Routing") -> "Routing":
        """This table, and where it says nothing the other one."""
        said = {name: getattr(self, name) for name in self.model_dump(exclude_none=True)}
        classes = {**whole.policy_by_priority, **self.policy_by_priority}
        return whole.model_copy(update={**said, "policy_by_priority": classes})
