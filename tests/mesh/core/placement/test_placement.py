"""Placement: local before peers, one hop, and a receipt of everyone considered."""

from random import Random

import pytest

from mesh.core.model.request import Served
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import Placer
from mesh.core.placement.receipt import CANDIDATES_MAX
from mesh.core.prefixes.prefix_index import TTL_S
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import CandidateKind, Placement
from schemas.exchange import Priority
from schemas.ids import ModelId, ReplicaId
from schemas.settings import BLIND, Pushing, PushingKind
from tests.mesh.core.build import EU, ROUTER, US, beat, digest, foreign, prompt, request, spot


class Fleet:
    """The tables and a placer over them."""

    def __init__(self, home=US, **settings):
        self.settings = RouterSettings(**settings)
        self.replicas = ReplicaTable(ROUTER, self.settings)
        self.peers = PeerTable(self.settings, US)
        self.placer = Placer(self.settings, self.replicas, self.peers, Random(1), None, home)

    def place(self, asked=None, avoid=()):
        return self.placer.place(asked or request(1), avoid, 0.0)


@pytest.fixture
def fleet():
    fleet = Fleet(policy="least-load")
    fleet.peers.see(digest("eu"), 0.0)
    fleet.peers.measured(EU, 0.08)
    return fleet


def test_local_before_peers(fleet):
    fleet.replicas.see(beat("a"), 0.0)
    place = fleet.place()
    assert (place.placement, place.target) == (Placement.LOCAL, "a")
    assert [one.kind for one in place.candidates] == [CandidateKind.REPLICA]


@pytest.mark.parametrize("fields", [{"pending": 1}, {"full": True}, {"models": ("other",)}])
def test_a_peer_when_no_local_replica_is_free(fleet, fields):
    fleet.replicas.see(beat("a", **fields), 0.0)
    place = fleet.place()
    assert (place.placement, place.target) == (Placement.PEER, "eu")
    assert place.candidates[0].terms == {"rtt_s": 0.08}


def test_one_hop_only(fleet):
    place = fleet.place(foreign(1))
    assert (place.placement, place.target) == (Placement.HOLD, None)


def test_places_that_failed_it_are_not_asked_again(fleet):
    fleet.replicas.see(beat("a"), 0.0)
    assert fleet.place(avoid={"a"}).target == "eu"
    held = fleet.place(avoid={"a", "eu"})
    assert held.placement is Placement.HOLD
    assert {one.name: one.why for one in held.candidates} == dict.fromkeys(
        ("a", "eu"), "it refused or failed before"
    )


def test_the_receipt_names_everyone_with_the_reason_and_the_best_first(fleet):
    fleet.replicas.see(beat("full", full=True), 0.0)
    fleet.replicas.see(beat("busy", running=5, outstanding=5), 0.0)
    fleet.replicas.see(beat("idle", pending=None), 0.0)
    fleet.replicas.see(beat("foreign", models=(ModelId("other"),)), 0.0)
    place = fleet.place()
    told = [(one.name, one.available, one.why, one.pending) for one in place.candidates]
    assert told == [
        ("idle", True, None, None),
        ("busy", True, None, 0),
        ("full", False, "full", 0),
    ]
    assert place.reason == "least load: 0 requests"


def test_peers_are_compared_by_their_queue_and_what_was_sent_there(fleet):
    fleet.peers.see(digest("ap", free=3, queue=1), 0.0)
    assert fleet.place().target == "eu"
    fleet.peers.see(digest("eu", 2, free=9), 0.0)
    fleet.peers.forwarded(EU, 0.0)
    fleet.peers.forwarded(EU, 0.0)
    assert fleet.place().target == "ap"


def test_each_layer_has_its_own_memory():
    fleet = Fleet(policy="prefix-tree")
    fleet.peers.see(digest("eu"), 0.0)
    fleet.peers.see(digest("ap"), 0.0)
    fleet.replicas.see(beat("a"), 0.0)
    fleet.replicas.see(beat("b"), 0.0)
    fleet.placer.placed(request(1, "ABCD"), spot("b"), 0.0)
    fleet.placer.placed(request(1, "ABCD"), spot(EU, CandidateKind.PEER), 0.0)
    local = fleet.place(request(2, "ABCX"))
    assert (local.target, local.reason) == ("b", "holds 75% of the prompt")
    assert local.candidates[0].matched_tokens == 3 * 64
    for name in "ab":
        fleet.replicas.see(beat(name, 2, pending=1), 0.0)
    assert fleet.place(request(3, "ABCX")).target == "eu"


def test_a_replica_that_came_back_empty_holds_nothing():
    fleet = Fleet(policy="prefix-tree")
    fleet.replicas.see(beat("a"), 0.0)
    fleet.placer.placed(request(1, "ABCD"), spot("a"), 0.0)
    fleet.placer.forget_replica(ReplicaId("a"))
    assert fleet.place(request(2, "ABCD")).candidates[0].matched_tokens == 0


