"""The examination of a running mesh: all regions that we have credentials of, concurrently.

A region without credentials here is known only by what crosses its links. Nothing is repaired and
nothing disturbed. Each check has a time limit, and so has the whole, so that a server that is dead
or stopped costs one connection attempt and delays no other region.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import nats.errors
from nats.aio.client import Client

from infra.bus import BusAddress, BusUnreachable
from infra.nats.region_config import BATCH_OBSERVER, OBSERVER, ROUTER, link_account
from infra.nats.server import Version, advisories
from infra.process import end_all
from infra.topology import Topology, server_suffixes
from mesh.adapters import streams
from mesh.batch import streams as batch_streams
from mesh.doctor import observed_state, permission_checks
from mesh.doctor.batch_runners import check_batch_runners
from mesh.doctor.connectivity import (
    DoctorConnection,
    NoServerRuns,
    ServerUnreachable,
    check_servers,
    logged_in,
)
from mesh.doctor.findings import (
    CheckResult,
    Finding,
    MonotonicClock,
    RegionFindings,
    as_ms,
    go_duration_s,
    result_if,
)
from mesh.doctor.logins import Logins
from mesh.doctor.manual_commands import ManualCommands, with_causes
from mesh.doctor.permission_checks import check_watcher
from mesh.doctor.waiting_tenants import flood
from schemas import subjects
from schemas.catalog import Role
from schemas.explain import RouterRequests
from schemas.ids import RegionId

REQUEST_S = 5.0
CONNECTIONS_MAX = 1024  # of routers, at one server
NO_OPTIONS: Mapping[str, Any] = {}
TOOL_INBOX = subjects.INBOX_ROOT
LEAFZ = "$SYS.REQ.SERVER.PING.LEAFZ"
ROUTEZ = "$SYS.REQ.SERVER.PING.ROUTEZ"
CONNZ = "$SYS.REQ.SERVER.PING.CONNZ"
VARZ = "$SYS.REQ.SERVER.PING.VARZ"

ConnectedRouters = dict[RegionId, set[str]]
LoginChecks = Callable[[RegionFindings, DoctorConnection], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds. Regions and checks run concurrently, so these don't add up over regions."""

    greeting_s: float = 3.0
    """For a nats-server to greet, and for a login: a lost packet is sent again after one."""
    answer_s: float = 2.0
    """For a peer region's answer: a long round trip is a quarter of a second."""
    login_s: float = 8.0
    """For all checks of one login, besides listening: JetStream may take 5 s of it."""
    all_s: float = 12.0
    """For the whole, besides listening: the above, and a second to close connections."""


@dataclass(frozen=True, slots=True)
class ExaminationSettings:
    """How long to listen, by which clock, and the time limits."""

    listen_s: float
    clock: MonotonicClock
    limits: TimeLimits = TimeLimits()


async def examine(
    topology: Topology,
    logins: Mapping[RegionId, Logins],
    settings: ExaminationSettings,
    commands: ManualCommands,
) -> list[Finding]:
    """All findings, region by region in the order of the file.

    Raises NoServerRuns if no server at all accepts connections.
    """
    regions = {region: RegionFindings(region) for region in topology.regions if region in logins}
    connected: ConnectedRouters = {}
    answers: list[RouterRequests] = []
    tasks = {
        region: asyncio.create_task(
            _examine_region(found, topology, logins[region], settings, connected, answers)
        )
        for region, found in regions.items()
    }
    total_s = settings.listen_s + settings.limits.all_s
    try:
        _, late = await asyncio.wait(tasks.values(), timeout=total_s)
    finally:
        await end_all(tasks.values())
    for region, found in regions.items():
        observed_state.late_or_gone(found, connected.get(region))
    if (flooded := flood(answers)) is not None:
        region, tenant, detail = flooded
        remedy = commands.tenants(tenant)
        told = Finding(region, "tenants", tenant, CheckResult.WARNING, detail, remedy=remedy)
        regions[region].findings.append(told)
    unreachable: dict[str, ServerUnreachable] = {}
    for region, task in tasks.items():
        if task in late:
            detail = f"the examination took longer than {total_s:g} s and was cancelled"
            regions[region].add("bus", "examination", CheckResult.BAD, detail)
        elif len(servers := task.result()) == len(logins[region].url.split(",")):
            unreachable[region] = servers[0]
        else:
            regions[region].findings += [_lost_server(region, one, commands) for one in servers]
    if len(unreachable) == len(regions) and not any(one.listens for one in unreachable.values()):
        urls = dict.fromkeys(one.url for one in unreachable.values())
        raise NoServerRuns(f"no nats-server listens at {', '.join(urls)}")
    findings = [finding for found in regions.values() for finding in found.findings]
    order = {region: number for number, region in enumerate(topology.regions)}
    explained = with_causes(findings, unreachable, commands)
    return sorted(explained, key=lambda one: order[RegionId(one.region)])


