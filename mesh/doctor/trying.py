"""What a user may not say is tried, and has to be refused; whom a router can reach is measured.

Only what is harmless is tried: whatever slips through is a message that its reader drops, because
there is nothing in it and no stream takes it, or a subscription that hears and does nothing. What
is allowed is not tried, but for pings: a prompt that crosses is one.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from statistics import median

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.nats import permissions
from infra.nats.pattern import covers
from infra.topology import Topology
from mesh.adapters.streams import H_EXPECTED, WRONG_LAST_SEQUENCE
from mesh.doctor.findings import Chart, Verdict, verdict_if
from mesh.doctor.times import as_ms
from mesh.doctor.together import together
from schemas import subjects
from schemas.ids import RegionId
from schemas.residency import labels_text

NOBODY = "doctor"  # a replica and a router that nobody is called
PUBLISH, SUBSCRIPTION = "publish", "subscription"  # as a server's complaints name them
# No stream will ever number a write so: none that keeps the rule takes what comes after it.
TO_NO_STREAM = {H_EXPECTED: str(2**53)}
PINGS = 5
GRACE_S = 1.0  # for complaints to arrive after the answer to a flush

Clock = Callable[[], float]


class Complaints:
    """A client, and what its server forbade it."""

    def __init__(self) -> None:
        self.client: Client
        self._heard: list[str] = []
        self._new = asyncio.Event()

    def hear(self, problem: Exception) -> None:
        """What nats-py tells of the server's complaints."""
        self._heard.append(str(problem).lower())
        self._new.set()

    async def leaks(self, tried: Sequence[str], kind: str = PUBLISH) -> list[str]:
        """Those that the server takes from us, or lets us hear and so answer; tried all at once."""
        for subject in tried:
            if kind == PUBLISH:
                await self.client.publish(subject, b"", headers=TO_NO_STREAM)
            else:
                await self.client.subscribe(subject, cb=_unheard)
        await self.client.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self._not_refused(tried, kind):
                    self._new.clear()
                    await self._new.wait()
        return self._not_refused(tried, kind)

    def _not_refused(self, tried: Sequence[str], kind: str) -> list[str]:
        return [
            subject
            for subject in tried
            if not any(f'{kind} to "{subject}"'.lower() in one for one in self._heard)
        ]


@asynccontextmanager
async def logged_in(
    address: bus.BusAddress, inbox_prefix: str, within_s: float
) -> AsyncIterator[Complaints]:
    """A connection under that name, closed at the end. Raises BusUnreachable."""
    session = Complaints()
    try:
        async with asyncio.timeout(within_s):
            session.client = await bus.connect(
                address, name="mesh doctor", inbox_prefix=inbox_prefix, on_error=session.hear
            )
    except TimeoutError as error:
        raise bus.BusUnreachable(f"no login at {address.url} within {within_s:g} s") from error
    try:
        yield session
    finally:
        await bus.close(session.client)


async def operator_is_mute(chart: Chart, session: Complaints) -> None:
    """An operator sees state, hears no prompt and says nothing."""
    region = RegionId(chart.region)
    tried = (
        subjects.heartbeat(region, NOBODY),
        subjects.digest(region),
        subjects.work(region, NOBODY),
        subjects.ingress(region),
        subjects.lease(region),
        subjects.leased(region),
    )
    await _all_refused(chart, "permissions", "operator", session, tried)
    hears = (subjects.work(region, NOBODY), subjects.ingress(region))
    about = "ears of the operator"
    await _all_refused(chart, "permissions", about, session, hears, kind=SUBSCRIPTION)


async def router_is_bound(chart: Chart, topology: Topology, session: Complaints) -> None:
    """A router speaks in no other name, and its prompts go nowhere that they may not."""
    region = RegionId(chart.region)
    names = [subjects.heartbeat(region, NOBODY)]
    for peer in topology.peers(region):
        names += [
            subjects.digest(peer),
            subjects.alive(peer, NOBODY),
            subjects.leased(peer),
            subjects.snapshot(peer, asker=peer),
        ]
    await _all_refused(chart, "permissions", "router", session, names)
    for peer in topology.peers(region):
        hears = (subjects.snapshot(peer, subjects.ANY), subjects.ingress(peer))
        await _all_refused(
            chart, "permissions", f"answers for {peer}", session, hears, kind=SUBSCRIPTION
        )
    for peer in topology.peers(region):
        tried = list(forbidden_prompts(topology, region, peer))
        if tried:
            about = f"prompts to {peer}"
            await _all_refused(chart, "residency", about, session, tried)


