"""Attempts: what they occupy, their receipts, and how they are left."""

import pytest

from mesh.core.lifecycle import attempts
from mesh.core.model import effects as fx
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.record import RequestRecord, RequestState
from schemas.decision import Placement
from schemas.ids import ReplicaId
from tests.mesh.core.build import EU, US, beat, digest, foreign, request, state

LOCAL = PlacementResult(Placement.LOCAL, "a", "because", "prefix-tree")
PEER = PlacementResult(Placement.PEER, "eu", "because", "prefix-tree")
A = ReplicaId("a")


class Bench:
    """Attempts over one replica and one peer."""

    def __init__(self):
        self.state = state(policy="skywalker")
        self.replicas, self.peers = self.state.replicas, self.state.peers
        self.effects, self.placer = self.state.effects, self.state.placer
        self.replicas.see(beat("a"), 0.0)
        self.peers.see(digest("eu"), 0.0)

    @property
    def on_the_way(self):
        sent = self.replicas.get(A).on_the_way
        return len(sent), sent.waiting


@pytest.fixture
def bench():
    return Bench()


def test_a_local_attempt_occupies_a_replica_until_it_is_left(bench):
    record = RequestRecord(request(1))
    attempts.begin(bench.state, record, LOCAL, 1.0)
    receipt, dispatch = bench.effects
    assert dispatch == fx.Dispatch(1, 1, A, record.handoff, None)
    assert (receipt.decision.replica, receipt.decision.peer, receipt.decision.hops) == (
        "a",
        None,
        0,
    )
    assert bench.on_the_way == (1, 1)
    attempts.began(bench.state, record, 0.0, shows_ttft=True)
    assert bench.on_the_way == (1, 0)
    attempts.leave(bench.state, record, 0.0)
    record.end()
    assert bench.on_the_way == (0, 0)


def test_a_forwarded_attempt_counts_against_the_peer(bench):
    record = RequestRecord(request(1))
    attempts.begin(bench.state, record, PEER, 1.0)
    receipt, forward = bench.effects
    assert forward == fx.Forward(1, 1, EU)
    assert (receipt.decision.replica, receipt.decision.peer, receipt.decision.hops) == (None, EU, 1)
    assert list(bench.peers.get(EU).forwarded_at) == [1.0]
    attempts.began(bench.state, record, 0.0, shows_ttft=True)
    attempts.leave(bench.state, record, 0.0)
    assert bench.on_the_way == (0, 0)


def test_receipts_number_the_attempts_and_add_up_the_waiting(bench):
    record = RequestRecord(request(1))
    for begins_at in (1.0, 3.0):
        record.hold(begins_at - 0.5)
        attempts.begin(bench.state, record, LOCAL, begins_at)
    decisions = [effect.decision for effect in bench.effects if isinstance(effect, fx.Decided)]
    assert [(one.attempt, one.held_s) for one in decisions] == [(1, 0.5), (2, 1.0)]


def test_a_peers_request_is_answered_past_this_router(bench):
    record = RequestRecord(foreign(1, deadline=9.0))
    attempts.begin(bench.state, record, LOCAL, 1.0)
    assert record.state is RequestState.ENDED
    receipt, dispatch = bench.effects
    assert dispatch == fx.Dispatch(1, 1, A, 1, "inbox-1")
    assert (receipt.decision.hops, receipt.decision.replica) == (1, "a")
    assert [tuple(answer) for answer in bench.replicas.get(A).relayed] == [("inbox-1", 9.0)]


def test_a_place_that_did_not_take_it_rests(bench):
    record = RequestRecord(request(1))
    attempts.begin(bench.state, record, LOCAL, 1.0)
    attempts.rest(bench.state, record, 1.0)
    assert bench.replicas.get(A).refused_at == 1.0
    record.hold(1.0)
    attempts.begin(bench.state, record, PEER, 2.0)
    record.replica = ReplicaId("eu-0")
    attempts.rest(bench.state, record, 2.0)
    assert bench.peers.get(EU).refused_at == 2.0


@pytest.mark.parametrize(
    ("place", "replica", "expected"),
    [
        (LOCAL, A, fx.CancelAttempt(1, 1, US, A)),
        (PEER, None, fx.CancelAttempt(1, 1, EU, None)),
        (PEER, ReplicaId("eu-0"), fx.CancelAttempt(1, 1, EU, ReplicaId("eu-0"))),
    ],
)
def test_a_cancel_goes_to_the_replica_or_peer(bench, place, replica, expected):
    record = RequestRecord(request(1))
    attempts.begin(bench.state, record, place, 1.0)
    record.replica = replica
    attempts.cancel(bench.state, record)
    assert bench.effects[-1] == expected


@pytest.mark.parametrize(("place", "reason"), [(LOCAL, "a"), (PEER, "eu")])
def test_a_prompt_is_remembered_where_it_went(bench, place, reason):
    attempts.begin(bench.state, RequestRecord(request(1, "ABCD")), place, 0.0)
    bench.replicas.see(beat("b"), 0.0)
    bench.peers.see(digest("ap"), 0.0)
    bench.peers.see(digest("eu", 2, free=3), 0.0)
    if place is PEER:
        for name in "ab":
            bench.replicas.see(beat(name, 2, pending=1), 0.0)
    chosen = bench.placer.place(request(2, "ABCX"), (), 0.0)
    assert (chosen.target, chosen.reason) == (reason, "holds 75% of the prompt")
