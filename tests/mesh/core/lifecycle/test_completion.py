"""Ends of requests, seen from outside: what is said, and that nothing of them is left."""

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from tests.mesh.core import build


def test_a_request_that_fails_leaves_the_queue_with_its_reason():
    core = build.core()
    core.handle(ev.RequestArrived(build.request(1, arrived_at=10.0, deadline=11.0)), 10.0)
    assert len(core.held) == len(core.inflight) == 1
    effects = core.handle(ev.Tick(), 11.0)
    [fail] = [effect for effect in effects if isinstance(effect, fx.Fail)]
    assert (fail.key, fail.fault) == (1, Fault.DEADLINE)
    assert len(core.held) == len(core.inflight) == 0


def test_a_request_that_is_shed_has_a_receipt_and_a_time_to_come_back():
    core = build.core(hold_max=1)
    core.handle(ev.RequestArrived(build.request(1, arrived_at=10.0)), 10.0)
    effects = core.handle(ev.RequestArrived(build.request(2, arrived_at=10.1)), 10.1)
    [decided] = [effect for effect in effects if isinstance(effect, fx.Decided)]
    [fail] = [effect for effect in effects if isinstance(effect, fx.Fail)]
    assert decided.decision.placement is Placement.SHED
    assert "the hold queue is full" in decided.decision.reason
    assert (fail.key, fail.fault) == (2, Fault.SATURATED) and fail.retry_after_s is not None
    assert list(core.inflight) == [1]


def test_a_request_that_ends_during_an_attempt_gives_its_room_back():
    core = build.core(policy="least-load")
    core.handle(ev.HeartbeatSeen(build.beat("us-0")), 10.0)
    core.handle(ev.RequestArrived(build.request(1, arrived_at=10.0)), 10.0)
    [replica] = core.replicas
    assert replica.load == 1
    core.handle(ev.ClientGone(1), 10.1)
    assert replica.load == 0 and core.inflight == {}


def test_a_peers_request_that_fails_is_refused_with_this_regions_state():
    core = build.core(policy="mesh")
    waiting = {"prefill_queued_tokens": 20_000, "pending": 4, "running": 8}
    core.handle(ev.HeartbeatSeen(build.beat("us-0", **waiting)), 10.0)
    effects = core.handle(ev.RequestArrived(build.foreign(1, arrived_at=10.0, deadline=11.0)), 10.0)
    assert fx.TellHeld("inbox-1", 1) in effects
    effects = core.handle(ev.Tick(), 11.0)
    [refused] = [effect for effect in effects if isinstance(effect, fx.RefusePeer)]
    assert (refused.key, refused.answer_inbox) == (1, "inbox-1")
    assert refused.reason is Refusal.NO_REPLICA
    assert (refused.fresh.region, refused.fresh.replicas_ready) == ("us", 1)
    assert not [effect for effect in effects if isinstance(effect, fx.Fail)]
    assert len(core.held) == len(core.inflight) == 0
    assert not [e for e in core.handle(ev.Tick(), 13.0) if isinstance(e, fx.TellHeld)]
