"""What people receive of a region: heartbeats, digests, leases, prefixes, and the streams there.

A lease that is not renewed while we listen has expired: its owner renews it four times per lease.
"""

import asyncio
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig, StreamInfo

from infra.topology import Topology
from infra.workers import workers_among
from mesh.adapters import streams
from mesh.adapters.operator_orders import ORDERS
from mesh.adapters.region_records import RecordsUnavailable
from mesh.doctor.findings import (
    ENGINE_PAGE,
    ENGINE_RESULTS,
    PEER_RESULTS,
    STREAM_WRITES,
    CheckResult,
    MonotonicClock,
    RegionFindings,
    result_if,
)
from schemas import state, subjects, wire
from schemas.control import RegionControl, nothing_ordered
from schemas.explain import (
    RequestQuestion,
    RouterRequests,
    RoutingInForce,
    decode_answer,
    encode_question,
)
from schemas.ids import RegionId, RouterId
from schemas.residency import Ground, labels_text
from schemas.state import LOOKS_LIKE, Digest, Heartbeat, Lease, ReplicaState

T = TypeVar("T")

REQUEST_S = 5.0
LAST_REQUEST = encode_question(RequestQuestion(recent=1))  # and what tenants wait for
ROUTING = encode_question(RequestQuestion(routing=True))  # and whether they keep orders
WRITES_MIN = 2  # heartbeats, before it is judged that none is stored; at rest two a second
WRITES_FAIL = "is the disk full? Of three nats-servers two must run and reach each other"
AWAY = (ReplicaState.DOWN, ReplicaState.STARTING)  # the engine does not answer its agent
STRANGERS_MIN = 16  # requests in an engine beside those of its agent
SOME_FAILED = 3  # requests within half a minute: to be looked into, though it answers others
WRITTEN = (subjects.STREAM_HEARTBEATS, subjects.STREAM_LEASES)  # all the time
HELD = dict.fromkeys(WRITTEN, "last values")  # what their messages are, of others just messages


@dataclass(slots=True)
class ObservedMessages:
    """The last message of each sender while we listened."""

    heartbeats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)  # when received
    digests: dict[tuple[RegionId, RouterId], Digest] = field(default_factory=dict)
    lease: Lease | None = None  # of the region itself
    listen_s: float = 0.0
    answers: dict[RouterId, RouterRequests] = field(default_factory=dict)  # of its routers
    routing: dict[RouterId, RoutingInForce] = field(default_factory=dict)  # likewise
    beats: int = 0  # heartbeats that came
    stored: dict[str, int] | None = None  # meanwhile, by stream; None: they did not answer
    undecodable: int = 0

    def digests_of(self, region: str) -> list[Digest]:
        return [digest for (sender, _), digest in self.digests.items() if sender == region]

    def decode(self, decode: Callable[[bytes], T], msg: Msg) -> T | None:
        """The message, or None if it can't be decoded, which is counted."""
        try:
            return decode(msg.data)
        except wire.WireError:
            self.undecodable += 1
            return None

    def answered(self, answer: RouterRequests) -> None:
        """One of the region's routers has answered one of the two questions."""
        if answer.routing is not None:
            self.routing[answer.router] = answer.routing
        else:
            self.answers[answer.router] = answer


async def listen(
    client: Client, region: RegionId, clock: MonotonicClock, listen_s: float
) -> ObservedMessages:
    """Listen for that long.

    What routers and agents publish themselves has no headers; what a stream sends has some.
    """
    observed = ObservedMessages(listen_s=listen_s)

    async def on_heartbeat(msg: Msg) -> None:
        if not msg.headers and (heartbeat := observed.decode(state.decode_heartbeat, msg)):
            observed.heartbeats[heartbeat.replica] = (heartbeat, clock())
            observed.beats += 1

    async def on_digest(msg: Msg) -> None:
        digest = None if msg.headers else observed.decode(state.decode_digest, msg)
        if digest is not None and digest.region == subjects.owner(msg.subject):
            observed.digests[digest.region, digest.router] = digest

    async def on_lease(msg: Msg) -> None:
        if (msg.headers or {}).get("Nats-Stream") == subjects.STREAM_LEASES:
            observed.lease = observed.decode(state.decode_lease, msg) or observed.lease

    async def on_answer(msg: Msg) -> None:
        answer = None if msg.headers else observed.decode(decode_answer, msg)
        if answer is not None and answer.region == region:
            observed.answered(answer)

    await client.subscribe(inbox := client.new_inbox(), cb=on_answer)
    await client.subscribe(subjects.leased(region), cb=on_lease)
    await client.subscribe(subjects.heartbeat(region, subjects.ANY), cb=on_heartbeat)
    await client.subscribe(subjects.digest(subjects.ANY), cb=on_digest)
    for question in (LAST_REQUEST, ROUTING):
        await client.publish(subjects.requests(region), question, reply=inbox)
    await client.flush()
    observed.stored = await _stored_in(client, listen_s)
    return observed


