"""The commands `mesh drain`, `mesh cordon`, `mesh undrain` and `mesh changes`."""

import infra.lean_nats  # noqa: F401 # before what imports nats-py

# isort: split
import asyncio
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra.topology import Topology
from mesh.adapters import operator_orders
from mesh.adapters.operator_orders import ORDERS, DrainTarget, OrderInvalid
from mesh.adapters.region_records import Numbered
from mesh.cli.audit import CREDENTIALS_HELP, echo_table, reason_option, user
from mesh.cli.mesh_options import KnownMesh, find_mesh, in_regions, mesh_options
from mesh.cli.unusable import Unusable
from mesh.explain.question import ask_region, routers_of
from mesh.explain.terminal import clock, printable
from schemas import subjects
from schemas.control import HISTORY_MAX, RegionControl
from schemas.exchange import ALL_REPLICAS
from schemas.explain import RequestQuestion, RoutingInForce
from schemas.ids import RegionId, ReplicaId
from schemas.state import Heartbeat, ReplicaState, decode_heartbeat
from schemas.wire import WireError

T = TypeVar("T")

LOOK_S = 0.2
KEPT_S = 1.0  # for routers to say which orders they keep
ROUTING_QUESTION = RequestQuestion(routing=True)
KNOWN_CHARS_MAX = 300  # of the names in an error
SHOWN_S = 2.0  # between two lines while requests finish
HEADER = ("region", "number", "at", "by", "command", "then drained", "reason")
WORKS_AGAIN, NOT_DRAINED = "work is sent there again", "not drained, nothing changes"
WAITING = "nothing new is sent there; waiting for its requests (after Ctrl-C the order holds)"
NOT_DRAINING = "not yet draining"
SILENT_S = 5.0  # without a heartbeat: the agent does not run, or can't be reached
FOLLOWED_S = 60.0  # twice the time after which routers read the orders again
TIMEOUT_S = 600.0  # as long as a request may last

REASON = reason_option("mesh changes")
NAMES = click.argument("names", metavar="REPLICA|REGION...", nargs=-1, required=True)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    return NAMES(mesh_options(CREDENTIALS_HELP)(REASON(command)))


@click.command()
@_options
@click.option(
    "--move",
    is_flag=True,
    help="Streams that have taken longer than 5 s go on from other replicas, where that is exact.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0.0, 86_400.0),
    default=TIMEOUT_S,
    show_default=True,
    help="How long to wait for the requests there to end, in seconds.",
)
def drain(
    names: tuple[str, ...],
    config: Path | None,
    credentials: Path,
    reason: str,
    move: bool,
    timeout_s: float,
) -> None:
    """Let replicas, or all of a region's, take nothing new, and wait until they are idle.

    What they have they finish; new requests go to other replicas and regions. The order holds,
    also for processes that start again, until `mesh undrain`. Exit code 1: requests still run after
    --timeout-s, or agents have not heard of the order after a minute; it holds all the same.
    Replicas that send no heartbeats are not waited for, and are named.
    """
    mesh = find_mesh(config, credentials)
    targets = _find(mesh.topology, names)
    _order_all(mesh, targets, "drain", reason, move=move)
    for target in targets:
        click.echo(f"{target}: {WAITING}")
    until = time.monotonic() + timeout_s
    is_idle = [_wait(mesh, target, until - time.monotonic()) for target in targets]
    if not all(is_idle):
        sys.exit(1)


def _wait(mesh: KnownMesh, target: DrainTarget, timeout_s: float) -> bool:
    """Wait until these replicas are idle, and print how that ended. Whether they are."""
    replicas = target.replicas or mesh.topology.region(target.region).replicas

    async def work(client: Client) -> tuple[ReplicaId, ...] | None:
        return await _until_idle(client, target.region, replicas, timeout_s)

    silent = as_admin(mesh, target.region, work)
    if silent is None:
        click.echo(f"{target}: not idle; the order holds until `mesh undrain`")
    elif silent:
        click.echo(f"{target}: drained; no heartbeats of {', '.join(silent)}: they may run some")
    else:
        click.echo(f"{target}: drained, nothing runs there")
    return silent is not None


@click.command()
@_options
def cordon(names: tuple[str, ...], config: Path | None, credentials: Path, reason: str) -> None:
    """Let replicas, or all of a region's, take nothing new; do not wait.

    As `mesh drain`, which also waits until the requests there have ended.
    """
    mesh = find_mesh(config, credentials)
    targets = _find(mesh.topology, names)
    _order_all(mesh, targets, "cordon", reason)
    for target in targets:
        click.echo(f"{target}: nothing new is sent there, until `mesh undrain`")