def forbidden_prompts(topology: Topology, region: RegionId, peer: RegionId) -> Iterator[str]:
    """Subjects that would bring a prompt of `region` to `peer`, and that the file forbids."""
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


async def _unheard(msg: Msg) -> None:
    """Whatever reaches us here is not ours to read."""


async def _all_refused(
    chart: Chart,
    check: str,
    about: str,
    session: Complaints,
    tried: Iterable[str],
    *,
    kind: str = PUBLISH,
) -> None:
    tried = list(tried)
    leaks = await session.leaks(tried, kind)
    if leaks:
        detail = f"the bus took what it must refuse: {', '.join(leaks)}"
    else:
        detail = f"refused by the bus, as it must: {', '.join(tried)}"
    chart.note(check, about, verdict_if(not leaks), detail)


async def leases_are_guarded(
    chart: Chart, topology: Topology, session: Complaints, answer_s: float
) -> None:
    """A peer may write a lease only as the next after the last: any other write is refused.

    That a router of another region may write it by this rule is how regions are adopted. Tried is
    a write after one that never was, so that none but a stream without the rule would take it.
    """

    async def one(peer: RegionId, page: Chart) -> None:
        told = await _claim(session.client, subjects.lease(peer), answer_s)
        about = f"write for {peer}"
        if told is None:
            detail = f"no answer within {answer_s:g} s: the link is cut, or there is no stream"
            page.note("lease", about, Verdict.UNKNOWN, detail, peer=peer)
            return
        error = told.get("error")
        refused = isinstance(error, dict) and error.get("err_code") == WRONG_LAST_SEQUENCE
        if refused:
            detail = "refused by its stream, as it must: who does not know the last write"
        else:
            detail = f"its stream did not refuse who does not know the last write: {told}"
        page.note("lease", about, verdict_if(refused), detail, peer=peer)

    peers = topology.peers(RegionId(chart.region))
    await together(chart, *(partial(one, peer) for peer in peers))


async def _claim(client: Client, subject: str, answer_s: float) -> dict[str, object] | None:
    try:
        answer = await client.request(subject, b"", timeout=answer_s, headers=TO_NO_STREAM)
        told = json.loads(answer.data)
    except (nats.errors.NoRespondersError, TimeoutError):
        return None
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


async def round_trips(
    chart: Chart, topology: Topology, session: Complaints, clock: Clock, answer_s: float
) -> None:
    """What a question to each peer takes on the bus; all are asked at once."""
    region = RegionId(chart.region)
    name = f"{NOBODY}-{secrets.token_hex(4)}"

    async def one(peer: RegionId, page: Chart) -> None:
        inbox = subjects.inbox(region, name, f"ping-{peer}")
        seconds = await _pings(session.client, subjects.ping(peer), inbox, clock, answer_s)
        if not seconds:
            detail = f"no answer within {answer_s:g} s: the link is cut, or no router runs there"
            page.note("round trip", peer, Verdict.BAD, detail, peer=peer)
            return
        told = topology.link(region, peer).rtt_ms
        detail = f"median of {len(seconds)}; the file says {told:g} ms"
        measure = (as_ms(median(seconds)), "ms")
        page.note("round trip", peer, Verdict.OK, detail, *measure, peer=peer)

    await together(chart, *(partial(one, peer) for peer in topology.peers(region)))


async def _pings(
    client: Client, subject: str, inbox: str, clock: Clock, answer_s: float
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
            if echo.data != payload:  # the server's own word: nobody listens
                return seconds
            seconds.append(clock() - sent_at)
    except TimeoutError:
        return seconds
    finally:
        await echoes.unsubscribe()
    return seconds


def says_residency(chart: Chart, topology: Topology) -> None:
    """What the file says of this region, for people."""
    ground, region = topology.ground, RegionId(chart.region)
    if ground.labels:
        confined = labels_text(ground.confined_to(region))
        detail = f"carries {labels_text(ground.carried_by(region)) or 'none'}"
        detail += f", confined to {confined}" if confined else ", confined to nothing"
        chart.note("residency", "labels", Verdict.OK, detail)
