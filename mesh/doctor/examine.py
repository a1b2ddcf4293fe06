"""The examination of a running mesh: all regions that there are credentials for, side by side.

It looks from where it is given a place to stand: a region without credentials here is known only
by what crosses its links. Nothing is repaired and nothing disturbed.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

import nats.errors
from nats.aio.client import Client

from infra.bus import BusAddress, BusUnreachable
from infra.nats.region_config import link_account
from infra.topology import Topology
from mesh.doctor import keeping, listening, trying
from mesh.doctor.findings import Chart, Finding, Verdict, verdict_if
from mesh.doctor.logins import Logins
from mesh.doctor.times import as_ms, go_duration_s
from schemas import subjects
from schemas.ids import RegionId

REQUEST_S = 5.0
TOOL_INBOX = subjects.INBOX_ROOT
LEAFZ = "$SYS.REQ.SERVER.PING.LEAFZ"

Clock = Callable[[], float]


async def examine(
    topology: Topology, logins: Mapping[RegionId, Logins], listen_s: float, clock: Clock
) -> list[Finding]:
    """All findings, region by region in the order of the file."""
    charts = [Chart(region, []) for region in topology.regions if region in logins]
    await asyncio.gather(
        *(_region(chart, topology, logins[RegionId(chart.region)], listen_s, clock)
          for chart in charts)
    )  # fmt: skip
    return [finding for chart in charts for finding in chart.findings]


async def _region(
    chart: Chart, topology: Topology, logins: Logins, listen_s: float, clock: Clock
) -> None:
    trying.says_residency(chart, topology)

    async def operator(address: BusAddress) -> None:
        async with trying.logged_in(address, TOOL_INBOX) as session:
            await _bus(chart, session.client, clock)
            await keeping.examine_streams(chart, topology, session.client)
            region = RegionId(chart.region)
            heard = await listening.listen(session.client, region, clock, listen_s)
            listening.judge(chart, topology, heard, clock())
            await keeping.examine_owner(chart, topology, session.client, heard.lease, listen_s)
            await trying.operator_is_mute(chart, session)

    async def router(address: BusAddress) -> None:
        prefix = subjects.inbox_prefix(chart.region, trying.NOBODY)
        async with trying.logged_in(address, prefix) as session:
            await trying.round_trips(chart, topology, session, clock)
            await trying.router_is_bound(chart, topology, session)
            await trying.leases_are_guarded(chart, topology, session)

    async def system(address: BusAddress) -> None:
        async with trying.logged_in(address, TOOL_INBOX) as session:
            await _links(chart, topology, session.client)

    await _as(chart, "operator", logins.operator, operator)
    await _as(chart, "router", logins.router, router)
    await _as(chart, "system", logins.system, system)


async def _as(
    chart: Chart,
    user: str,
    address: BusAddress | None,
    work: Callable[[BusAddress], Awaitable[None]],
) -> None:
    if address is None:
        chart.note("login", user, Verdict.UNKNOWN, "no credentials here: not examined")
        return
    try:
        await work(address)
    except BusUnreachable as error:
        chart.note("login", user, Verdict.BAD, str(error))
    except (nats.errors.Error, TimeoutError) as error:
        detail = f"the bus broke off: {error or type(error).__name__}"
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
    up = {leaf.get("account"): leaf for leaf in json.loads(reply.data)["data"].get("leafs") or ()}
    for peer in topology.peers(chart.region):
        leaf = up.get(link_account(peer))
        rtt_s = None if leaf is None else go_duration_s(leaf.get("rtt") or "")
        measure = (None, None) if rtt_s is None else (as_ms(rtt_s), "ms")
        detail = "down" if leaf is None else "up, round trip between the servers"
        chart.note("server link", peer, verdict_if(leaf is not None), detail, *measure)
