"""SkyWalker-CH: Algorithm 1, lines 23-26, through the placer: a ring in each layer."""

import pytest

from mesh.core.policies.consistent_hash import HashRing, key_of
from mesh.core.policies.skywalker import SkyWalkerCHOptions
from schemas.decision import Placement
from tests.mesh.core.build import beat, digest, request
from tests.mesh.core.placement.test_placement import Fleet

REPLICAS, REGIONS = ("a", "b", "c", "d"), ("eu", "ap", "sa")
USERS = [f"user-{number}" for number in range(30)]


def fleet(full=()):
    fleet = Fleet(policy="skywalker-ch")
    for name in REPLICAS:
        fleet.replicas.see(beat(name, full=name in full), 0.0)
    for region in REGIONS:
        fleet.peers.see(digest(region, free=4), 0.0)
    return fleet


def place(fleet, user):
    place = fleet.placer.place(request(1, session=user), (), 0.0)
    return place.placement, place.target


def expected(user, known, available):
    ring = HashRing()
    ring.learn(known)
    return ring.next(key_of(user), available)


def test_a_users_requests_go_to_their_own_replica():
    mesh = fleet()
    for user in USERS:
        assert place(mesh, user) == (Placement.LOCAL, expected(user, REPLICAS, REPLICAS))


def test_a_place_that_is_not_available_is_passed_over():
    mesh = fleet(full=("b",))
    for user in USERS:
        assert place(mesh, user) == (Placement.LOCAL, expected(user, REPLICAS, ("a", "c", "d")))


def test_peers_have_a_ring_of_their_own():
    mesh = fleet(full=REPLICAS)
    for user in USERS:
        assert place(mesh, user) == (Placement.PEER, expected(user, REGIONS, REGIONS))
    mesh.peers.see(digest("ap", 2, free=0), 0.1)
    for user in USERS:
        assert place(mesh, user) == (Placement.PEER, expected(user, REGIONS, ("eu", "sa")))


def test_without_a_session_the_prompt_s_beginning_is_the_key():
    mesh = fleet()
    turns = [request(turn, "ABCD" + "X" * turn) for turn in range(5)]
    assert len({mesh.placer.place(turn, (), 0.0).target for turn in turns}) == 1


def test_a_beginning_has_a_block_at_least():
    with pytest.raises(ValueError, match="blocks must be 1 or more"):
        SkyWalkerCHOptions(blocks=0)
