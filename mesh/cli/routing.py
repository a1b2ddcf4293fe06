"""The commands `mesh routing set`, `show` and `clear`: how running routers place requests."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from nats.aio.client import Client

from infra.topology import Topology, TopologyError
from mesh.adapters.operator_orders import ORDERS
from mesh.cli import drain
from mesh.cli.mesh_options import KnownMesh, find_mesh, mesh_options
from mesh.cli.unusable import Unusable
from mesh.core.model.settings import RouterSettings
from mesh.doctor.logins import Logins
from mesh.explain.question import NO_LOGIN, RegionAnswers, ask_region, routers_of
from mesh.explain.terminal import printable
from mesh.runtime.config import router_settings
from mesh.runtime.routing_in_force import as_keys, ordered_settings
from schemas.control import RegionControl
from schemas.exchange import Priority
from schemas.explain import RoutingInForce
from schemas.ids import RegionId
from schemas.settings import ORDERED_KEYS, number_in

LOOK_S = 0.2
ANSWER_S = 1.0
WITHIN_S = 10.0
NESTED = ("policy_by_priority",)
GONE_NAMES = ("hold_order", "proactive")  # of earlier versions, whose orders may be in the stream
CLEARED_NAMES = (*ORDERED_KEYS, *(f"policy_by_priority.{priority}" for priority in Priority))

Keys = dict[str, Any]

ADMIN = mesh_options(
    "The directory that `mesh infra nats --out` wrote, with admin.env and observer.env of regions."
)
ALL = click.option("--all", "everywhere", is_flag=True, help="In all regions.")
WITHIN = click.option(
    "--within-s",
    type=click.FloatRange(0.1, 600.0),
    default=WITHIN_S,
    help="How long to wait for routers to report, in seconds.",
)


@click.group()
def command() -> None:
    """Choose how running routers place requests, without a restart.

    What is set goes before mesh.toml and the routers' options, also for routers that start later,
    until it is cleared. Keys are those of `[routing]`: policy, policy_by_priority.high (normal,
    low), pushing, hops_max, queue_delay_s_max, own_ttft_goal_ms.
    `mesh changes` lists who set what, and why.
    """


@command.command("set")
@click.argument("words", nargs=-1, metavar="REGION|--all KEY=VALUE…")
@ALL
@ADMIN
@drain.REASON
@WITHIN
def set_keys(
    words: tuple[str, ...],
    everywhere: bool,
    config: Path | None,
    credentials: Path,
    reason: str,
    within_s: float,
) -> None:
    """Set keys of `[routing]` in running routers, as in `policy=e2:60`; other keys stay.

    Returns when every router of the region has reported that it follows. Exit code 1: some has not
    within --within-s, and is named; the order holds all the same.
    """
    mesh = find_mesh(config, credentials)
    regions, pairs = _regions(mesh.topology, words, everywhere=everywhere)
    if not pairs:
        raise click.UsageError("give at least one KEY=VALUE")
    wanted = _read(pairs)
    _order(mesh, regions, "set", reason, within_s, lambda keys: _merged(keys, wanted))


@command.command("clear")
@click.argument("words", nargs=-1, metavar="REGION|--all [KEY]…")
@ALL
@ADMIN
@drain.REASON
@WITHIN
def clear(
    words: tuple[str, ...],
    everywhere: bool,
    config: Path | None,
    credentials: Path,
    reason: str,
    within_s: float,
) -> None:
    """Let mesh.toml and the routers' options hold again, for these keys or for all.

    Where none of them is set, nothing changes.
    """
    mesh = find_mesh(config, credentials)
    regions, names = _regions(mesh.topology, words, everywhere=everywhere)
    for name in names:
        if name not in CLEARED_NAMES and name not in GONE_NAMES:
            raise Unusable(f"no order sets {name}; there are {', '.join(CLEARED_NAMES)}")
    _order(mesh, regions, "clear", reason, within_s, lambda keys: _without(keys, names))


@command.command("show")
@click.argument("region", required=False)
@mesh_options("The directory that `mesh infra nats --out` wrote, with observer.env.")
@WITHIN
def show(region: str | None, config: Path | None, credentials: Path, within_s: float) -> None:
    """Show by which choices each router places requests now, and which of them are ordered.

    Asks with the observer's login. Exit code 1: some did not answer, and are named; 2: none did.
    """
    mesh = find_mesh(config, credentials)
    known = mesh.topology
    names = list(known.regions) if region is None else [_known(known, region)]
    logins = mesh.logins()

    async def ask() -> Sequence[RegionAnswers]:
        asked = (_ask(known, name, logins, within_s) for name in names)
        return await asyncio.gather(*asked)

    found = asyncio.run(ask())
    for each in found:
        for name, state in _states(each).items():
            click.echo(printable(f"{each.region}/{name}: {_shown(state)}"))
        if each.problem is not None:
            click.echo(printable(f"{each.region}: {each.problem}"), err=True)
    if not any(_states(each) for each in found):
        raise Unusable("no router answered")
    if any(each.problem is not None for each in found):
        sys.exit(1)


def _shown(state: RoutingInForce) -> str:
    values = ", ".join(f"{key}={value}" for key, value in _flat(state.in_force).items())
    by_order = ", ".join(_flat(state.ordered)) or "nothing"
    refused = f"; refused: {state.refused}" if state.refused else ""
    return f"{values}; by order: {by_order}{refused}"


def _flat(keys: Mapping[str, Any]) -> Keys:
    """Nested keys with a dot, as they are set; without those that are unset."""
    found: Keys = {}
    for key, value in keys.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": each for inner, each in value.items()}
        elif value is not None:
            found[key] = value
    return found


def _nested(flat: Mapping[str, Any]) -> Keys:
    found: Keys = {}
    for name, value in flat.items():
        key, dot, inner = name.partition(".")
        if dot and key in NESTED:
            found.setdefault(key, {})[inner] = value
        else:
            found[name] = value
    return found


def _read(pairs: Iterable[str]) -> Keys:
    flat: Keys = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals and text):
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        if key in NESTED:
            raise click.UsageError(f"{key}: name what is in it, as in {key}.KEY=VALUE")
        flat[key] = number_in(text)
    return flat


def _merged(keys: Keys, wanted: Keys) -> Keys:
    return _nested(_flat(keys) | wanted)


def _without(keys: Mapping[str, Any], names: Sequence[str]) -> Keys:
    """What stays when these are cleared, or without names all."""
    if not names:
        return {}
    flat = _flat(keys).items()
    return _nested({key: v for key, v in flat if not any(_is_within(key, name) for name in names)})


def _is_within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _regions(
    mesh: Topology, words: Sequence[str], *, everywhere: bool
) -> tuple[list[RegionId], Sequence[str]]:
    if everywhere:
        return list(mesh.regions), words
    if not words or ("=" in words[0] and words[0] not in mesh.regions):
        raise click.UsageError("give a region first, or --all")
    return [_known(mesh, words[0])], words[1:]


def _known(mesh: Topology, region: str) -> RegionId:
    if region not in mesh.regions:
        raise Unusable(f"no region {region!r}; there are {', '.join(mesh.regions)}")
    return RegionId(region)


@dataclass(slots=True)
class Written:
    """An order as it was written."""

    seq: int = 0
    change: str = ""  # what it changes, in words


def _order(
    mesh: KnownMesh,
    regions: Sequence[RegionId],
    verb: str,
    reason: str,
    within_s: float,
    change: Callable[[Keys], Keys],
) -> None:
    """Write it to all of these, then wait until their routers follow. Of several regions, one that
    fails keeps none of the others from being written; it is named, and the exit code is 1."""
    known, logins = mesh.topology, mesh.logins()
    settings = {region: _configured(known, region) for region in regions}
    written: dict[RegionId, Written] = {}
    problems: list[str] = []
    for region in regions:

        async def work(client: Client, region: RegionId = region) -> Written:
            kept = await drain.kept_orders(mesh, region)
            return await _write(client, region, settings[region], verb, reason, change, kept)

        try:
            written[region] = drain.as_admin(mesh, region, work)
        except Unusable as error:
            if len(regions) == 1:
                raise
            problems.append(printable(f"{region}: not changed: {error.message}"))

    async def confirm() -> Sequence[bool]:
        asked = (_followed(known, name, logins, one, within_s) for name, one in written.items())
        return await asyncio.gather(*asked)

    follow = asyncio.run(confirm())
    for problem in problems:
        click.echo(problem, err=True)
    if problems or not all(follow):
        sys.exit(1)


async def _write(
    client: Client,
    region: RegionId,
    configured: RouterSettings,
    verb: str,
    reason: str,
    change: Callable[[Keys], Keys],
    kept: RegionControl | None,
) -> Written:
    found = Written()

    def changed(orders: RegionControl) -> RegionControl:
        routing = change(dict(orders.routing))
        found.change = _difference(configured, orders.routing, routing)
        if routing == orders.routing:
            return orders
        words = f"routing {verb} region {region}: {found.change}"
        return drain.signed(replace(orders, routing=routing), words, reason)

    found.seq = (await ORDERS.change(client, region, changed, kept)).seq
    return found


def _difference(
    configured: RouterSettings, before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """What changes for routers that run by this mesh.toml. Raises Unusable for a wrong choice."""
    try:
        now = _flat(as_keys(ordered_settings(configured, after)))
    except ValueError as error:
        raise Unusable(str(error)) from error
    try:
        was = _flat(as_keys(ordered_settings(configured, before)))
    except ValueError:  # routers refuse it
        was = _flat(as_keys(configured))
    keys = (key for key in {**was, **now} if was.get(key) != now.get(key))
    changes = (f"{key} {was.get(key, 'unset')} -> {now.get(key, 'unset')}" for key in keys)
    return ", ".join(changes) or "nothing changes"


async def _followed(
    mesh: Topology, region: RegionId, logins: Mapping[RegionId, Logins], order: Written, s: float
) -> bool:
    """Wait until all routers of the region follow, and say so, or who does not."""
    expected = routers_of(mesh.regions[region])
    loop = asyncio.get_running_loop()
    until = loop.time() + s
    click.echo(printable(f"{region}: {order.change}"))
    while True:
        found = await _ask(mesh, region, logins, min(s, ANSWER_S))
        states = _states(found)
        refused = [f"{name}: {one.refused}" for name, one in states.items() if one.refused]
        late = {name for name, one in states.items() if one.orders < order.seq}
        silent = {name for name in expected if not _has_answered(name, states)}
        if not (late or silent) or loop.time() >= until or found.problem == NO_LOGIN:
            break
        await asyncio.sleep(LOOK_S)
    if late or silent:
        why = f" ({found.problem})" if found.problem else ""
        missing = ", ".join(sorted(late | silent))
        late_text = f"{region}: {missing} did not report order {order.seq} within {s:g} s{why}"
        click.echo(printable(f"{late_text}; the order holds all the same"))
    elif refused:
        click.echo(printable(f"{region}: refused: {'; '.join(refused)}"))
    else:
        click.echo(f"{region}: in force at {', '.join(sorted(states))}")
    return not (late or silent or refused)


def _has_answered(router: str, states: Mapping[str, RoutingInForce]) -> bool:
    """Itself, or a worker of it: an option may give it more than mesh.toml does."""
    return any(name == router or name.startswith(f"{router}-") for name in states)


async def _ask(
    mesh: Topology, region: RegionId, logins: Mapping[RegionId, Logins], within_s: float
) -> RegionAnswers:
    known = logins.get(region, Logins())
    question = drain.ROUTING_QUESTION
    return await ask_region(region, routers_of(mesh.regions[region]), known, question, within_s)


def _states(answers: RegionAnswers) -> dict[str, RoutingInForce]:
    return {one.router: one.routing for one in answers.answers if one.routing is not None}


def _configured(mesh: Topology, region: RegionId) -> RouterSettings:
    try:
        return router_settings(mesh, region)
    except (TopologyError, ValueError) as error:
        raise Unusable(str(error)) from error
