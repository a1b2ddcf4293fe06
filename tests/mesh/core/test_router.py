"""RouterCore, where a story would hide the detail: receipts, digests, models, odd events.

What becomes of requests is told in tests/scenarios; what always holds in
test_router_properties.py.
"""

import pytest

from mesh.core.membership.known_models import KEPT_S
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.gossip import TrieDelta
from schemas.http import Fault
from schemas.ids import ModelId, ReplicaId
from schemas.prompt_writing import Billing, PromptWriting
from schemas.state import ModelCapacity
from tests.mesh.core.build import EU, MODEL, US, beat, core, digest, foreign, request

NOW = 10.0


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def fed(router, *events, now=NOW):
    return [effect for event in events for effect in router.handle(event, now)]


def test_a_receipt_has_the_candidates_and_the_outcome():
    router = core(policy="least-load")
    fed(router, ev.HeartbeatSeen(beat("a")), ev.HeartbeatSeen(beat("b", pending=2)))
    (decided,) = of(fx.Decided, fed(router, ev.RequestArrived(request(1))))
    receipt = decided.decision
    assert (receipt.request, receipt.region, receipt.policy) == ("request-1", US, "least-load")
    assert (receipt.placement, receipt.replica, receipt.attempt) == (Placement.LOCAL, "a", 1)
    assert [(one.name, one.why) for one in receipt.candidates] == [("a", None), ("b", "pending")]
    assert receipt.considered == 2


def test_a_held_request_has_a_receipt_for_waiting_and_one_for_going():
    router = core()
    (held,) = of(fx.Decided, fed(router, ev.RequestArrived(request(1, arrived_at=NOW))))
    assert (held.decision.placement, held.decision.replica) == (Placement.HOLD, None)
    (went,) = of(fx.Decided, fed(router, ev.HeartbeatSeen(beat("a")), now=NOW + 2.5))
    assert (went.decision.placement, went.decision.held_s) == (Placement.LOCAL, 2.5)


def test_a_forwarded_request_counts_its_hop():
    router = core()
    fed(router, ev.DigestSeen(digest("eu")))
    (decided,) = of(fx.Decided, fed(router, ev.RequestArrived(request(1))))
    assert (decided.decision.peer, decided.decision.hops) == (EU, 1)


def test_a_peers_request_has_no_record_once_it_is_placed():
    router = core()
    fed(router, ev.HeartbeatSeen(beat("a")))
    effects = fed(router, ev.RequestArrived(foreign(1)))
    assert [type(effect) for effect in effects] == [fx.Decided, fx.Dispatch]
    assert router.inflight == {}
    assert fed(router, ev.ClientGone(1), ev.AnswerEnded(1, 1)) == []


def test_policies_learn_of_a_new_request_once_its_replica_has_it():
    router = core(policy="mesh")
    fed(router, ev.SiblingSeen(TrieDelta(US, "r2", 1, 0, (), ())), ev.HeartbeatSeen(beat("a")))
    placed = fed(router, ev.RequestArrived(request(1, "ABCD")))
    assert [type(effect) for effect in placed] == [fx.Decided, fx.Dispatch]
    (told,) = router.finish()
    assert told.delta.gained == request(1, "ABCD").prompt.hashes
    assert router.finish() == []
    fed(router, ev.RequestArrived(request(2, "EFGH")))
    told, *_ = of(fx.PublishToSiblings, fed(router, ev.ClientGone(2)))
    assert told.delta.gained == request(2, "EFGH").prompt.hashes


@pytest.mark.parametrize("start_s", [None, 0.4])
@pytest.mark.parametrize("shows_ttft", [True, False])
def test_an_answer_that_comes_at_once_teaches_a_speed_and_no_residence(start_s, shows_ttft):
    router = core(policy="mesh")
    fed(router, ev.HeartbeatSeen(beat("a")), ev.RequestArrived(request(1)))
    if start_s is not None:
        fed(router, ev.AnswerStarted(1, 1, shows_ttft), now=NOW + start_s)
    ended = ev.AnswerEnded(1, 1, Served(100, 0, 16), shows_ttft)
    fed(router, ended, ev.AnswerStarted(1, 1, shows_ttft), now=NOW + 2.0)
    [policy] = router.state.placer._local_policies
    speeds = policy._models[MODEL]
    taught = speeds.replicas.get("a")
    if not shows_ttft:
        assert taught is None
        return
    assert (taught.fit.w, taught.fit.y) == (1.0, pytest.approx(start_s or 2.0))
    assert taught.slot_s == (None if start_s is None else pytest.approx(2.0 - start_s))
    [ended] = router.replicas.slow._places[ReplicaId("a"), MODEL].ended
    pace_s = None if start_s is None else pytest.approx((2.0 - start_s) / 15)
    assert ended.answer().token_s == pace_s


