"""What somebody at the console orders: the same records as `mesh drain` writes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from infra import bus
from infra.bus import BusAddress
from mesh.adapters.operator_orders import ORDERS, DrainTarget, signed
from mesh.adapters.region_records import Numbered, RecordsUnavailable
from mesh.console.config import ConsoleConfig
from mesh.explain.terminal import printable
from schemas import subjects
from schemas.control import TEXT_MAX, RegionControl
from schemas.ids import RegionId, ValidRegionId, ValidReplicaId
from schemas.problems import problem_of

WAITING_MAX = 4  # at once; one is written after another
WITHIN_S = 20.0
HISTORY_SHOWN = 20
NAME_CHARS_MAX = 64


class OrderRefused(Exception):
    """An order that names nothing there is, or can't be read; the message says what to do."""


class OrdersBusy(Exception):
    """Others wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One, as the page sends it. `replica`: None of the whole region."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    verb: Literal["drain", "cordon", "undrain"]
    region: ValidRegionId
    replica: ValidReplicaId | None = None
    reason: Annotated[str, Field(max_length=TEXT_MAX)] = ""
    name: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    """Who says to order it."""


_ORDER: TypeAdapter[Order] = TypeAdapter(Order)


def read_order(data: bytes) -> Order:
    """Raises OrderRefused."""
    try:
        return _ORDER.validate_json(data)
    except ValidationError as error:
        raise OrderRefused(problem_of(error)) from error


class Orders:
    """Writes orders, and reads those of before, as the regions' admins."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def give(self, order: Order, address: str) -> Numbered[RegionControl]:
        """Write it. Raises OrderRefused, OrdersBusy, OrderInvalid, RecordsUnavailable or
        BusUnreachable."""
        login = self._admin(order.region)
        replicas = self._config.topology.regions[order.region].replicas
        if order.replica is not None and order.replica not in replicas:
            raise OrderRefused(f"no replica {order.replica!r} in {order.region}")
        where = DrainTarget(order.region, None if order.replica is None else (order.replica,))
        change = where.undrained if order.verb == "undrain" else where.drained
        who = f"{order.name or 'somebody'} at {address}"
        by = printable(f"{who}, console of {self._config.region}/{self._config.router}")
        command = f"{order.verb} {where}"

        def changed(known: RegionControl) -> RegionControl:
            wanted, reason = change(known), printable(order.reason)
            if order.verb == "undrain" and wanted == known:
                return known
            return signed(wanted, command, by=by, reason=reason, at_unix_s=time.time())

        async with self._turn(), _connected(login) as client:
            return await ORDERS.change(client, order.region, changed)

    async def history(self, region: RegionId) -> list[Numbered[RegionControl]]:
        """The last ones, newest first. Raises like `give`."""
        async with self._turn(), _connected(self._admin(region)) as client:
            return await ORDERS.history(client, region, HISTORY_SHOWN)

    def _admin(self, region: RegionId) -> BusAddress:
        login = self._config.logins.get(region)
        if login is None or login.admin is None:
            raise OrderRefused(
                f"this console has no admin's credentials of {region}; use `mesh drain`, or the "
                "console of a router there"
            )
        return login.admin

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= WAITING_MAX:
            raise OrdersBusy("other orders are being written; try again")
        self._waiting += 1
        try:
            async with asyncio.timeout(WITHIN_S), self._lock:
                yield
        except TimeoutError as error:
            raise RecordsUnavailable(
                f"the bus did not answer within {WITHIN_S:g} s: look whether the order holds"
            ) from error
        finally:
            self._waiting -= 1


@asynccontextmanager
async def _connected(login: BusAddress) -> AsyncIterator[bus.BusClient]:
    client = await bus.connect(login, name="mesh console", inbox_prefix=subjects.INBOX_ROOT)
    try:
        yield client
    finally:
        await bus.close(client)
