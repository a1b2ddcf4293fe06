"""Tries what a user may not do, which must be refused, and measures round trips to peers.

Everything tried is harmless: a message that slips through is empty and dropped by its reader, no
stream accepts it, and a subscription ignores what it receives. Of what is allowed only pings are
tried, because a prompt that crosses a link is real.
"""

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import nats.errors
from nats.aio.client import Client

from infra.auth_table import OPEN, open_regions
from infra.bus import WRONG_LAST
from infra.nats import permissions
from infra.nats.permissions import covers
from infra.topology import Topology
from mesh.doctor.connectivity import NEVER_THE_LAST, PUBLISH, SUBSCRIPTION, DoctorConnection
from mesh.doctor.findings import CheckResult, MonotonicClock, RegionFindings, as_ms, result_if
from schemas import subjects
from schemas.catalog import CHANNELS, Role
from schemas.ids import RegionId
from schemas.residency import labels_text

NOBODY = "doctor"  # a name that no replica and no router has
PINGS = 5


async def check_watcher(found: RegionFindings, connection: DoctorConnection, role: Role) -> None:
    """An observer or operator publishes on no channel that is not for it, and receives none."""
    names = dict.fromkeys(("replica", "router", "stream", "label"), NOBODY)
    names |= {"region": found.region, "asker": found.region}
    channels = [row for row in CHANNELS if row.template.startswith(f"{subjects.ROOT}.")]
    published = [row.subject(**names) for row in channels if role not in row.publish]
    await _check_refused(found, "permissions", role.value, connection, published)
    received = [row.subject(**names) for row in channels if role not in row.subscribe]
    about = f"subscriptions of the {role.value}"
    await _check_refused(found, "permissions", about, connection, received, SUBSCRIPTION)


async def check_router(
    found: RegionFindings, topology: Topology, connection: DoctorConnection
) -> None:
    """A router publishes in no other's name, and its prompts reach only where they may."""
    region = RegionId(found.region)
    peers = topology.peers(region)
    published = [subjects.heartbeat(region, NOBODY), subjects.controlled(region)]
    for peer in peers:
        published += [
            subjects.digest(peer),
            subjects.alive(peer, NOBODY),
            subjects.leased(peer),
            subjects.snapshot(peer, asker=peer),
        ]
    await _check_refused(found, "permissions", "router", connection, published)
    for peer in peers:
        received = (subjects.snapshot(peer, subjects.ANY), subjects.ingress(peer))
        about = f"answers for {peer}"
        await _check_refused(found, "permissions", about, connection, received, SUBSCRIPTION)
    for peer in peers:
        if prompts := list(forbidden_prompts(topology, region, peer)):
            await _check_refused(found, "residency", f"prompts to {peer}", connection, prompts)


def forbidden_prompts(topology: Topology, region: RegionId, peer: RegionId) -> Iterator[str]:
    """Subjects that would bring a prompt of `region` to `peer`, and that mesh.toml forbids."""
    ground = topology.ground
    allowed = permissions.router(region, ground).publish
    labels = sorted(ground.labels)
    for subject in (
        subjects.ingress(peer),
        *(subjects.ingress_within(peer, label) for label in labels),
        *((subjects.body(peer, NOBODY), subjects.work(peer, NOBODY)) if labels else ()),
    ):
        if not any(covers(pattern, subject) for pattern in allowed):
            yield subject


async def _check_refused(
    found: RegionFindings,
    check: str,
    about: str,
    connection: DoctorConnection,
    tried: Sequence[str],
    kind: str = PUBLISH,
) -> None:
    accepted = await connection.accepted(tried, kind)
    if accepted:
        detail = f"the bus accepted what it must refuse: {', '.join(accepted)}"
    else:
        detail = f"refused by the bus, as it must: {', '.join(tried)}"
    found.add(check, about, result_if(not accepted), detail)