def test_affinity_survives_until_the_agent_restarts():
    router = core(policy="prefix-tree")
    fed(router, ev.HeartbeatSeen(beat("a")), ev.HeartbeatSeen(beat("b")))
    (first,) = of(fx.Dispatch, fed(router, ev.RequestArrived(request(1, "ABCD"))))
    (again,) = of(fx.Decided, fed(router, ev.RequestArrived(request(2, "ABCE"))))
    assert again.decision.replica == first.replica
    assert again.decision.candidates[0].matched_tokens > 0
    fed(router, ev.AnswerEnded(1, 1), ev.AnswerEnded(2, 1))
    fed(router, ev.HeartbeatSeen(beat(first.replica, epoch=2)))
    (after,) = of(fx.Decided, fed(router, ev.RequestArrived(request(3, "ABCF"))))
    assert all(one.matched_tokens == 0 for one in after.decision.candidates)


@pytest.mark.parametrize(
    ("event", "published"),
    [
        (ev.HeartbeatSeen(beat("a", 2, running=5)), False),
        (ev.HeartbeatSeen(beat("a", 2, full=True)), True),
        (ev.HeartbeatSeen(beat("b")), True),
        (ev.Drain(), True),
        (ev.RttMeasured(EU, 0.1), False),
    ],
)
def test_changes_that_matter_to_peers_are_published_at_once(event, published):
    router = core()
    fed(router, ev.HeartbeatSeen(beat("a")), ev.Tick())
    told = of(fx.PublishDigest, fed(router, event, now=NOW + 0.02))
    assert len(told) == published


def test_the_end_of_a_drain_ends_what_runs_and_what_waits():
    router = core()
    fed(router, ev.HeartbeatSeen(beat("a")), ev.RequestArrived(request(1)))
    fed(router, ev.AnswerStarted(1, 1), ev.RequestArrived(request(2, model=ModelId("none"))))
    fed(router, ev.Drain())
    ended = fed(router, ev.DrainOver())
    assert of(fx.CancelAttempt, ended) == [fx.CancelAttempt(1, 1, US, ReplicaId("a"))]
    assert [(told.key, told.fault) for told in of(fx.Fail, ended)] == [
        (1, Fault.DRAINING),
        (2, Fault.DRAINING),
    ]
    assert router.inflight == {}
    assert fed(router, ev.DrainOver()) == []


def test_a_quiet_router_publishes_every_tenth_of_a_second():
    router = core()
    told = [of(fx.PublishDigest, fed(router, ev.Tick(), now=NOW + n / 20)) for n in range(21)]
    assert 7 <= sum(map(len, told)) <= 11


def test_the_models_of_all_replicas_and_peers_are_known():
    router = core()
    small, far = ModelId("small"), ModelId("far")
    fed(router, ev.HeartbeatSeen(beat("a", models=(small, ModelId("m")))))
    fed(router, ev.DigestSeen(digest("eu", models={far: ModelCapacity(ready=1, free=0)})))
    assert router.models() == ("far", "m", "small")
    fed(router, ev.Tick(), now=NOW + 3.0)  # no replica is left, but they may come back
    assert router.models() == ()
    assert router.known_models() == ("far", "m", "small")
    fed(router, ev.Tick(), now=NOW + KEPT_S + 1.0)
    assert router.known_models() == ()


def test_only_a_peer_can_say_where_it_placed_a_request():
    router = core()
    fed(router, ev.HeartbeatSeen(beat("a")), ev.RequestArrived(request(1)))
    fed(router, ev.PlacedByPeer(1, 1, ReplicaId("elsewhere")))
    assert fed(router, ev.ClientGone(1)) == [fx.CancelAttempt(1, 1, US, ReplicaId("a"))]


