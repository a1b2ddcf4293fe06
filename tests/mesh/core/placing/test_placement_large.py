"""Placement in fleets too large to examine all: a sample, and when it won't do."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import Placer
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_sampling import ALL_MAX, HOLDERS_MAX, IDLE_MAX, OTHERS_MAX
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.ids import ModelId, ReplicaId
from tests.mesh.core.build import MODEL, ROUTER, US, beat, request, spot

LOOKED_AT_MAX = HOLDERS_MAX + IDLE_MAX + OTHERS_MAX
BUSY = {"running": 4, "outstanding": 4, "prefill_queued_tokens": 1000}
FULL = {"outstanding": 256}  # as many as its agent takes


class Fleet:
    """A region of `count` replicas, `r0` and on, that all have the same work."""

    def __init__(self, count, policy="mesh", seed=1, **said):
        known = RouterSettings(policy=policy)
        self.replicas = ReplicaTable(ROUTER, known)
        self.placer = Placer(known, self.replicas, PeerTable(known, US), Random(seed), None, US)
        for number in range(count):
            self.replicas.see(beat(f"r{number}", **(BUSY | said)), 0.0)

    def says(self, name, seq=2, **fields):
        self.replicas.see(beat(name, seq, **(BUSY | fields)), 0.0)

    def place(self, text="ABCD", ahead=0, key=1):
        return self.placer.place(request(key, text), (), 0.0, ahead)


@pytest.mark.parametrize("policy", ["mesh", "least-load"])
def test_a_small_fleet_is_looked_at_whole(policy):
    assert Fleet(ALL_MAX, policy).place().considered == ALL_MAX


def test_of_a_large_fleet_some_are_and_layered_policies_see_all():
    assert 30 < Fleet(1000).place().considered <= LOOKED_AT_MAX
    assert Fleet(1000, "least-load").place().considered == 1000


def test_those_of_other_models_make_no_fleet_large():
    fleet = Fleet(ALL_MAX)
    for number in range(100):
        fleet.says(f"other-{number}", models=(ModelId("other"),))
    assert fleet.place().considered == ALL_MAX


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 299))
def test_the_holder_of_a_long_prefix_is_never_missed(seed, number):
    fleet, text = Fleet(300, seed=seed), "ABCDEFGH" * 8
    fleet.placer.placed(request(9, text), spot(f"r{number}"), 0.0)
    assert fleet.place(text).target == f"r{number}"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sets(st.integers(0, 299), min_size=1, max_size=IDLE_MAX))
def test_the_last_idle_ones_are_never_missed(seed, numbers):
    fleet = Fleet(300, seed=seed, running=30, outstanding=30)
    for number in numbers:
        fleet.says(f"r{number}", running=0, outstanding=0, prefill_queued_tokens=0)
    assert fleet.place().target in {f"r{number}" for number in numbers}


def test_who_has_been_given_work_is_idle_no_more():
    fleet, idle = Fleet(300), {"running": 0, "outstanding": 0, "prefill_queued_tokens": 0}
    for name in ("r7", "r8"):
        fleet.says(name, **idle)
    first = fleet.place().target
    fleet.replicas.hand_off(ReplicaId(first), 4000, 4000, 0.0)
    assert {first, fleet.place().target} == {"r7", "r8"}


def test_the_same_seed_sees_the_same_and_others_see_others():
    def placed(seed):
        fleet = Fleet(1000, seed=seed)
        return [fleet.place(key=key).target for key in range(20)]

    assert placed(1) == placed(1)
    assert len({target for seed in range(10) for target in placed(seed)}) > 100


def test_of_many_holders_a_few_are_looked_at():
    fleet, text = Fleet(1000), "ABCDEFGH" * 8
    for number in range(0, 1000, 2):
        fleet.placer.placed(request(number, text), spot(f"r{number}"), 0.0)
    place = fleet.place(text)
    assert place.considered <= LOOKED_AT_MAX
    assert int(place.target[1:]) % 2 == 0


def test_when_none_of_the_sample_is_available_all_are_looked_at():
    fleet = Fleet(1000, **FULL)
    fleet.says("r777")
    for key in range(5):
        place = fleet.place(key=key)
        assert (place.placement, place.target) == (Placement.LOCAL, "r777")
    fleet.says("r777", 3, **FULL)
    held = fleet.place()
    assert (held.placement, held.considered) == (Placement.HOLD, 1000)


def test_a_line_is_shared_by_all_and_not_by_those_looked_at():
    """What a hundred that wait cost a newcomer is the same in the sample as over all."""
    some, ahead = Fleet(1000), 100
    one = some.place(ahead=ahead).candidates[0]
    fewer = Fleet(ALL_MAX).place(ahead=ahead * ALL_MAX / 1000).candidates[0]
    assert one.terms["line_s"] > 0.0
    assert one.terms["line_s"] == pytest.approx(fewer.terms["line_s"])


def test_a_replica_that_changes_its_models_is_found_under_the_new_ones():
    fleet, other = Fleet(100), ModelId("other")
    fleet.says("r1", models=(other,))
    assert {one.heartbeat.replica for one in fleet.replicas.serving(other)} == {"r1"}
    assert len(fleet.replicas.serving(MODEL)) == 99