@click.command()
@_options
def undrain(names: tuple[str, ...], config: Path | None, credentials: Path, reason: str) -> None:
    """Let replicas, or all of a region's, take work again."""
    mesh = find_mesh(config, credentials)
    targets = _find(mesh.topology, names)
    before = _order_all(mesh, targets, "undrain", reason)
    for target in targets:
        for line in _undrained(target, before[target.region]):
            click.echo(line)


def _undrained(target: DrainTarget, before: RegionControl) -> Iterator[str]:
    """What an undrain came to, by the orders before it."""
    replicas = target.replicas
    if replicas is None:
        is_drained = before.all_drained or before.drained
        yield f"{target}: {WORKS_AGAIN if is_drained else NOT_DRAINED}"
        return
    for names, what in (
        (tuple(name for name in replicas if name in before.drained), WORKS_AGAIN),
        (tuple(name for name in replicas if name not in before.drained), NOT_DRAINED),
    ):
        if names:
            yield f"{DrainTarget(target.region, names)}: {what}"


@click.command()
@click.argument("region", required=False)
@mesh_options(CREDENTIALS_HELP)
@click.option(
    "--last",
    type=click.IntRange(1, HISTORY_MAX),
    default=20,
    show_default=True,
    help="How many changes of each region to show.",
)
def changes(region: str | None, config: Path | None, credentials: Path, last: int) -> None:
    """List what operators changed in a region, or in all: when, who, what and why."""
    mesh = find_mesh(config, credentials)
    if region is not None and region not in mesh.topology.regions:
        raise Unusable(f"no region {region!r}; there are {', '.join(mesh.topology.regions)}")
    lines = []
    for name in mesh.topology.regions if region is None else (RegionId(region),):

        async def work(client: Client, name: RegionId = name) -> list[Numbered[RegionControl]]:
            return await ORDERS.history(client, name, last)

        lines += [_cells(name, each) for each in as_admin(mesh, name, work)]
    if not lines:
        click.echo("nothing was changed")
        return
    echo_table([HEADER, *lines])


def _cells(region: RegionId, change: Numbered[RegionControl]) -> tuple[str, ...]:
    """One change as a row of the table, with no character that a terminal obeys."""
    orders = change.record
    drained = "all" if orders.all_drained else ", ".join(orders.drained) or "none"
    cells = (
        *(region, str(change.seq), clock(orders.at_unix_s), orders.by),
        *(orders.command, drained, orders.reason),
    )
    return tuple(map(printable, cells))


def _find(mesh: Topology, names: Iterable[str]) -> list[DrainTarget]:
    """What is meant by REGION, REPLICA or REGION/REPLICA; one target for each region."""
    found: dict[RegionId, tuple[ReplicaId, ...] | None] = {}
    for name in names:
        region, replica = _find_one(mesh, name)
        known = found.get(region, ())
        if replica is None or known is None:
            found[region] = None
        elif replica not in known:
            found[region] = (*known, replica)
    return [DrainTarget(region, replicas) for region, replicas in found.items()]


def _find_one(mesh: Topology, name: str) -> tuple[RegionId, ReplicaId | None]:
    if name in mesh.regions:
        return RegionId(name), None
    region, _, replica = name.rpartition("/")
    places = [
        place
        for place, each in mesh.regions.items()
        if replica in each.replicas and region in ("", place)
    ]
    if len(places) == 1:
        return places[0], ReplicaId(replica)
    if places:
        several = ", ".join(f"{place}/{replica}" for place in places)
        raise Unusable(f"there are several {name}: name one of {several}")
    there = (f"{place} ({', '.join(each.replicas)})" for place, each in mesh.regions.items())
    known = textwrap.shorten(", ".join(there), KNOWN_CHARS_MAX, placeholder=" …")
    raise Unusable(f"no region and no replica {name!r}; there are {known}")


def as_admin(
    mesh: KnownMesh, region: RegionId, work: Callable[[Client], Coroutine[Any, Any, T]]
) -> T:
    """Do the work as the region's admin; failures end the command with one line."""
    try:
        done, unreached = in_regions(mesh, "admin", (region,), lambda client, _: work(client))
    except OrderInvalid as error:
        raise Unusable(str(error)) from error
    if unreached:
        raise Unusable(unreached[region])
    return done[region]


def signed(orders: RegionControl, command: str, reason: str) -> RegionControl:
    """The orders as this user gives them now."""
    return operator_orders.signed(
        orders, command, by=user(), reason=printable(reason), at_unix_s=time.time()
    )


def last_kept(answers: Iterable[RoutingInForce]) -> RoutingInForce | None:
    """Of the routers' answers the newest that the stream has lost. None where some router reads a
    record there: then none was lost, whatever another one says."""
    lost = [one for one in answers if one.orders > 0]
    if not all(one.orders_lost for one in lost):
        return None
    return max(lost, key=lambda one: one.orders, default=None)