async def _stored_in(client: Client, listen_s: float) -> dict[str, int] | None:
    """How many messages each stream of WRITTEN that is there has stored in that time; None where
    JetStream does not answer."""
    before = await _last_stored(client)
    await asyncio.sleep(listen_s)
    after = None if before is None else await _last_stored(client)
    if before is None or after is None:
        return None
    return {name: after[name] - before[name] for name in before.keys() & after}


async def _last_stored(client: Client) -> dict[str, int] | None:
    """The number of the last message in each stream of WRITTEN that is there; None where JetStream
    does not answer."""
    found: dict[str, int] = {}
    try:
        for name in WRITTEN:
            info = await client.jsm(timeout=REQUEST_S).stream_info(name)
            found[name] = info.state.last_seq
    except nats.errors.TimeoutError:
        return None
    except (nats.js.errors.Error, nats.errors.Error):
        pass  # `check_streams` says why
    return found


def check_writes(found: RegionFindings, observed: ObservedMessages, *, is_expired: bool) -> None:
    """Whether the region's streams take writes. A full disk fails them all. Then the streams of one
    server are still read, those of three servers no longer. `is_expired`: the lease."""
    routers = [one.router for one in observed.digests_of(found.region) if one.accepting]
    stored = observed.stored
    if stored is None:
        name, what = "all", "they do not answer"
    elif observed.beats >= WRITES_MIN and stored.get(subjects.STREAM_HEARTBEATS) == 0:
        name, what = subjects.STREAM_HEARTBEATS, f"none of {observed.beats} heartbeats was stored"
    elif is_expired and routers and stored.get(subjects.STREAM_LEASES) == 0:
        name = subjects.STREAM_LEASES
        what = f"no write of the lease was stored, and {', '.join(sorted(routers))} is heard"
    else:
        return
    found.add(STREAM_WRITES, name, CheckResult.BAD, f"{what}: {WRITES_FAIL}")


def check_orders(found: RegionFindings, observed: ObservedMessages) -> None:
    """Whether the region's stream has lost operators' orders, which its routers keep then."""
    if keep := sorted(router for router, one in observed.routing.items() if one.orders_lost):
        detail = (
            f"the stream has lost them; those that held are kept by {', '.join(keep)}: the next "
        )
        detail += "`mesh drain`, `mesh undrain` or `mesh routing` writes them again"
        found.add("orders", subjects.STREAM_CONTROL, CheckResult.WARNING, detail)


async def last_orders(client: Client, region: RegionId) -> RegionControl:
    """What operators have ordered there; nothing if it can't be read, which another check finds."""
    try:
        return (await ORDERS.read(client, region)).record
    except RecordsUnavailable:
        return nothing_ordered(region)


async def check_prefixes(
    found: RegionFindings, topology: Topology, client: Client, listen_s: float
) -> None:
    """Whether only those prefixes arrive that may. Of what people receive, operators' alone."""
    _prefixes(found, topology.ground, await prefixes_of(client, listen_s))


async def prefixes_of(client: Client, listen_s: float) -> set[RegionId]:
    """The regions whose routers' prefixes arrive in that time."""
    received: set[RegionId] = set()

    async def on_prefixes(msg: Msg) -> None:
        owner = subjects.owner(msg.subject)
        if owner is not None and not msg.headers:
            received.add(owner)

    await client.subscribe(subjects.trie(subjects.ANY), cb=on_prefixes)
    await client.flush()
    await asyncio.sleep(listen_s)
    return received


