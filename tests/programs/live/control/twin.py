"""What regions send to each other, counted in the twin: messages by kind, and their bytes.

The same routers as live ones; a message is as long as its payload and what nats-servers put around
it on a leaf link (`LMSG subject reply size`). What the servers send to each other by themselves is
not in it, nor is what TCP adds. One router a region.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.network import RegionPair
from mesh.sim.rtt import RttTable
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.workloads import make
from mesh.sim.world import SETTLE_S, World
from schemas import exchange, gossip, subjects, wire
from schemas.ids import RegionId
from schemas.state import encode_state
from tests.programs.live.control.live import RTT_MS, Scene

PROFILE = "a100-mistral-7b"
FRAME_BYTES = len("LMSG   123\r\n\r\n")
PING_BYTES = 8
INBOX = "_INBOX.r00.r1.ping-r01"  # as long as the others
# Headers of a message that a stream repeats: who claimed it, which stream, numbers, the time.
REPUBLISHED_BYTES = 205
DIGEST, PING, ALIVE, LEASE, GOSSIP, WORK = "digest", "ping", "alive", "lease", "gossip", "work"
CONTROL = (DIGEST, PING, ALIVE, LEASE, GOSSIP)
PEOPLE = 10  # in each region, taking turns


@dataclass(slots=True)
class LinkTraffic:
    """Over one link in one direction, by kind."""

    messages: Counter[str]
    payload_bytes: Counter[str]


def traffic_per_s(scene: Scene, window_s: float) -> dict[RegionPair, LinkTraffic]:
    """Play the scene for so long after it has settled. Rates a second, of each link's direction."""
    names = [RegionId(name) for name in scene.fleet]
    workload = _workload(scene, names, window_s)
    world = World(
        workload,
        WorldConfig(
            regions={RegionId(name): [PROFILE] * n for name, n in scene.fleet.items()},
            rtt=RttTable({(a, b): RTT_MS for a in names for b in names if a < b}),
            settings=RouterSettings(),
            until_s=window_s,
        ),
    )
    traffic: dict[RegionPair, LinkTraffic] = {}

    def count(link: RegionPair, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if world.queue.now < SETTLE_S:
            return
        found = traffic.setdefault(link, LinkTraffic(Counter(), Counter()))
        kind, size = _size(link, call.__name__, args)
        found.messages[kind] += 1
        found.payload_bytes[kind] += size

    world.network.on_send = count
    world.run()
    for found in traffic.values():
        for counted in (found.messages, found.payload_bytes):
            for kind in counted:
                counted[kind] /= window_s  # type: ignore[assignment]
    return traffic


def control_bytes(traffic: LinkTraffic) -> float:
    """All but the work."""
    return sum(traffic.payload_bytes[kind] for kind in CONTROL)


def control_messages(traffic: LinkTraffic) -> float:
    """All but the work."""
    return sum(traffic.messages[kind] for kind in CONTROL)


def _workload(scene: Scene, names: list[RegionId], window_s: float) -> Workload:
    if scene.requests_per_s:
        return make(
            "chat",
            clients=dict.fromkeys(names, PEOPLE),
            seed=0,
            duration_s=window_s,
            rate_per_s=scene.requests_per_s,
        )
    last = RequestNode(
        prompt=(Segment(1, 1),), answer=Segment(2, 1)
    )  # no request is sent until all is over
    return Workload(name="idle", arrivals=(Arrival(window_s, names[0], last),))


def _size(link: RegionPair, call: str, args: tuple[Any, ...]) -> tuple[str, int]:
    """The kind of a message, and its bytes on the link."""
    source, to = link
    if call == "receive_digest":
        return DIGEST, _framed(subjects.digest(source), len(encode_state(args[0])))
    if call == "_pong":
        return PING, _framed(subjects.ping(to) + INBOX, PING_BYTES)
    if call == "_measured":
        return PING, _framed(INBOX, PING_BYTES)
    if call == "_receive_keepalive":
        sign = wire.encode(exchange.Alive(10**12, (source,), (1,)))
        return ALIVE, _framed(subjects.alive(source, "r1"), len(sign))
    event = args[0] if args else None
    if isinstance(event, ev.LeaseHeard):
        size = len(encode_state(event.lease)) + REPUBLISHED_BYTES
        return LEASE, _framed(subjects.leased(source), size)
    if isinstance(event, ev.TrieSeen):
        return GOSSIP, _framed(subjects.trie(source), gossip.size_bytes(event.delta))
    if isinstance(event, ev.TrieAsked):
        return GOSSIP, _framed(subjects.snapshot(to, source) + INBOX, gossip.size_bytes(event.ask))
    if isinstance(event, ev.TriePartSeen):
        return GOSSIP, _framed(INBOX, gossip.size_bytes(event.part))
    return WORK, 0


def _framed(subject: str, payload_bytes: int) -> int:
    return FRAME_BYTES + len(subject) + payload_bytes
