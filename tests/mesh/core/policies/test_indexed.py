"""What is placed is entered, each layer for itself."""

from random import Random

from mesh.core.policies.base import Target
from mesh.core.policies.indexed import Indexed, part
from schemas.decision import CandidateKind
from tests.mesh.core.build import request, spot

PEER = CandidateKind.PEER


def test_a_peer_called_like_a_replica_is_another():
    indexed = Indexed(Random(1), 100)
    indexed.placed(request(1, "ABCD"), spot("x", PEER), 0.0)
    replica, peer = Target("x", 0), Target("x", 0, PEER)
    assert indexed._held_by(request(1, "ABCD"), replica) == 0
    assert indexed._held_by(request(1, "ABCD"), peer) == 4
    assert indexed._holders(request(1, "ABZZ"), [peer]) == ([peer], 2)
    assert indexed._holders(request(1, "ABCD"), [replica]) == ([], 0)
    indexed.forget(spot("x"))
    assert indexed.hit_ratio(request(1, "ABZZ")) == 0.5
    indexed.forget(spot("x", PEER))
    assert indexed.hit_ratio(request(1, "ABZZ")) == 0.0


def test_memory_is_bounded_for_each():
    indexed = Indexed(Random(1), 3)
    for letter in "ABCDEFGH":
        indexed.placed(request(1, letter * 3), spot("x"), 0.0)
    assert [indexed.hit_ratio(request(1, letter * 3)) for letter in "GH"] == [0.0, 1.0]


def test_a_prompt_without_blocks_has_no_part():
    assert part(0, request(1, "")) == 0.0