def compare(
    found: RegionFindings,
    topology: Topology,
    observed: ObservedMessages,
    now: float,
    orders: RegionControl | None = None,
) -> None:
    """Add what was received, compared with mesh.toml and with what operators have ordered."""
    _replicas(found, topology, observed, now, orders or nothing_ordered(RegionId(found.region)))
    _routers(found, topology, observed)
    own = observed.digests_of(found.region)
    failing = {str(peer): why for digest in own for peer, why in digest.avoided_peers.items()}
    for peer in topology.peers(RegionId(found.region)):
        routers = sorted(router for other, router in observed.digests if other == peer)
        detail = f"digests received from {', '.join(routers)}" if routers else "no digest received"
        found.add("link", peer, result_if(bool(routers)), detail, peer=peer)
        if (why := failing.get(peer)) is not None:
            detail = f"{why}; routers forward little there"
            found.add(PEER_RESULTS, peer, CheckResult.WARNING, detail, peer=peer)
    if observed.undecodable:
        detail = f"{observed.undecodable} messages could not be decoded"
        found.add("bus", "messages", CheckResult.WARNING, detail)
    _labels(found, topology, observed)


def _replicas(
    found: RegionFindings,
    topology: Topology,
    observed: ObservedMessages,
    now: float,
    orders: RegionControl,
) -> None:
    known = topology.region(found.region).replicas
    own = observed.digests_of(found.region)
    avoided = {str(name): why for digest in own for name, why in digest.avoided.items()}
    beats = [observed.heartbeats[name][0] for name in known if name in observed.heartbeats]
    # Without any ready replica that answers requests the region can't compute.
    computes = any(beat.state is ReplicaState.READY and not beat.is_failing for beat in beats)
    without = CheckResult.WARNING if computes else CheckResult.BAD
    for replica in known:
        if replica not in observed.heartbeats:
            found.add("heartbeat", replica, CheckResult.BAD, "silent")
            continue
        beat, received_at = observed.heartbeats[replica]
        reason = ": ".join(filter(None, (beat.down_reason, beat.down_detail)))
        requests = f", {beat.outstanding} requests in it"
        if beat.results is not None:
            requests += f", failed {beat.results.words}"
        detail = f"{beat.state}{f' ({reason})' if reason else ''}{requests}"
        verdict = result_if(beat.state is ReplicaState.READY, without)
        if beat.state is ReplicaState.DRAINING and orders.drains(replica):
            who = f"{orders.by}: {orders.reason}" if orders.reason else orders.by
            detail = f"drained{requests}; `mesh undrain {replica}` ends that ({who})"
            verdict = CheckResult.WARNING
        elif beat.state is ReplicaState.DRAINING:
            detail += "; no order says so: its agent is being stopped, or keeps an order whose "
            detail += "store was lost (the next `mesh drain` or `mesh undrain` writes it again)"
        elif beat.state is not ReplicaState.READY and beat.down_detail is None:
            detail += "; its agent's log says why"
        age_ms = round((now - received_at) * 1000, 1)
        check = "engine" if beat.state in AWAY else "heartbeat"
        found.add(check, replica, verdict, detail, age_ms, "ms old")
        if beat.page_problem is not None:
            found.add(ENGINE_PAGE, replica, CheckResult.WARNING, _page_detail(beat.page_problem))
        if (wrong := _results_detail(beat, avoided.get(replica))) is not None:
            verdict = without if beat.is_failing else CheckResult.WARNING
            found.add(ENGINE_RESULTS, replica, verdict, wrong)
    for stranger in sorted(observed.heartbeats.keys() - set(known)):
        found.add("heartbeat", stranger, CheckResult.WARNING, "it is not in the file")


