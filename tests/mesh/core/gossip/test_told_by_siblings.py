"""What a sibling told is not told twice, and told anew once the sibling is gone."""

from mesh.core.gossip.outgoing_prefixes import OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes, SiblingPrefixSet
from schemas.gossip import TrieDelta, TriePart

SIBLING = Origin("us", "r2")


def scene(heirs=(1, 0), held=range(100)):
    told = RemotePrefixes()
    news = OutgoingPrefixes(1000, lambda blocks: told.not_announced("us", blocks))
    shelf = SiblingPrefixSet(told, SIBLING, news, lambda gone: heirs, lambda block: block in held)
    shelf.trust(True)
    return shelf, news


def test_what_waits_here_and_was_told_there_waits_no_more():
    shelf, news = scene()
    news.used((1, 2, 3), 0.0)
    shelf.take(TrieDelta("us", "r2", 1, 1, (1, 2), ()), 0.0)
    assert news.take(10) == ((3,), ())
    news.used((1, 2, 3, 4), 1.0)
    assert news.take(10) == ((4,), ())


def test_a_doubted_siblings_word_does_not_silence_us():
    shelf, news = scene()
    shelf.put([TriePart("us", "r2", 1, 1, 0, 1, (1, 2))], 0.0, 0.0)
    shelf.trust(False)
    news.used((1, 2), 0.0)
    assert news.take(10) == ((1, 2), ())


def test_heirs_tell_what_is_still_held_each_a_part():
    shelf, news = scene(heirs=(2, 1), held=range(6))
    shelf.take(TrieDelta("us", "r2", 1, 1, tuple(range(10)), ()), 0.0)
    shelf.forget()
    assert sorted(news.take(10)[0]) == [1, 3, 5]
