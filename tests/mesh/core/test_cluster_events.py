"""The fleet's part of a router, seen from outside: what heartbeats, digests and time change."""

from mesh.core.gossip.siblings import SWEEP_S, UNKNOWN_S
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from schemas.gossip import TrieDelta
from schemas.ids import ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core import build


def told(effects):
    return [effect.digest for effect in effects if isinstance(effect, fx.PublishDigest)]


def test_a_new_replica_is_published_to_peers_at_once():
    core = build.core()
    [digest] = told(core.handle(ev.HeartbeatSeen(build.beat("us-0")), 10.0))
    assert (digest.replicas_ready, digest.replicas_free, digest.accepting) == (1, 1, True)


def test_draining_is_published_at_once_and_shown():
    core = build.core()
    [digest] = told(core.handle(ev.Drain(), 10.0))
    assert core.draining and not digest.accepting


def test_names_of_models_outlive_their_replicas():
    core = build.core()
    core.handle(ev.HeartbeatSeen(build.beat("us-0")), 10.0)
    core.handle(ev.HeartbeatSeen(build.beat("us-0", 2, state=ReplicaState.GONE)), 10.1)
    core.handle(ev.Tick(), 11.0)
    assert (core.models(), core.known_models()) == ((), (build.MODEL,))
    core.handle(ev.Tick(), 200.0)
    assert core.known_models() == ()


def test_a_peer_is_notified_of_a_lost_replica_that_answered_to_it():
    core = build.core()
    core.handle(ev.HeartbeatSeen(build.beat("us-0")), 10.0)
    core.handle(ev.RequestArrived(build.foreign(7, arrived_at=10.0)), 10.0)
    lost = [e for e in core.handle(ev.Tick(), 12.5) if isinstance(e, fx.TellLost)]
    assert lost == [fx.TellLost("inbox-7", ReplicaId("us-0"))]


def test_a_digest_with_room_lets_those_held_go():
    core = build.core(policy="skywalker")
    core.handle(ev.RequestArrived(build.request(1, arrived_at=10.0)), 10.0)
    assert len(core.held) == 1
    effects = core.handle(ev.DigestSeen(build.digest("eu", free=1)), 10.1)
    assert [e.peer for e in effects if isinstance(e, fx.Forward)] == ["eu"]


def test_a_siblings_unknown_replica_is_dropped():
    core, now = build.core(policy="mesh", peers=(build.EU,)), 10.0
    while core.gossip.siblings.sync.warm_at is None:
        core.handle(ev.Tick(), now := now + 0.05)
    core.handle(ev.SiblingSeen(TrieDelta("us", "r2", 1, 0, (), (), is_cold=0)), now)
    for seq, replica in enumerate(("us-0", "eu/eu-0"), 1):
        core.handle(ev.HeartbeatSeen(build.beat("us-0", seq)), now)
        core.handle(ev.SiblingSeen(TrieDelta("us", "r2", 1, seq, (1, 2), (), replica)), now)
    [index, *_] = core.gossip.siblings.indexes
    assert set(index.owners) == {"us-0", "eu/eu-0"}
    for _ in range(int(UNKNOWN_S / SWEEP_S) + 2):
        core.handle(ev.Tick(), now := now + SWEEP_S)
    assert index.owners == ("us-0",), "which is only lost, and may come back with its cache"