def _results_detail(beat: Heartbeat, avoided: str | None) -> str | None:
    """What is wrong with the answers of an engine that is up, as its agent tells or a router, which
    avoids it for that; None if nothing is."""
    results = beat.results
    if beat.state is ReplicaState.DOWN:
        return None
    if results is not None and (beat.is_failing or results.failed >= SOME_FAILED):
        return f"fails: {results.words}"
    if beat.too_many is not None:
        return f"answers 429 to more than it runs; it is given at most {beat.too_many} at once"
    inside = (beat.running or 0) + (beat.pending or 0)
    sent = beat.outstanding + beat.offline_running
    if inside - sent >= STRANGERS_MIN:
        detail = f"its page tells of {inside} requests, its agent has sent {sent}: "
        return f"{detail}others use it, or its page is wrong"
    return None if avoided is None else f"{avoided}; routers give it little work"


def _page_detail(problem: str) -> str:
    """What an operator reads about a page of an engine that answers all the same."""
    page, _, why = problem.partition(": ")
    if why.startswith(LOOKS_LIKE):
        return f"its engine {why}; until then its agent counts its own requests"
    if page == "models":
        return f"/v1/models fails ({why}); its agent takes the models last listed"
    return f"its page of metrics fails ({why}); its agent counts its own requests"


def _routers(found: RegionFindings, topology: Topology, observed: ObservedMessages) -> None:
    """Every router of the file, whether it runs as one process or several."""
    region, own = RegionId(found.region), topology.region(found.region)
    seen = {router for other, router in observed.digests if other == region}
    for router in own.routers:
        names = workers_among(router, seen - (set(own.routers) - {router}))
        digests = [observed.digests[region, name] for name in names]
        verdict, detail = result_if(bool(digests)), f"not heard for {observed.listen_s:g} s"
        if digests and not any(digest.accepting for digest in digests):
            verdict, detail = CheckResult.WARNING, "draining"
        elif digests:
            detail = f"{max(digest.replicas_ready for digest in digests)} replicas ready"
            if own.workers > 1:
                detail = f"{len(digests)} of {own.workers} workers send digests, {detail}"
                verdict = result_if(len(digests) >= own.workers, CheckResult.WARNING)
        found.add("router", router, verdict, detail)


def late_or_gone(found: RegionFindings, connected: Set[str] | None) -> None:
    """Say of routers that were not heard what else is known. `connected`: the names of the
    connections of the region's routers; None: not known."""
    for number, one in enumerate(found.findings):
        if one.check != "router" or one.verdict is not CheckResult.BAD:
            continue
        why = ": stopped, cut off or starved of CPU"
        if connected is not None and workers_among(RouterId(one.about), map(RouterId, connected)):
            why = ", and connected to its nats-server: stopped, hanging or starved of CPU"
        elif connected is not None:
            why = ", and not connected to its nats-server: ended or cut off"
        found.findings[number] = replace(one, detail=one.detail + why)


def _labels(found: RegionFindings, topology: Topology, observed: ObservedMessages) -> None:
    """Whether routers and replicas have the labels that mesh.toml gives them."""
    ground = topology.ground
    if not ground.labels:
        return
    for (region, router), digest in sorted(observed.digests.items()):
        given = tuple(sorted(ground.carried_by(region)))
        claimed = digest.residency
        carries = "nothing" if claimed is None else labels_text(claimed) or "none"
        detail = f"carries {carries}, the file says {labels_text(given) or 'none'}"
        found.add("labels", f"{region}/{router}", result_if(claimed == given), detail)
    carried = ground.carried_by(RegionId(found.region))
    for replica, (beat, _) in sorted(observed.heartbeats.items()):
        if excess := set(beat.residency or ()) - carried:
            detail = f"claims {labels_text(excess)}, which its region does not carry: ignored"
            found.add("labels", replica, CheckResult.WARNING, detail)


def _prefixes(found: RegionFindings, ground: Ground, received_of: Set[RegionId]) -> None:
    """A confined region's prefixes may reach only regions that carry its labels."""
    home = RegionId(found.region)
    for sender, labels in ground.confined:
        if sender == home:
            continue
        may_send, received = ground.may_send(sender, home), sender in received_of
        about = f"prefixes of {sender}"
        if not may_send:
            detail = "received here, and must not be" if received else "not received here"
            found.add("residency", about, result_if(not received), detail)
        elif received:
            detail = f"received here, as {labels_text(labels)} allows"
            found.add("residency", about, CheckResult.OK, detail)