async def check_lease_writes(
    found: RegionFindings, topology: Topology, connection: DoctorConnection, answer_s: float
) -> None:
    """A peer may write a lease only as the successor of the last write; others are refused.

    By this rule a router of another region adopts a region. Tried is a write after one that never
    was, so only a stream without the rule would accept it.
    """

    async def check(peer: RegionId, found: RegionFindings) -> None:
        about = f"write for {peer}"
        answer = await _write_lease(connection.client, subjects.lease(peer), answer_s)
        if answer is None:  # the first answer over a link may overtake the interest in it
            answer = await _write_lease(connection.client, subjects.lease(peer), answer_s)
        if answer is None:
            detail = f"no answer in {answer_s:g} s, twice: the link is cut, or there is no stream"
            found.add("lease", about, CheckResult.UNKNOWN, detail, peer=peer)
            return
        error = answer.get("error")
        refused = isinstance(error, dict) and error.get("err_code") in WRONG_LAST
        detail = "a write without the last one's number is refused by its stream, as it must"
        if not refused:
            detail = f"its stream did not refuse a write without the last one's number: {answer}"
        found.add("lease", about, result_if(refused), detail, peer=peer)

    peers = topology.peers(RegionId(found.region))
    await found.run_concurrently(*(partial(check, peer) for peer in peers))


async def _write_lease(client: Client, subject: str, answer_s: float) -> dict[str, object] | None:
    try:
        message = await client.request(subject, b"", timeout=answer_s, headers=NEVER_THE_LAST)
        answer = json.loads(message.data)
    except (nats.errors.NoRespondersError, TimeoutError):
        return None
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


async def measure_round_trips(
    found: RegionFindings,
    topology: Topology,
    connection: DoctorConnection,
    clock: MonotonicClock,
    answer_s: float,
) -> None:
    """The round trip to each peer's routers on the bus, to all at once."""
    region = RegionId(found.region)
    name = f"{NOBODY}-{secrets.token_hex(4)}"

    async def measure(peer: RegionId, found: RegionFindings) -> None:
        inbox = subjects.inbox(region, name, f"ping-{peer}")
        seconds = await _pings(connection.client, subjects.ping(peer), inbox, clock, answer_s)
        if not seconds:
            detail = f"no answer within {answer_s:g} s: the link is cut, or no router runs there"
            found.add("round trip", peer, CheckResult.BAD, detail, peer=peer)
            return
        configured_ms = topology.link(region, peer).rtt_ms
        detail = f"median of {len(seconds)}; the file says {configured_ms:g} ms"
        median_ms = as_ms(median(seconds))
        found.add("round trip", peer, CheckResult.OK, detail, median_ms, "ms", peer=peer)

    await found.run_concurrently(*(partial(measure, peer) for peer in topology.peers(region)))


async def _pings(
    client: Client, subject: str, inbox: str, clock: MonotonicClock, answer_s: float
) -> list[float]:
    echoes = await client.subscribe(inbox)
    await client.flush()
    seconds: list[float] = []
    try:
        for _ in range(PINGS):
            sent_at, payload = clock(), secrets.token_bytes(8)
            await client.publish(subject, payload, reply=inbox)
            async with asyncio.timeout(answer_s):
                echo = await echoes.next_msg(timeout=None)
            if echo.data != payload:  # the server's "no responders"
                return seconds
            seconds.append(clock() - sent_at)
    except TimeoutError:
        return seconds
    finally:
        await echoes.unsubscribe()
    return seconds


def add_keys(found: RegionFindings, topology: Topology) -> None:
    """Add a warning where strangers may reach the region's endpoint, and need no key there."""
    for region, where in open_regions(topology.auth, topology.regions):
        if region == found.region:
            found.add("http", str(where), CheckResult.WARNING, OPEN)


def add_residency(found: RegionFindings, topology: Topology) -> None:
    """Add what mesh.toml says of this region's residency."""
    ground, region = topology.ground, RegionId(found.region)
    if ground.labels:
        confined = labels_text(ground.confined_to(region)) or "nothing"
        carries = labels_text(ground.carried_by(region)) or "none"
        detail = f"carries {carries}, confined to {confined}"
        found.add("residency", "labels", CheckResult.OK, detail)
