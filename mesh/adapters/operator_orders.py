"""Operators' orders for a region: read, changed and listed over the bus, with the login `admin`.

The region's stream holds one record, which each command writes anew. A write names the number of
the record that it changes, so of two operators who change it at once one reads again and repeats
its change: neither undoes the other's unseen.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from mesh.adapters.streams import H_EXPECTED, WRONG_LAST
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
from schemas.wire import WireError

REQUEST_S = 5.0
TRIES = 10  # against operators who write at the same moment


class OrdersUnavailable(Exception):
    """The stream could not be read or written; the message says what to do."""


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

    def drained(self, orders: RegionControl) -> RegionControl:
        """Raises OrderInvalid."""
        if self.replicas is None:
            return replace(orders, all_drained=True)
        drained = tuple(sorted({*orders.drained, *self.replicas}))
        if len(drained) > DRAINED_MAX:
            problem = f"more than {DRAINED_MAX} replicas of {self.region}: drain the region"
            raise OrderInvalid(problem)
        return replace(orders, drained=drained)

    def undrained(self, orders: RegionControl) -> RegionControl:
        """Of a region: all of its replicas, also those that were drained one by one. Raises
        OrderInvalid."""
        if self.replicas is None:
            return replace(orders, all_drained=False, drained=())
        if orders.all_drained:
            raise OrderInvalid(
                f"all of region {self.region} is drained: `mesh undrain {self.region}` first"
            )
        left = tuple(name for name in orders.drained if name not in self.replicas)
        return replace(orders, drained=left)


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


@dataclass(frozen=True, slots=True)
class NumberedOrders:
    """A record and its number in the stream; 0: nothing was ordered yet."""

    seq: int
    orders: RegionControl


async def read_orders(client: Client, region: RegionId) -> NumberedOrders:
    """The orders that hold now. Raises OrdersUnavailable."""
    manager = client.jsm(timeout=REQUEST_S)
    try:
        last = await manager.get_last_msg(
            subjects.STREAM_CONTROL, subjects.control(region), direct=True
        )
        return NumberedOrders(last.seq or 0, decode_control(last.data or b""))
    except nats.js.errors.NotFoundError:
        return NumberedOrders(0, nothing_ordered(region))
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, WireError) as error:
        raise _unavailable(region, error) from error


async def change_orders(
    client: Client,
    region: RegionId,
    change: Callable[[RegionControl], RegionControl],
    kept: RegionControl | None = None,
) -> NumberedOrders:
    """Apply the change to the orders that hold, and write them, unless it returns these as they
    are. `kept`: those that hold where the stream has lost them. Raises OrdersUnavailable."""
    for _ in range(TRIES):
        known = await read_orders(client, region)
        holding = known.orders if kept is None else kept
        wanted = change(holding)
        if kept is None and wanted == holding:
            return known
        if (seq := await _write(client, wanted, known.seq)) is not None:
            return NumberedOrders(seq, wanted)
        kept = None  # who was faster has written it
    raise OrdersUnavailable(f"{region}: others change its orders all the time; try again")


async def read_history(client: Client, region: RegionId, most: int) -> list[NumberedOrders]:
    """The last records, newest first. Raises OrdersUnavailable."""
    manager, found = client.jsm(timeout=REQUEST_S), []
    try:
        state = (await manager.stream_info(subjects.STREAM_CONTROL)).state
        first = max(state.first_seq, state.last_seq - most + 1)
        for seq in range(state.last_seq, first - 1, -1) if state.messages else ():
            record = await manager.get_msg(subjects.STREAM_CONTROL, seq)
            found.append(NumberedOrders(seq, decode_control(record.data or b"")))
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, WireError) as error:
        raise _unavailable(region, error) from error
    return found


async def _write(client: Client, orders: RegionControl, after: int) -> int | None:
    """The number that the record got; None if another one was written after `after`."""
    region = orders.region
    try:
        answer = await client.request(
            subjects.control(region),
            encode_control(orders),
            timeout=REQUEST_S,
            headers={H_EXPECTED: str(after)},
        )
        reply = json.loads(answer.data)
        error = reply.get("error")
        if error is None:
            return int(reply["seq"])
        if error.get("err_code") in WRONG_LAST:
            return None
    except (nats.errors.Error, TimeoutError) as problem:
        raise _unavailable(region, problem) from problem
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        error = {"description": f"its answer can't be read: {answer.data[:200]!r}"}
        raise _unavailable(region, error["description"]) from problem
    raise _unavailable(region, error.get("description"))


def _unavailable(region: RegionId, why: object) -> OrdersUnavailable:
    text = str(why) or type(why).__name__
    return OrdersUnavailable(
        f"{region}: the stream {subjects.STREAM_CONTROL} gives no answer ({text}); was "
        "`mesh infra streams` run, and is its nats-server rendered anew since an upgrade? If its "
        "disk is or was full: make room there, then restart that nats-server. `mesh doctor` says"
    )