def test_placing_changes_nothing(fleet):
    fleet.replicas.see(beat("a", running=7), 0.0)
    assert [fleet.place().target for _ in range(3)] == ["a"] * 3
    assert fleet.replicas.get(ReplicaId("a")).load == 7


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown policy 'fastest'; there are round-robin, least-"):
        Fleet(policy="fastest")


def test_a_receipt_lists_the_first_and_counts_all(fleet):
    for number in range(40):
        fleet.replicas.see(beat(f"r{number:02}", pending=number % 2, running=number), 0.0)
    place = fleet.place()
    assert (place.target, place.considered, len(place.candidates)) == ("r00", 40, CANDIDATES_MAX)
    assert [one.name for one in place.candidates[:3]] == ["r00", "r02", "r04"]
    assert all(one.available for one in place.candidates)
    for number in range(40):
        fleet.replicas.see(beat(f"r{number:02}", 2, pending=1), 0.0)
    fleet.peers.refused(EU, 0.0)
    held = fleet.place()
    assert (held.placement, held.considered, len(held.candidates)) == (
        Placement.HOLD,
        41,
        CANDIDATES_MAX,
    )


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({"policy": "least-load"}, False),
        ({"policy": "mesh"}, True),
        ({"policy": "least-load", "pushing": BLIND}, True),
        ({"policy": "least-load", "pushing": Pushing(PushingKind.OUTSTANDING, 9)}, True),
    ],
)
def test_work_may_queue_where_what_is_pending_was_in_view(settings, may):
    fleet = Fleet(**settings)
    fleet.replicas.see(beat("a"), 0.0)
    assert fleet.place().may_queue is may


def test_the_class_decides_whether_its_work_may_queue():
    fleet = Fleet(policy="least-load", policy_by_priority=((Priority.LOW, "mesh"),))
    fleet.replicas.see(beat("a"), 0.0)
    assert not fleet.place(request(1)).may_queue
    assert fleet.place(request(2, priority=Priority.LOW)).may_queue


def test_held_by_choice_is_not_held_for_want_of_room():
    fleet = Fleet(policy="mesh")
    assert not fleet.place().by_choice
    fleet.replicas.see(beat("a", prefill_queued_tokens=20_000), 0.0)
    place = fleet.place()
    assert (place.placement, place.by_choice) == (Placement.HOLD, True)
    assert [one.name for one in place.candidates] == ["a"]
    assert place.reason.startswith("cheapest is a, but: ")
    assert not fleet.place(avoid={"a"}).by_choice


@pytest.mark.parametrize(("policy", "may"), [("least-load", False), ("mesh", True)])
def test_room_in_a_busy_replica_is_for_policies_that_judge_load(policy, may):
    fleet = Fleet(policy=policy)
    fleet.replicas.see(beat("a", pending=5), 0.0)
    replica = fleet.replicas.get(ReplicaId("a"))
    assert fleet.placer.may_go(replica, [ModelId("m")], 0.0) is may
    assert not fleet.placer.may_go(replica, [ModelId("other")], 0.0)
    fleet.replicas.see(beat("a", 2), 0.0)
    assert fleet.placer.may_go(replica, [ModelId("other"), ModelId("m")], 0.0)
    assert not fleet.placer.may_go(replica, [], 0.0)


def test_tokens_that_the_policy_estimates_to_be_held_are_not_computed():
    """An answer of 100 tokens goes on in a block that was not full."""
    fleet = Fleet(policy="mesh")
    fleet.replicas.see(beat("a", prefill_queued_tokens=0), 0.0)
    first = request(1, "AB")
    fleet.placer.placed(first, spot("a"), 0.0)
    fleet.placer.began(first, spot("a"), 0.1)
    fleet.placer.served(first, spot("a"), Served(output_tokens=100), 0.2)
    fleet.placer.left(first, spot("a"), 0.2)
    place = fleet.place(request(2, prompt=prompt("ABCDE", 320)))
    assert (place.target, place.prefill_tokens) == ("a", 320 - 200)


@pytest.mark.parametrize("policy", ["skywalker", "gorgo"])
def test_ticks_take_out_what_was_not_used_for_long(policy):
    fleet, one = Fleet(policy=policy), request(1, "ABCD")
    brain = fleet.placer._pair_by_priority.get(one.priority, fleet.placer._main_pair)
    for kind in CandidateKind:
        fleet.placer.placed(one, spot("x", kind), 0.0)
    fleet.placer.expire(TTL_S)
    assert brain.local.hit_ratio(one) == brain.remote.hit_ratio(one) == 1.0
    fleet.placer.expire(TTL_S + 0.1)
    assert brain.local.hit_ratio(one) == brain.remote.hit_ratio(one) == 0.0