async def check_streams(
    found: RegionFindings, configs: Iterable[StreamConfig], client: Client
) -> None:
    """Whether streams of the region are there, and configured as the mesh makes them."""

    async def check(config: StreamConfig, found: RegionFindings) -> None:
        name = str(config.name)
        try:
            if differs := await streams.altered(client, config):
                detail = f"not as it is made: {', '.join(differs)}"
                found.add("stream", name, CheckResult.BAD, detail)
                return
            info = await client.jsm(timeout=REQUEST_S).stream_info(name)
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
            detail = f"{error or type(error).__name__}; is JetStream up?"
            found.add("stream", name, CheckResult.BAD, detail)
        else:
            detail = f"{info.state.messages} {HELD.get(name, 'messages')}"
            behind = _behind(info)
            if behind:
                detail += f"; its copies are not in step: {', '.join(behind)}"
            found.add("stream", name, result_if(not behind, CheckResult.WARNING), detail)

    await found.run_concurrently(*(partial(check, config) for config in configs))


async def check_keys(found: RegionFindings, topology: Topology, client: Client) -> None:
    """Whether somebody can have a key where keys are required; what a lost stream means."""
    auth = topology.auth
    has_others = auth.jwt is not None or bool(topology.keys)
    try:
        state = (await client.jsm(timeout=REQUEST_S).stream_info(subjects.STREAM_KEYS)).state
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError):
        return  # `check_streams` says why
    if state.messages == 0 and state.last_seq > 0:
        detail = "the stream was emptied: routers that run keep what they know; `mesh keys sync`"
        found.add("keys", subjects.STREAM_KEYS, CheckResult.WARNING, detail)
    elif state.messages == 0 and auth.required and not has_others:
        detail = "keys are required and none was made, or the stream was made anew: routers that "
        detail += "start serve nobody; `mesh keys create`, or `mesh keys sync` from other regions"
        found.add("keys", subjects.STREAM_KEYS, CheckResult.WARNING, detail)


def _behind(info: StreamInfo) -> list[str]:
    """The servers whose copy of the stream is not as the leader's, and why."""
    copies = [] if info.cluster is None else info.cluster.replicas or []
    return [
        f"{copy.name} is offline" if copy.offline else f"{copy.name} is {copy.lag or 0} behind"
        for copy in copies
        if copy.offline or not copy.current
    ]


def check_owner(
    found: RegionFindings,
    topology: Topology,
    lease: Lease | None,
    before: Lease | None,
    listen_s: float,
) -> bool:
    """Who owns the region's replicas. `lease`: the last write while we listened, `before`: the last
    one before. Whether the lease has expired."""
    region = RegionId(found.region)
    if not topology.peers(region):
        verdict, detail = CheckResult.OK, "its own routers: there is no other region"
    elif lease is None:
        verdict, detail = _not_renewed(before, listen_s)
    elif lease.owner == region:
        verdict, detail = CheckResult.OK, f"its own routers, by {lease.router}, term {lease.term}"
    else:
        verdict = CheckResult.WARNING
        detail = f"adopted by {lease.owner}, by its router {lease.router}, term {lease.term}: "
        detail += "its own routers send nothing"
    found.add("lease", "owner", verdict, detail)
    return verdict is CheckResult.BAD


def _not_renewed(last: Lease | None, listen_s: float) -> tuple[CheckResult, str]:
    if last is None:
        return CheckResult.BAD, "nobody: its stream has no lease that can be read"
    then = f"the last was {last.owner}, term {last.term}"
    if listen_s < last.lease_s:
        detail = f"not renewed in {listen_s:g} s, shorter than a lease; {then}: listen longer"
        return CheckResult.UNKNOWN, detail
    return CheckResult.BAD, f"expired: nobody renews it; {then}"


async def last_lease(client: Client, region: RegionId) -> Lease | None:
    """Its last write; None if it can't be read."""
    manager = client.jsm(timeout=REQUEST_S)
    try:
        last = await manager.get_last_msg(
            subjects.STREAM_LEASES, subjects.lease(region), direct=True
        )
        return None if last.data is None else state.decode_lease(last.data)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError, wire.WireError):
        return None