def test_a_refusal_counts_against_the_place_it_was_sent_to():
    router = core()
    fed(router, ev.DigestSeen(digest("eu")), ev.RequestArrived(request(1)))
    fed(router, ev.AttemptRefused(1, 1, Refusal.FULL, "mars", ReplicaId("x"), -1, -1))
    assert [region for region, _ in router.peers] == [EU]
    assert router.peers.get(EU).refused_at == NOW


def test_a_refusal_after_the_first_byte_is_no_refusal():
    router = core()
    fed(router, ev.HeartbeatSeen(beat("a")), ev.RequestArrived(request(1)))
    fed(router, ev.AnswerStarted(1, 1))
    assert fed(router, ev.AttemptRefused(1, 1, Refusal.FULL, US, ReplicaId("a"), 1, 8)) == []
    assert router.inflight[1].has_started


def test_effects_are_given_out_once():
    router = core()
    first = router.handle(ev.Tick(), NOW)
    assert first and router.handle(ev.Tick(), NOW) == []
    assert first


def test_arrivals_are_published_to_peers_as_a_rate():
    router = core()
    for number in range(100):
        fed(router, ev.RequestArrived(request(number)), now=NOW + number / 10)
        fed(router, ev.Tick(), now=NOW + number / 10)
    (told,) = of(fx.PublishDigest, fed(router, ev.Tick(), now=NOW + 10.5))
    assert 5.0 < told.digest.requests_per_s < 11.0


def test_a_request_that_a_peer_holds_for_ever_is_placed_elsewhere():
    router, now = core(hold_s_max=1.0), NOW
    fed(router, ev.DigestSeen(digest("eu")))
    fed(router, ev.RequestArrived(request(1, arrived_at=NOW)))
    cancelled = []
    while not cancelled and now < NOW + 60.0:
        now += 0.1
        told = ev.DigestSeen(digest("eu", round(now * 10))), ev.AttemptProgressed(1, 1), ev.Tick()
        cancelled = of(fx.CancelAttempt, fed(router, *told, now=now))
    assert now == pytest.approx(NOW + 3.1), "its hold, its reply, and a tick"
    assert router.inflight == {}, "no other replica serves it"

    router, now = core(hold_s_max=1.0), NOW
    fed(router, ev.DigestSeen(digest("eu")), ev.DigestSeen(digest("ap", free=0, ready=0)))
    fed(router, ev.RequestArrived(request(1, arrived_at=NOW)))
    fed(router, ev.AttemptProgressed(1, 1), ev.DigestSeen(digest("eu", 2)), now=NOW + 3.0)
    fed(router, ev.DigestSeen(digest("ap", 2)), now=NOW + 3.0)
    again = fed(router, ev.Tick(), now=NOW + 3.1)
    assert [effect.peer for effect in of(fx.Forward, again)] == ["ap"]


def test_the_limit_of_a_hold_does_not_begin_anew_with_each_one():
    router, refused, now = core(hold_s_max=1.0), 0, NOW
    fed(router, ev.RequestArrived(request(1, arrived_at=NOW)))
    while now < NOW + 10.0:
        now += 0.1
        seen = fed(router, ev.HeartbeatSeen(beat("a", round(now * 10))), now=now)
        for sent in of(fx.Dispatch, seen):
            full = ev.AttemptRefused(1, sent.attempt, Refusal.FULL, US, "a", 1, 8)
            fed(router, full, now=now)
            refused += 1
        if of(fx.Fail, fed(router, ev.Tick(), now=now)):
            break
    assert refused > 5
    assert now == pytest.approx(NOW + 1.0, abs=0.15)


def test_prompts_are_written_as_the_engines_of_their_model_do():
    router, other = core(), ModelId("other")
    assert router.prompt_writing(MODEL) == PromptWriting()
    fed(router, ev.HeartbeatSeen(beat("a", engine="llamacpp")))
    fed(router, ev.HeartbeatSeen(beat("b", models=(other,), system_first=True)))
    assert router.prompt_writing(MODEL) == PromptWriting(Billing.MASKED)
    assert router.prompt_writing(other) == PromptWriting(Billing.LEFT_OUT, system_first=True)
    fed(router, ev.HeartbeatSeen(beat("a", 2, engine="llamacpp", models=(MODEL, other))))
    assert router.prompt_writing(other) == PromptWriting(Billing.MASKED, system_first=None)
