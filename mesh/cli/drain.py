"""The commands `mesh drain`, `mesh cordon`, `mesh undrain` and `mesh changes`."""

import asyncio
import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus, topology
from infra.topology import Topology
from mesh.adapters.operator_orders import (
    NumberedOrders,
    OrdersUnavailable,
    change_orders,
    read_history,
)
from mesh.cli.unusable import Unusable
from mesh.demo.state_directory import DEFAULT_STATE, read_running_mesh
from mesh.doctor.connectivity import NoCredentials, read_logins
from mesh.explain.text import clock, printable
from schemas import subjects
from schemas.control import DRAINED_MAX, HISTORY_MAX, TEXT_MAX, RegionControl
from schemas.ids import RegionId, ReplicaId
from schemas.state import Heartbeat, ReplicaState, decode_heartbeat
from schemas.wire import WireError

LOOK_S = 0.2
SHOWN_S = 2.0  # between two lines while requests finish
SILENT_S = 5.0  # without a heartbeat: the agent does not run, or can't be reached
TIMEOUT_S = 600.0  # as long as a request may last

MESH_OPTIONS = (
    click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        show_default="that of the `mesh up` with these credentials, or the demo's",
        help="The mesh.toml of the mesh.",
    ),
    click.option(
        "--credentials",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_STATE / "config",
        show_default=True,
        help="The directory that `mesh infra nats --out` wrote, with the region's admin.env.",
    ),
)
REASON = click.option("--reason", default="", help="Kept with the change; `mesh changes` shows it.")
TARGET = click.argument("target", metavar="REPLICA|REGION")


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((TARGET, *MESH_OPTIONS, REASON)):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be drained: one replica, or all of a region."""

    region: RegionId
    replica: ReplicaId | None

    def __str__(self) -> str:
        return f"region {self.region}" if self.replica is None else f"replica {self.replica}"

    def drained(self, orders: RegionControl) -> RegionControl:
        if self.replica is None:
            return replace(orders, all_drained=True)
        drained = tuple(sorted({*orders.drained, self.replica}))
        if len(drained) > DRAINED_MAX:
            raise Unusable(f"more than {DRAINED_MAX} replicas of {self.region}: drain the region")
        return replace(orders, drained=drained)

    def undrained(self, orders: RegionControl) -> RegionControl:
        """Of a region: all of its replicas, also those that were drained one by one."""
        if self.replica is None:
            return replace(orders, all_drained=False, drained=())
        if orders.all_drained:
            raise Unusable(
                f"all of region {self.region} is drained: `mesh undrain {self.region}` first"
            )
        return replace(orders, drained=tuple(x for x in orders.drained if x != self.replica))


@click.command()
@_options
@click.option(
    "--timeout-s",
    type=click.FloatRange(0.0, 86_400.0),
    default=TIMEOUT_S,
    show_default=True,
    help="How long to wait for the requests there to end, in seconds.",
)
def drain(
    target: str, config: Path | None, credentials: Path, reason: str, timeout_s: float
) -> None:
    """Let a replica, or a region's replicas, take nothing new, and wait until they are idle.

    What they have they finish; new requests go to other replicas and regions. The order holds,
    also for processes that start again, until `mesh undrain`. Exit code 1: requests still run after
    --timeout-s; the order holds all the same. Replicas that send no heartbeats are not waited for,
    and are named.
    """
    mesh, where = _find(target, config, credentials)
    names = mesh.region(where.region).replicas if where.replica is None else (where.replica,)

    async def work(client: Client) -> tuple[ReplicaId, ...] | None:
        await _order(client, where, "drain", reason, where.drained)
        return await _until_idle(client, where.region, names, timeout_s)

    silent = _run(mesh, where.region, credentials, work)
    if silent is None:
        click.echo(f"{where} is not idle; the order holds until `mesh undrain`")
        sys.exit(1)
    if silent:
        click.echo(f"{where} is drained; no heartbeats of {', '.join(silent)}: they may run some")
    else:
        click.echo(f"{where} is drained: nothing runs there")


@click.command()
@_options
def cordon(target: str, config: Path | None, credentials: Path, reason: str) -> None:
    """Let a replica, or a region's replicas, take nothing new; do not wait.

    As `mesh drain`, which also waits until the requests there have ended.
    """
    mesh, where = _find(target, config, credentials)

    async def work(client: Client) -> None:
        await _order(client, where, "cordon", reason, where.drained)

    _run(mesh, where.region, credentials, work)
    click.echo(f"{where} takes nothing new, until `mesh undrain`")


@click.command()
@_options
def undrain(target: str, config: Path | None, credentials: Path, reason: str) -> None:
    """Let a replica, or all of a region's replicas, take work again."""
    mesh, where = _find(target, config, credentials)

    async def work(client: Client) -> None:
        await _order(client, where, "undrain", reason, where.undrained)

    _run(mesh, where.region, credentials, work)
    click.echo(f"{where} takes work again")


@click.command()
@click.argument("region", required=False)
@MESH_OPTIONS[0]
@MESH_OPTIONS[1]
@click.option(
    "--last",
    type=click.IntRange(1, HISTORY_MAX),
    default=20,
    show_default=True,
    help="How many changes of each region to show.",
)
def changes(region: str | None, config: Path | None, credentials: Path, last: int) -> None:
    """List what operators changed in a region, or in all: when, who, what and why."""
    mesh = _mesh(config, credentials)
    if region is not None and region not in mesh.regions:
        raise Unusable(f"no region {region!r}; there are {', '.join(mesh.regions)}")
    for name in mesh.regions if region is None else (RegionId(region),):

        async def work(client: Client, name: RegionId = name) -> list[NumberedOrders]:
            return await read_history(client, name, last)

        for each in _run(mesh, name, credentials, work):
            click.echo(_line(name, each))


