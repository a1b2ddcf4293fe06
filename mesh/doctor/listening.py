"""What an operator hears of a region: heartbeats, digests, and what it should not hear."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg

from infra.topology import Topology
from infra.workers import workers_among
from mesh.doctor.findings import Chart, Verdict, verdict_if
from schemas import state, subjects, wire
from schemas.ids import RegionId, RouterId
from schemas.residency import Ground, labels_text
from schemas.state import Digest, Heartbeat, Lease, ReplicaState

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(slots=True)
class Heard:
    """All that was said while we listened, the last word of each."""

    beats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    digests: dict[tuple[RegionId, RouterId], Digest] = field(default_factory=dict)
    tries: set[RegionId] = field(default_factory=set)  # regions that told of prefixes
    lease: Lease | None = None  # of the region itself
    garbled: int = 0


async def listen(client: Client, region: RegionId, clock: Clock, listen_s: float) -> Heard:
    """Listen for that long."""
    heard = Heard()

    async def on_beat(msg: Msg) -> None:
        beat = _said(heard, state.decode_heartbeat, msg)
        if beat is not None:
            heard.beats[beat.replica] = (beat, clock())

    async def on_digest(msg: Msg) -> None:
        digest = _said(heard, state.decode_digest, msg)
        if digest is not None and digest.region == subjects.owner(msg.subject):
            heard.digests[digest.region, digest.router] = digest

    async def on_trie(msg: Msg) -> None:
        owner = subjects.owner(msg.subject)
        if owner is not None and not msg.headers:
            heard.tries.add(owner)

    async def on_lease(msg: Msg) -> None:
        if (msg.headers or {}).get("Nats-Stream") == subjects.STREAM_LEASES:
            heard.lease = _decoded(heard, state.decode_lease, msg) or heard.lease

    await client.subscribe(subjects.leased(region), cb=on_lease)
    await client.subscribe(subjects.heartbeat(region, subjects.ANY), cb=on_beat)
    await client.subscribe(subjects.digest(subjects.ANY), cb=on_digest)
    await client.subscribe(subjects.trie(subjects.ANY), cb=on_trie)
    await client.flush()
    await asyncio.sleep(listen_s)
    return heard


def _said(heard: Heard, decode: Callable[[bytes], T], msg: Msg) -> T | None:
    """What a router or agent published, which has no headers; what a stream sends has some."""
    return None if msg.headers else _decoded(heard, decode, msg)


def _decoded(heard: Heard, decode: Callable[[bytes], T], msg: Msg) -> T | None:
    try:
        return decode(msg.data)
    except wire.WireError:
        heard.garbled += 1
        return None


def judge(chart: Chart, topology: Topology, heard: Heard, now: float) -> None:
    """Write down what was heard, held against the file."""
    region = RegionId(chart.region)
    _replicas(chart, topology, heard, now)
    _routers(chart, topology, heard)
    for peer in topology.peers(region):
        routers = sorted(router for other, router in heard.digests if other == peer)
        detail = f"routers heard: {', '.join(routers)}" if routers else "no digest crosses"
        chart.note("link", peer, verdict_if(bool(routers)), detail, peer=peer)
    if heard.garbled:
        detail = f"{heard.garbled} messages that nobody can read"
        chart.note("bus", "messages", Verdict.WARNING, detail)
    _labels(chart, topology, heard)
    _prefixes(chart, topology.ground, heard)


def _routers(chart: Chart, topology: Topology, heard: Heard) -> None:
    """Every router of the file, be it one process or several, whatever the file says of that."""
    region, own = RegionId(chart.region), topology.region(chart.region)
    speaking = {router for other, router in heard.digests if other == region}
    for router in own.routers:
        others = set(own.routers) - {router}
        found = [heard.digests[region, name] for name in workers_among(router, speaking - others)]
        ready = max((digest.replicas_ready for digest in found), default=0)
        detail = f"{ready} replicas ready" if found else "silent"
        verdict = verdict_if(bool(found))
        if found and not any(digest.accepting for digest in found):
            verdict, detail = Verdict.WARNING, "draining"
        elif found and own.workers > 1:
            detail = f"{len(found)} of {own.workers} workers heard, {detail}"
            verdict = verdict_if(len(found) >= own.workers, Verdict.WARNING)
        chart.note("router", router, verdict, detail)


def _replicas(chart: Chart, topology: Topology, heard: Heard, now: float) -> None:
    known = topology.region(chart.region).replicas
    states = [found[0].state for name in known if (found := heard.beats.get(name)) is not None]
    # Without any, this region computes nothing: no longer something that merely wants a look.
    not_ready = Verdict.WARNING if ReplicaState.READY in states else Verdict.BAD
    for replica in known:
        found = heard.beats.get(replica)
        if found is None:
            chart.note("heartbeat", replica, Verdict.BAD, "silent")
            continue
        beat, at = found
        ready = beat.state is ReplicaState.READY
        state = beat.state if beat.down_reason is None else f"{beat.state} ({beat.down_reason})"
        detail = f"{state}, {beat.outstanding} requests in it"
        verdict = verdict_if(ready, not_ready)
        chart.note("heartbeat", replica, verdict, detail, round((now - at) * 1000, 1), "ms old")
    for stranger in sorted(heard.beats.keys() - set(known)):
        chart.note("heartbeat", stranger, Verdict.WARNING, "it is not in the file")


def _labels(chart: Chart, topology: Topology, heard: Heard) -> None:
    """Whether those who place and those who compute know of the labels that the file gives."""
    ground = topology.ground
    if not ground.labels:
        return
    for (region, router), digest in sorted(heard.digests.items()):
        given = tuple(sorted(ground.carried_by(region)))
        said = "nothing" if digest.residency is None else labels_text(digest.residency) or "none"
        detail = f"carries {said}, the file says {labels_text(given) or 'none'}"
        chart.note("labels", f"{region}/{router}", verdict_if(digest.residency == given), detail)
    carried = ground.carried_by(RegionId(chart.region))
    for replica, (beat, _) in sorted(heard.beats.items()):
        claimed = set(beat.residency or ()) - carried
        if claimed:
            detail = f"claims {labels_text(claimed)}, which its region does not carry: not believed"
            chart.note("labels", replica, Verdict.WARNING, detail)


def _prefixes(chart: Chart, ground: Ground, heard: Heard) -> None:
    """Of a confined region, prefixes are heard by its kind alone."""
    home = RegionId(chart.region)
    for speaker, labels in ground.confined:
        if speaker == home:
            continue
        may, did = ground.may_send(speaker, home), speaker in heard.tries
        about = f"prefixes of {speaker}"
        if not may:
            detail = "heard here, and must not be" if did else "not heard here"
            chart.note("residency", about, verdict_if(not did), detail)
        elif did:
            detail = f"heard here, as {labels_text(labels)} allows"
            chart.note("residency", about, Verdict.OK, detail)