async def _examine_region(
    found: RegionFindings,
    topology: Topology,
    logins: Logins,
    settings: ExaminationSettings,
    connected: ConnectedRouters,
    answers: list[RouterRequests],
) -> list[ServerUnreachable]:
    """Examine one region by those of its servers that answer, and return the others."""
    permission_checks.add_residency(found, topology)
    permission_checks.add_keys(found, topology)
    clock, answer_s = settings.clock, settings.limits.answer_s
    unreachable = await check_servers(logins.url, settings.limits.greeting_s)
    urls = logins.url.split(",")
    silent = {one.url for one in unreachable}
    if not (reached := [url for url in urls if url not in silent]):
        return unreachable
    logins, servers = logins.among(reached), len(topology.region(found.region).servers)
    running = servers - len(unreachable)

    async def as_observer(found: RegionFindings, connection: DoctorConnection) -> None:
        client, name = connection.client, RegionId(found.region)
        has_peers = bool(topology.peers(name))
        configs = streams.kept(name, has_peers=has_peers, servers=servers)
        await _check_bus(found, client)
        checks = [
            lambda part: observed_state.check_streams(part, configs, client),
            lambda part: observed_state.check_keys(part, topology, client),
            lambda part: _observe(part, topology, client, settings, answers),
        ]
        if logins.observer is not None:
            checks.append(lambda part: check_watcher(part, connection, Role.OBSERVER))
        await found.run_concurrently(*checks)

    async def as_operator(found: RegionFindings, connection: DoctorConnection) -> None:
        client, listen_s = connection.client, settings.listen_s
        await found.run_concurrently(
            lambda part: observed_state.check_prefixes(part, topology, client, listen_s),
            lambda part: check_watcher(part, connection, Role.OPERATOR),
        )

    async def as_router(found: RegionFindings, connection: DoctorConnection) -> None:
        checks = permission_checks
        await found.run_concurrently(
            lambda part: checks.measure_round_trips(part, topology, connection, clock, answer_s),
            lambda part: checks.check_router(part, topology, connection),
            lambda part: checks.check_lease_writes(part, topology, connection, answer_s),
        )

    async def as_system(found: RegionFindings, connection: DoctorConnection) -> None:
        client = connection.client
        await _note_routers(connected, client, found.region, running)
        if servers > 1:
            await _check_cluster(found, topology, client, running, servers)
        await _check_server_links(found, topology, client, running)

    async def as_batch_observer(found: RegionFindings, connection: DoctorConnection) -> None:
        configs = batch_streams.kept(topology.batch, servers)
        client, listen_s = connection.client, settings.listen_s
        await found.run_concurrently(
            lambda part: observed_state.check_streams(part, configs, client),
            lambda part: check_batch_runners(part, topology, client, clock, listen_s),
        )

    router_inbox = subjects.inbox_prefix(found.region, permission_checks.NOBODY)
    batch_checks = (BATCH_OBSERVER, logins.batch_observer, TOOL_INBOX, as_batch_observer, settings)
    who_looks = logins.observer or logins.operator  # who may do all that an observer does
    has_runners = bool(topology.region(found.region).batch_runners)
    await found.run_concurrently(
        *[partial(_as_user, *batch_checks)] * has_runners,
        partial(_as_user, OBSERVER, who_looks, TOOL_INBOX, as_observer, settings),
        partial(_as_user, "operator", logins.operator, TOOL_INBOX, as_operator, settings),
        partial(_as_user, "router", logins.router, router_inbox, as_router, settings),
        partial(_as_user, "system", logins.system, TOOL_INBOX, as_system, settings),
    )
    return unreachable


def _lost_server(region: str, one: ServerUnreachable, commands: ManualCommands) -> Finding:
    """One of several; the others go on."""
    about, detail = f"server {region}{one.suffix}", f"no answer at {one.url}: {one.why}"
    remedy = commands.server(region, one)
    return Finding(region, "bus", about, CheckResult.BAD, detail, remedy=remedy)


async def _observe(
    found: RegionFindings,
    topology: Topology,
    client: Client,
    settings: ExaminationSettings,
    answers: list[RouterRequests],
) -> None:
    region, clock, listen_s = RegionId(found.region), settings.clock, settings.listen_s
    observed, orders, before = await asyncio.gather(  # of streams that do not answer, one wait
        observed_state.listen(client, region, clock, listen_s),
        observed_state.last_orders(client, region),
        observed_state.last_lease(client, region),
    )
    answers += observed.answers.values()
    observed_state.compare(found, topology, observed, clock(), orders)
    lease = observed.lease
    is_expired = observed_state.check_owner(found, topology, lease, before, listen_s)
    observed_state.check_writes(found, observed, is_expired=is_expired)
    observed_state.check_orders(found, observed)