def _line(region: RegionId, change: NumberedOrders) -> str:
    orders = change.orders
    drained = "all" if orders.all_drained else ", ".join(orders.drained) or "none"
    why = f": {orders.reason}" if orders.reason else ""
    said = f"{clock(orders.at_unix_s)}  {orders.by}  {orders.command}{why}  (drained: {drained})"
    return printable(f"{region} {change.seq}  {said}")


def _mesh(config: Path | None, credentials: Path) -> Topology:
    running = read_running_mesh(credentials)
    file = config or (topology.DEFAULT_FILE if running is None else running.config)
    try:
        mesh = topology.load(file)
    except topology.TopologyError as error:
        raise Unusable(str(error)) from error
    return mesh if running is None else running.fitted(mesh)


def _find(target: str, config: Path | None, credentials: Path) -> tuple[Topology, Target]:
    """The mesh, and what is meant in it: REGION, REPLICA or REGION/REPLICA."""
    mesh = _mesh(config, credentials)
    if target in mesh.regions:
        return mesh, Target(RegionId(target), None)
    region, _, replica = target.rpartition("/")
    places = [
        Target(name, ReplicaId(replica))
        for name, each in mesh.regions.items()
        if replica in each.replicas and region in ("", name)
    ]
    if len(places) == 1:
        return mesh, places[0]
    if places:
        several = ", ".join(f"{one.region}/{replica}" for one in places)
        raise Unusable(f"there are several {target}: say which of {several}")
    raise Unusable(
        f"no region and no replica {target!r}; the regions are {', '.join(mesh.regions)}"
    )


def _run(
    mesh: Topology,
    region: RegionId,
    credentials: Path,
    work: Callable[[Client], Coroutine[Any, Any, Any]],
) -> Any:
    """Do the work as the region's admin; failures end the command with one line."""
    try:
        login = read_logins(mesh, credentials).get(region)
    except NoCredentials as error:
        raise Unusable(str(error)) from error
    if login is None or login.admin is None:
        raise Unusable(
            f"no {region}/credentials/admin.env below {credentials}: render again with "
            "`mesh infra nats`, and restart or reload the nats-servers"
        )
    address = login.admin

    async def connected() -> Any:
        client = await bus.connect(address, name="mesh admin", inbox_prefix=subjects.INBOX_ROOT)
        try:
            return await work(client)
        finally:
            await bus.close(client)

    try:
        return asyncio.run(connected())
    except (bus.BusUnreachable, OrdersUnavailable) as error:
        raise Unusable(str(error)) from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def signed(orders: RegionControl, command: str, reason: str) -> RegionControl:
    """The orders as this user gives them now."""
    return replace(
        orders,
        command=command[:TEXT_MAX],
        by=printable(f"{_user()}@{socket.gethostname()}")[:TEXT_MAX],
        reason=printable(reason)[:TEXT_MAX],
        at_unix_s=time.time(),
    )


async def _order(
    client: Client,
    where: Target,
    verb: str,
    reason: str,
    change: Callable[[RegionControl], RegionControl],
) -> None:
    def changed(orders: RegionControl) -> RegionControl:
        return signed(change(orders), f"{verb} {where}", reason)

    await change_orders(client, where.region, changed)


class Idleness:
    """Which of some replicas still run requests, by their heartbeats; all times on one clock."""

    def __init__(self, names: Iterable[ReplicaId], now: float) -> None:
        self._beats: dict[ReplicaId, Heartbeat | None] = dict.fromkeys(names)
        self._seen_at = dict.fromkeys(self._beats, now)

    def receive(self, beat: Heartbeat, now: float) -> None:
        if beat.replica in self._beats:
            self._beats[beat.replica], self._seen_at[beat.replica] = beat, now

    def cut_off(self, now: float) -> None:
        """Nothing could be received until now."""
        self._seen_at = dict.fromkeys(self._beats, now)

    def silent(self, now: float) -> tuple[ReplicaId, ...]:
        """Those of which no heartbeat came for SILENT_S."""
        return tuple(name for name, at in self._seen_at.items() if now - at > SILENT_S)

    def busy(self, now: float) -> dict[ReplicaId, str]:
        """What the others still have to do; without those that are drained and idle."""
        silent = self.silent(now)
        found = {name: _busy_because(self._beats[name]) for name in self._beats}
        return {name: why for name, why in found.items() if why and name not in silent}


def _busy_because(beat: Heartbeat | None) -> str:
    """What a replica still has to do; nothing for one that is idle."""
    if beat is None:
        return "no heartbeat yet"
    if beat.state is ReplicaState.READY:
        return "not yet draining"
    requests = beat.outstanding + beat.offline_waiting + beat.offline_running
    return f"{requests} requests to finish" if requests else ""


async def _until_idle(
    client: Client, region: RegionId, names: Iterable[ReplicaId], timeout_s: float
) -> tuple[ReplicaId, ...] | None:
    """Wait until all of these are drained and idle, or silent, and say how it goes.

    Returns those that are silent; None where some still run requests after that time.
    """
    started_at = said_at = time.monotonic()
    watched = Idleness(names, started_at)

    async def receive(msg: Msg) -> None:
        with suppress(WireError):
            watched.receive(decode_heartbeat(msg.data), time.monotonic())

    await client.subscribe(subjects.heartbeat(region, subjects.ANY), cb=receive)
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if not client.is_connected:
            watched.cut_off(now)
        left = watched.busy(now)
        if not left:
            return watched.silent(now)
        is_over = now - started_at >= timeout_s
        if is_over or now - said_at >= SHOWN_S:
            said_at = now
            click.echo("; ".join(f"{name}: {why}" for name, why in left.items()))
        if is_over:
            return None
