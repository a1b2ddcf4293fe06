"""Operators' orders for a region, and what a drain makes of them."""

from dataclasses import dataclass, replace

from mesh.adapters.region_records import RegionRecords
from schemas import subjects
from schemas.control import (
    DRAINED_MAX,
    TEXT_MAX,
    RegionControl,
    decode_control,
    encode_control,
    nothing_ordered,
)
from schemas.ids import RegionId, ReplicaId

ORDERS = RegionRecords(
    subjects.STREAM_CONTROL, subjects.control, encode_control, decode_control, nothing_ordered
)


class OrderInvalid(ValueError):
    """The orders that hold leave no place for this one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """What is to be drained of one region: some replicas, or (None) all of it."""

    region: RegionId
    replicas: tuple[ReplicaId, ...] | None

    def __str__(self) -> str:
        if self.replicas is None:
            return f"region {self.region}"
        return f"replica{'s' * (len(self.replicas) > 1)} {', '.join(self.replicas)}"

    def drained(self, orders: RegionControl, *, move: bool = False) -> RegionControl:
        """`move`: their long streams go on elsewhere. Raises OrderInvalid."""
        if self.replicas is None:
            return replace(orders, all_drained=True, all_moved=orders.all_moved or move)
        drained = tuple(sorted({*orders.drained, *self.replicas}))
        if len(drained) > DRAINED_MAX:
            problem = f"more than {DRAINED_MAX} replicas of {self.region}: drain the region"
            raise OrderInvalid(problem)
        moved = tuple(sorted({*orders.moved, *self.replicas})) if move else orders.moved
        return replace(orders, drained=drained, moved=moved)

    def undrained(self, orders: RegionControl) -> RegionControl:
        """Of a region: all of its replicas, also those that were drained one by one. Raises
        OrderInvalid."""
        if self.replicas is None:
            return replace(orders, all_drained=False, drained=(), all_moved=False, moved=())
        if orders.all_drained:
            raise OrderInvalid(
                f"all of region {self.region} is drained: `mesh undrain {self.region}` first"
            )
        left = tuple(name for name in orders.drained if name not in self.replicas)
        moved = tuple(name for name in orders.moved if name not in self.replicas)
        return replace(orders, drained=left, moved=moved)


def signed(
    orders: RegionControl, command: str, *, by: str, reason: str, at_unix_s: float
) -> RegionControl:
    """The orders as given now by that command; texts that are too long are cut."""
    return replace(
        orders,
        command=command[:TEXT_MAX],
        by=by[:TEXT_MAX],
        reason=reason[:TEXT_MAX],
        at_unix_s=at_unix_s,
    )