async def _as_user(
    user: str,
    address: BusAddress | None,
    inbox: str,
    checks: LoginChecks,
    settings: ExaminationSettings,
    found: RegionFindings,
) -> None:
    """Log in and run the checks; add why they could not be run or finished."""
    if address is None:
        found.add("login", user, CheckResult.UNKNOWN, "no credentials here: not examined")
        return
    limit_s = settings.listen_s + settings.limits.login_s
    try:
        async with (
            asyncio.timeout(limit_s) as limit,
            logged_in(address, inbox, settings.limits.greeting_s) as connection,
        ):
            await checks(found, connection)
    except BusUnreachable as error:
        found.add("login", user, CheckResult.BAD, str(error))
    except (nats.errors.Error, TimeoutError) as error:
        detail = f"the connection failed: {error or type(error).__name__}"
        if limit.expired():
            detail = f"not done within {limit_s:g} s: the bus answers too slowly"
        found.add("login", user, CheckResult.BAD, detail)


async def _check_bus(found: RegionFindings, client: Client) -> None:
    took_ms = as_ms(await client.rtt())
    version = client.connected_server_version
    detail, known = described_version((version.major, version.minor, version.patch))
    found.add("bus", "server", result_if(not known), detail, took_ms, "ms")


def described_version(version: Version) -> tuple[str, bool]:
    """A nats-server's version for people, and whether it has known faults."""
    text = f"nats-server {'.'.join(map(str, version))}"
    found = advisories(version)
    faults = "; ".join(f"{one.name}: {one.about}" for one in found)
    return (f"{text} has known faults, upgrade it: {faults}" if found else text), bool(found)


async def _reports(
    client: Client, subject: str, servers: int, options: Mapping[str, Any] = NO_OPTIONS
) -> dict[str, dict[str, Any]]:
    """What each of so many servers reports, by its name; of one that is silent nothing.

    Raises TimeoutError if all are.
    """
    found: dict[str, dict[str, Any]] = {}
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    await client.publish(subject, json.dumps(options).encode(), reply=inbox)
    try:
        async with asyncio.timeout(REQUEST_S):
            while len(found) < servers:
                report = json.loads((await replies.next_msg(timeout=REQUEST_S)).data)
                found[str(report["server"]["name"])] = report.get("data") or {}
    except TimeoutError:
        if not found:
            raise
    return found


async def _note_routers(
    connected: ConnectedRouters, client: Client, region: str, servers: int
) -> None:
    """Note which routers are connected to so many of the region's servers, if all say it."""
    options = {"auth": True, "user": ROUTER, "limit": CONNECTIONS_MAX}
    try:
        reports = await _reports(client, CONNZ, servers, options)
    except TimeoutError:
        return
    if len(reports) == servers and all(reports.values()):
        clients = (one for report in reports.values() for one in report.get("connections") or ())
        names = [str(one.get("name")) for one in clients]
        prefix = f"router {region}/"
        found = {one.removeprefix(prefix) for one in names if one.startswith(prefix)}
        connected[RegionId(region)] = found


async def _check_cluster(
    found: RegionFindings, topology: Topology, client: Client, reached: int, servers: int
) -> None:
    """Whether the region's servers have joined one another. One that is down is named elsewhere."""
    prefix = f"{topology.mesh.name}-"
    joined = {name.removeprefix(prefix) for name in await _reports(client, ROUTEZ, reached)}
    names = {f"{found.region}{suffix}" for suffix in server_suffixes(servers)}
    detail = f"{', '.join(sorted(joined))} are joined"
    if len(joined) < servers:
        detail = f"of {', '.join(sorted(names))} only {', '.join(sorted(joined))} are joined"
    verdict = CheckResult.WARNING if len(joined) > servers // 2 else CheckResult.BAD
    verdict = result_if(len(joined) == servers, verdict)
    found.add("bus", "cluster", verdict, detail)
    # The one that a login reached is examined with it; these are the others too.
    for name, report in (await _reports(client, VARZ, reached)).items():
        major, minor, patch, *_ = (*re.findall("[0-9]+", str(report.get("version"))), 0, 0, 0)
        about, known = described_version((int(major), int(minor), int(patch)))
        if known:
            found.add("bus", name.removeprefix(prefix), CheckResult.BAD, about)


async def _check_server_links(
    found: RegionFindings, topology: Topology, client: Client, servers: int
) -> None:
    """The links as so many of the region's own servers report them."""
    reports = await _reports(client, LEAFZ, servers)
    leaves = [leaf for report in reports.values() for leaf in report.get("leafs") or ()]
    up = {leaf.get("account"): leaf for leaf in leaves}
    for peer in topology.peers(found.region):
        leaf = up.get(link_account(peer))
        rtt_s = None if leaf is None else go_duration_s(leaf.get("rtt") or "")
        measured = (None, None) if rtt_s is None else (as_ms(rtt_s), "ms")
        detail = "down" if leaf is None else "up, round trip between the servers"
        verdict = result_if(leaf is not None)
        # Each server that dials has the link for its own clients; one that accepts, for all.
        dials = topology.link(found.region, peer).solicitor == found.region
        linked = sum(one.get("account") == link_account(peer) for one in leaves)
        if leaf is not None and dials and linked < servers:
            verdict, detail = CheckResult.WARNING, f"up at {linked} of {servers} nats-servers"
        found.add("server link", peer, verdict, detail, *measured, peer=peer)
