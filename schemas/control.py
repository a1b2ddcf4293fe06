"""What an operator has ordered for a region, as one record in a stream of the region.

Each command writes the whole record anew, so the last one is what holds, and those before it are
the history: who changed what, when and why. Nothing but the stream decides which is the last.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import orjson
from pydantic import Field, JsonValue

from schemas.ids import RegionId, ReplicaId, ValidRegionId, ValidReplicaId
from schemas.json_messages import decoder

DRAINED_MAX = 1024  # replicas of one region that are drained one by one
TEXT_MAX = 500  # characters
CONTROL_BYTES_MAX = 128 * 1024  # of a record
HISTORY_MAX = 1000  # records that the stream keeps

ROUTING_KEYS_MAX = 32
RoutingKey = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(max_length=TEXT_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionControl:
    """The operators' orders for one region, and the command that wrote them."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    drained: Annotated[tuple[ValidReplicaId, ...], Field(max_length=DRAINED_MAX)] = ()
    """Replicas that finish what they have and take nothing new, in order."""
    all_drained: bool = False
    """Whether all of the region's replicas are, those included that are added later."""
    moved: Annotated[tuple[ValidReplicaId, ...], Field(max_length=DRAINED_MAX)] = ()
    """Of `drained`, those whose long streams are to go on elsewhere, in order."""
    all_moved: bool = False
    """Whether those of all of the region's replicas are, as far as these are drained."""
    routing: Annotated[dict[RoutingKey, JsonValue], Field(max_length=ROUTING_KEYS_MAX)] = field(
        default_factory=dict
    )
    """Keys of mesh.toml's `[routing]` with values that hold instead of the file's. A router that
    can't follow all of them follows none of these, and goes on as before."""
    command: Text = ""
    """What the operator asked for, in words."""
    by: Text = ""
    """Who says to have asked: user and host. Nobody checks it."""
    reason: Text = ""
    at_unix_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """When, by the clock of the operator's machine."""

    def drains(self, replica: ReplicaId | str) -> bool:
        return self.all_drained or replica in self.drained


def nothing_ordered(region: RegionId) -> RegionControl:
    """Of a region to which no command was given."""
    return RegionControl(region=region)


def encode_control(control: RegionControl) -> bytes:
    return orjson.dumps(control)


decode_control = decoder(RegionControl)
