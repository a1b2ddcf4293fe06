"""What is placed is entered, each layer for itself."""

from random import Random

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.publisher import OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Target
from mesh.core.policies.indexed import Indexed, part
from schemas.decision import CandidateKind
from schemas.gossip import TrieDelta
from tests.mesh.core.build import request, spot

PEER = CandidateKind.PEER
EU = Origin("eu", "r1")


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


def test_what_peers_tell_counts_where_it_goes_deeper():
    indexed, told = Indexed(Random(1), 100), RemotePrefixes()
    indexed.indexes[PEER].announced = told
    told.trust(EU, True)
    told.add(EU, request(1, "ABC").prompt.hashes)
    eu, ap = Target("eu", 0, PEER), Target("ap", 0, PEER)
    indexed.placed(request(1, "ABCDE"), spot("ap", PEER), 0.0)
    assert indexed._holders(request(1, "ABCDE"), [eu, ap]) == ([ap], 5)
    assert indexed._holders(request(1, "ABCZZ"), [eu, ap]) == ([eu, ap], 3)
    assert indexed._held_by(request(1, "ABZ"), eu) == 2
    assert indexed._held_by(request(1, "ABC"), Target("eu", 0)) == 0  # a replica of that name


def test_a_peer_whose_stream_has_a_gap_does_not_count_until_it_is_closed():
    """The policy reads what the router's gossip keeps, so doubt is known to it at once."""
    gossip = Gossip(Origin("us", "r1"), 1, RouterSettings(), [].append)
    indexed, eu, hashes = Indexed(Random(1), 100), Target("eu", 0, PEER), request(1, "ABC")
    indexed.indexes[PEER].announced = gossip.remote
    blocks = hashes.prompt.hashes
    gossip.receive(TrieDelta("eu", "r1", 1, 1, blocks[:2], ()), 0.0)
    assert indexed._held_by(hashes, eu) == 2
    gossip.receive(TrieDelta("eu", "r1", 1, 3, (77,), ()), 0.1)
    assert indexed._held_by(hashes, eu) == 0
    gossip.receive(TrieDelta("eu", "r1", 1, 2, blocks[2:], ()), 0.2)
    assert indexed._held_by(hashes, eu) == 3


def test_it_publishes_what_its_region_holds_and_when_the_last_replica_loses_it():
    indexed, news = Indexed(Random(1), 3), OutgoingPrefixes(100)
    indexed.indexes[CandidateKind.REPLICA].outgoing = news
    for name in ("x", "y"):
        indexed.placed(request(1, "ABC"), spot(name), 0.0)
    indexed.placed(request(1, "ABC"), spot("eu", PEER), 0.0)  # not held in this region
    assert news.take(100) == (request(1, "ABC").prompt.hashes, ())
    assert news.holders(news.published) == (("x", "y"), (3, 3, 3))
    indexed.placed(request(1, "DEF"), spot("x"), 0.0)  # and x has no room for both
    changed = {*request(1, "ABC").prompt.hashes, *request(1, "DEF").prompt.hashes}
    gained, lost = news.take(100)
    assert (set(gained), lost) == (changed, ())
    assert news.holders(request(1, "ABC").prompt.hashes) == (("y",), (1, 1, 1))
    indexed.forget(spot("y"))
    assert set(news.take(100)[1]) == set(request(1, "ABC").prompt.hashes)


def test_memory_is_bounded_for_each():
    indexed = Indexed(Random(1), 3)
    for letter in "ABCDEFGH":
        indexed.placed(request(1, letter * 3), spot("x"), 0.0)
    assert [indexed.hit_ratio(request(1, letter * 3)) for letter in "GH"] == [0.0, 1.0]


def test_a_prompt_without_blocks_has_no_part():
    assert part(0, request(1, "")) == 0.0
