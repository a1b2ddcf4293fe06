"""Region-local: SkyWalker's rule at home, and nothing beyond."""

from random import Random

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.policies.base import Target
from mesh.core.policies.skywalker import RegionLocal, SkyWalkerOptions
from schemas.decision import CandidateKind, Placement
from tests.mesh.core.build import beat, core, digest, foreign, request, spot

PEER = Target("eu", 0, CandidateKind.PEER, 0.08)


def test_a_peer_is_never_chosen_and_the_request_waits():
    policy = RegionLocal(Random(1), 100, SkyWalkerOptions())
    policy.placed(request(1, "ABCD"), spot("eu", CandidateKind.PEER), 0.0)
    choice = policy.choose(request(1, "ABCD"), [PEER], 0.0)
    assert (choice.target, choice.reason) == (
        None,
        "no replica of this region is free, and nothing leaves it",
    )


def test_inside_the_region_the_longest_prefix_wins():
    policy = RegionLocal(Random(1), 100, SkyWalkerOptions())
    policy.placed(request(1, "ABCD"), spot("a"), 0.0)
    targets = [Target("a", 5), Target("b", 0), PEER]
    assert policy.choose(request(1, "ABCZ"), targets, 0.0).name == "a"
    assert policy.choose(request(1, "ZZZZ"), targets, 0.0).name == "b"


def decisions(effects):
    return [it.decision.placement for it in effects if isinstance(it, fx.Decided)]


def test_a_router_holds_though_a_peer_is_free_until_its_own_replica_is():
    router = core(policy="region-local")
    router.handle(ev.HeartbeatSeen(beat("a", pending=1)), 0.0)
    router.handle(ev.DigestSeen(digest("eu", free=4)), 0.0)
    held = router.handle(ev.RequestArrived(request(1)), 0.0)
    assert decisions(held) == [Placement.HOLD]
    assert decisions(router.handle(ev.DigestSeen(digest("eu", 2, free=4)), 0.05)) == []
    assert decisions(router.handle(ev.HeartbeatSeen(beat("a", 2)), 0.1)) == [Placement.LOCAL]


def test_what_a_peer_of_another_policy_forwards_is_served():
    router = core(policy="region-local")
    router.handle(ev.HeartbeatSeen(beat("a")), 0.0)
    placed = router.handle(ev.RequestArrived(foreign(1)), 0.0)
    assert not any(isinstance(effect, fx.RefusePeer) for effect in placed)
