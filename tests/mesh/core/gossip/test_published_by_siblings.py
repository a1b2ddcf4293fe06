"""What a sibling published is not published twice, but again once the sibling is gone."""

from functools import partial

from mesh.core.gossip.gossip import SiblingPrefixSet
from mesh.core.gossip.publisher import OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes
from schemas.gossip import TrieDelta, TriePart

SIBLING = Origin("us", "r2")


def scene(heirs=(1, 0), held=range(100)):
    remote, outgoing = RemotePrefixes(), OutgoingPrefixes(1000)
    outgoing.unpublished = partial(remote.not_announced, "us")
    is_held = set(held).__contains__
    theirs = SiblingPrefixSet(remote, SIBLING, outgoing, lambda gone: heirs, is_held)
    theirs.trust(True)
    return theirs, outgoing


def test_what_a_sibling_publishes_waits_here_no_more():
    theirs, outgoing = scene()
    outgoing.used((1, 2, 3), 0.0)
    theirs.take(TrieDelta("us", "r2", 1, 1, (1, 2), ()), 0.0)
    assert outgoing.take(10) == ((3,), ())
    outgoing.used((1, 2, 3, 4), 1.0)
    assert outgoing.take(10) == ((4,), ())


def test_an_untrusted_sibling_prevents_no_publication():
    theirs, outgoing = scene()
    theirs.put([TriePart("us", "r2", 1, 1, 0, 1, (1, 2))], 0.0, 0.0)
    theirs.trust(False)
    outgoing.used((1, 2), 0.0)
    assert outgoing.take(10) == ((1, 2), ())


def test_heirs_publish_what_is_still_held_each_a_part():
    theirs, outgoing = scene(heirs=(2, 1), held=range(6))
    theirs.take(TrieDelta("us", "r2", 1, 1, tuple(range(10)), ()), 0.0)
    theirs.forget()
    assert sorted(outgoing.take(10)[0]) == [1, 3, 5]
