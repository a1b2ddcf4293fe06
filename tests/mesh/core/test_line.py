"""The line at work: whoever can go goes, and nobody blocks those who could."""

from mesh.core.events import HeartbeatSeen, RequestArrived, Tick
from schemas.decision import Placement
from schemas.exchange import Priority
from tests.mesh.core.build import beat, core, request

BUSY = {"pending": 2, "running": 8, "prefill_queued_tokens": 100, "prefill_s_per_token": 1e-6}


def placed(effects):
    return [
        effect.decision.request
        for effect in effects
        if hasattr(effect, "decision") and effect.decision.placement is Placement.LOCAL
    ]


def test_classes_with_policies_of_their_own_do_not_block_each_other():
    """A busy replica is nothing for least-load and something for mesh, which judges load."""
    router = core(policy="least-load", policy_by_priority=((Priority.LOW, "mesh"),))
    router.handle(HeartbeatSeen(beat("a", **BUSY)), 0.0)
    assert placed(router.handle(RequestArrived(request(1)), 0.0)) == []
    assert placed(router.handle(RequestArrived(request(2, priority=Priority.LOW)), 0.0)) == []
    assert placed(router.handle(Tick(), 0.1)) == ["request-2"]
    assert [held.key for held in router.held] == [1]


def test_news_of_a_busy_replica_reach_the_class_that_would_use_it():
    router = core(policy="least-load", policy_by_priority=((Priority.LOW, "mesh"),))
    router.handle(RequestArrived(request(1, priority=Priority.LOW)), 0.0)
    assert placed(router.handle(HeartbeatSeen(beat("a", **BUSY)), 0.1)) == ["request-1"]


def test_those_who_avoid_a_place_leave_it_to_others():
    router = core(policy="least-load")
    for key in (1, 2):
        router.handle(RequestArrived(request(key)), 0.0)
    router.inflight[1].avoid = frozenset({"a"})
    assert placed(router.handle(HeartbeatSeen(beat("a")), 0.1)) == ["request-2"]
    assert [held.key for held in router.held] == [1]