async def kept_orders(mesh: KnownMesh, region: RegionId) -> RegionControl | None:
    """The orders that the region's routers keep because its stream has lost them; None: it has
    them, or no router has answered."""
    login = mesh.logins().get(region)
    if login is None:
        return None
    asked = routers_of(mesh.topology.regions[region])
    found = await ask_region(region, asked, login, ROUTING_QUESTION, KEPT_S)
    last = last_kept([one.routing for one in found.answers if one.routing])
    if last is None:
        return None
    all_drained = last.drained == (ALL_REPLICAS,)
    drained = () if all_drained else tuple(ReplicaId(name) for name in last.drained)
    named = "all of its replicas" if all_drained else ", ".join(drained) or "nothing"
    keys = ", ".join(last.ordered) or "nothing"
    click.echo(
        printable(
            f"{region}: its stream of orders was lost; written again as its routers keep them: "
            f"drained {named}, routing of {keys}"
        )
    )
    return RegionControl(
        region=region, drained=drained, all_drained=all_drained, routing=dict(last.ordered)
    )


def _order_all(
    mesh: KnownMesh, targets: Iterable[DrainTarget], verb: str, reason: str, *, move: bool = False
) -> dict[RegionId, RegionControl]:
    """Change the orders of each region. Returns those that held before."""
    words = f"{verb} --move" if move else verb
    before: dict[RegionId, RegionControl] = {}
    for target in targets:
        change = target.undrained if verb == "undrain" else partial(target.drained, move=move)

        async def work(
            client: Client,
            target: DrainTarget = target,
            change: Callable[[RegionControl], RegionControl] = change,
        ) -> None:
            def changed(orders: RegionControl) -> RegionControl:
                before[target.region], wanted = orders, change(orders)
                if verb == "undrain" and wanted == orders:
                    return orders
                return signed(wanted, f"{words} {target}", reason)

            kept = await kept_orders(mesh, target.region)
            await ORDERS.change(client, target.region, changed, kept)

        as_admin(mesh, target.region, work)
    return before


class Idleness:
    """Which of some replicas still run requests, by their heartbeats; all times on one clock."""

    def __init__(self, names: Iterable[ReplicaId], now: float) -> None:
        self._began_at = now
        self._beats: dict[ReplicaId, Heartbeat | None] = dict.fromkeys(names)
        self._seen_at = dict.fromkeys(self._beats, now)

    def receive(self, beat: Heartbeat, now: float) -> None:
        if beat.replica in self._beats:
            self._beats[beat.replica], self._seen_at[beat.replica] = beat, now

    def cut_off(self, now: float) -> None:
        """Nothing could be received until now."""
        self._began_at = now
        self._seen_at = dict.fromkeys(self._beats, now)

    def silent(self, now: float) -> tuple[ReplicaId, ...]:
        """Those of which no heartbeat came for SILENT_S."""
        return tuple(name for name, at in self._seen_at.items() if now - at > SILENT_S)

    def busy(self, now: float) -> dict[ReplicaId, str]:
        """What the others still have to do; without those that are drained and idle."""
        silent = self.silent(now)
        found = {name: _busy_because(self._beats[name]) for name in self._beats}
        return {name: why for name, why in found.items() if why and name not in silent}

    def unfollowed(self, now: float) -> tuple[ReplicaId, ...]:
        """Those that take work after FOLLOWED_S, where there is nothing else to wait for."""
        left = self.busy(now)
        is_time = now - self._began_at >= FOLLOWED_S
        return tuple(left) if is_time and set(left.values()) == {NOT_DRAINING} else ()


def _busy_because(beat: Heartbeat | None) -> str:
    """What a replica still has to do; nothing for one that is idle."""
    if beat is None:
        return "no heartbeat yet"
    if beat.state is ReplicaState.READY:
        return NOT_DRAINING
    requests = beat.outstanding + beat.offline_waiting + beat.offline_running
    return f"{requests} request{'s' * (requests > 1)} to finish" if requests else ""


async def _until_idle(
    client: Client, region: RegionId, names: Iterable[ReplicaId], timeout_s: float
) -> tuple[ReplicaId, ...] | None:
    """Wait until all of these are drained and idle, or silent; print who still has what.

    Returns those that are silent; None where some still run requests after that time, or take new
    ones after FOLLOWED_S.
    """
    started_at = shown_at = time.monotonic()
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
        if unfollowed := watched.unfollowed(now):
            click.echo(
                f"{', '.join(unfollowed)}: {NOT_DRAINING} after {FOLLOWED_S:g} s: their agents "
                f"have not heard of the order, which routers of {region} pass on; `mesh doctor` "
                "says more"
            )
            return None
        is_over = now - started_at >= timeout_s
        if is_over or now - shown_at >= SHOWN_S:
            shown_at = now
            click.echo("; ".join(f"{name}: {why}" for name, why in left.items()))
        if is_over:
            return None
