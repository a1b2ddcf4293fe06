"""The examination of a running mesh: all regions that there are credentials for, side by side.

It looks from where it is given a place to stand: a region without credentials here is known only
by what crosses its links. Nothing is repaired and nothing disturbed.

All regions and all checks are asked at once, each with a limit of its own (`limits`), and there is
one for the whole. So a server that is dead or stopped costs one look, and holds up nobody else.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import nats.errors
from nats.aio.client import Client

from infra.bus import BusAddress, BusUnreachable
from infra.ending import end_all
from infra.nats.region_config import link_account
from infra.topology import Topology
from mesh.doctor import keeping, listening, trying
from mesh.doctor.findings import Chart, Finding, Verdict, verdict_if
from mesh.doctor.folding import ByHand, folded
from mesh.doctor.limits import LIMITS, Limits
from mesh.doctor.logins import Logins
from mesh.doctor.reach import NothingRuns, Silence, silence_at
from mesh.doctor.times import as_ms, go_duration_s
from mesh.doctor.together import together
from mesh.doctor.trying import Complaints
from schemas import subjects
from schemas.ids import RegionId

REQUEST_S = 5.0
TOOL_INBOX = subjects.INBOX_ROOT
LEAFZ = "$SYS.REQ.SERVER.PING.LEAFZ"

Clock = Callable[[], float]
Work = Callable[[Chart, Complaints], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Manner:
    """How to examine: how long to listen, by which clock, within which limits."""

    listen_s: float
    clock: Clock
    limits: Limits = LIMITS


async def examine(
    topology: Topology, logins: Mapping[RegionId, Logins], manner: Manner, by_hand: ByHand
) -> list[Finding]:
    """All findings, region by region in the order of the file.

    Raises NothingRuns if no server at all takes connections.
    """
    charts = {region: Chart(region, []) for region in topology.regions if region in logins}
    tasks = {
        region: asyncio.create_task(_region(chart, topology, logins[region], manner))
        for region, chart in charts.items()
    }
    total_s = manner.limits.total_s(manner.listen_s)
    try:
        _, late = await asyncio.wait(tasks.values(), timeout=total_s)
    finally:
        await end_all(tasks.values())
    silences: dict[str, Silence] = {}
    for region, task in tasks.items():
        if task in late:
            detail = f"the examination took longer than {total_s:g} s and was broken off"
            charts[region].note("bus", "examination", Verdict.BAD, detail)
        elif (silence := task.result()) is not None:
            silences[region] = silence
    if len(silences) == len(charts) and not any(one.listens for one in silences.values()):
        raise NothingRuns(f"no nats-server listens at {', '.join(_urls(silences))}")
    found = [finding for chart in charts.values() for finding in chart.findings]
    return _in_order(topology, folded(found, silences, by_hand))


def _urls(silences: Mapping[str, Silence]) -> list[str]:
    return list(dict.fromkeys(silence.url for silence in silences.values()))


def _in_order(topology: Topology, findings: list[Finding]) -> list[Finding]:
    order = {region: number for number, region in enumerate(topology.regions)}
    return sorted(findings, key=lambda one: order[RegionId(one.region)])


async def _region(
    chart: Chart, topology: Topology, logins: Logins, manner: Manner
) -> Silence | None:
    """Examine one, or say why its server can't be asked."""
    trying.says_residency(chart, topology)
    limits, clock, listen_s = manner.limits, manner.clock, manner.listen_s
    silence = await silence_at(logins.url, limits.greeting_s)
    if silence is not None:
        return silence

    async def listened(client: Client, page: Chart) -> None:
        region = RegionId(page.region)
        heard = await listening.listen(client, region, clock, listen_s)
        listening.judge(page, topology, heard, clock())
        await keeping.examine_owner(page, topology, client, heard.lease, listen_s)

    async def operator(page: Chart, session: Complaints) -> None:
        await _bus(page, session.client, clock)
        await together(
            page,
            lambda part: keeping.examine_streams(part, topology, session.client),
            lambda part: listened(session.client, part),
            lambda part: trying.operator_is_mute(part, session),
        )

    async def router(page: Chart, session: Complaints) -> None:
        answer_s = limits.answer_s
        await together(
            page,
            lambda part: trying.round_trips(part, topology, session, clock, answer_s),
            lambda part: trying.router_is_bound(part, topology, session),
            lambda part: trying.leases_are_guarded(part, topology, session, answer_s),
        )

    async def system(page: Chart, session: Complaints) -> None:
        await _links(page, topology, session.client)

    nobody = subjects.inbox_prefix(chart.region, trying.NOBODY)
    await together(
        chart,
        partial(_as, "operator", logins.operator, TOOL_INBOX, operator, manner),
        partial(_as, "router", logins.router, nobody, router, manner),
        partial(_as, "system", logins.system, TOOL_INBOX, system, manner),
    )
    return None


async def _as(
    user: str, address: BusAddress | None, inbox: str, work: Work, manner: Manner, chart: Chart
) -> None:
    """Do it under that login, and note why it could not be done or finished."""
    if address is None:
        chart.note("login", user, Verdict.UNKNOWN, "no credentials here: not examined")
        return
    limit_s = manner.limits.session_s(manner.listen_s)
    try:
        async with (
            asyncio.timeout(limit_s) as limit,
            trying.logged_in(address, inbox, manner.limits.greeting_s) as session,
        ):
            await work(chart, session)
    except BusUnreachable as error:
        chart.note("login", user, Verdict.BAD, str(error))
    except (nats.errors.Error, TimeoutError) as error:
        detail = f"the bus broke off: {error or type(error).__name__}"
        if limit.expired():
            detail = f"not done within {limit_s:g} s: the bus answers too slowly"
        chart.note("login", user, Verdict.BAD, detail)


async def _bus(chart: Chart, client: Client, clock: Clock) -> None:
    asked_at = clock()
    await client.flush()
    took_ms = as_ms(clock() - asked_at)
    version = client.connected_server_version
    detail = f"nats-server {version.major}.{version.minor}.{version.patch}"
    chart.note("bus", "server", Verdict.OK, detail, took_ms, "ms")


async def _links(chart: Chart, topology: Topology, client: Client) -> None:
    """The links as the region's own server sees them."""
    reply = await client.request(LEAFZ, timeout=REQUEST_S)
    seen = json.loads(reply.data).get("data") or {}
    up = {leaf.get("account"): leaf for leaf in seen.get("leafs") or ()}
    for peer in topology.peers(chart.region):
        leaf = up.get(link_account(peer))
        rtt_s = None if leaf is None else go_duration_s(leaf.get("rtt") or "")
        measure = (None, None) if rtt_s is None else (as_ms(rtt_s), "ms")
        detail = "down" if leaf is None else "up, round trip between the servers"
        verdict = verdict_if(leaf is not None)
        chart.note("server link", peer, verdict, detail, *measure, peer=peer)
