"""One router's stream: when it publishes, how much, and its answers to peers that missed some."""

from mesh.core.gossip.publisher import (
    LOG_DELTAS_MAX,
    SIGN_REST_S,
    SIGN_S,
    DeltaPublisher,
    OutgoingPrefixes,
)
from mesh.core.gossip.remote_prefixes import Origin
from schemas.gossip import PART_BLOCKS_MAX, TrieAsk, TrieDelta, TriePart, size_bytes

ORIGIN = Origin("us", "r1")


class Stream:
    """A publisher and its set."""

    def __init__(self, bytes_per_s=1e6, trie_s=0.25, blocks_max=10_000):
        self.outgoing = OutgoingPrefixes(blocks_max)
        self.teller = DeltaPublisher(
            ORIGIN, 7, self.outgoing, trie_s=trie_s, bytes_per_s=bytes_per_s
        )

    def tell(self, blocks, now):
        self.outgoing.used(tuple(blocks), now)
        return self.teller.due(now)

    def ask(self, after, epoch=7):
        return self.teller.answer(TrieAsk("r1", epoch, after))


def test_deltas_are_numbered_and_as_far_apart_as_was_set():
    stream = Stream()
    assert stream.tell((1, 2), 0.0) == [TrieDelta("us", "r1", 7, 1, (1, 2), ())]
    assert stream.tell((1, 2, 3), 0.1) == []
    stream.outgoing.lost([2])
    assert stream.teller.due(0.25) == [TrieDelta("us", "r1", 7, 2, (3,), (2,))]


def test_with_nothing_to_tell_it_repeats_its_last_number():
    stream = Stream()
    sign = TrieDelta("us", "r1", 7, 0, (), ())
    assert stream.teller.due(0.0) == [sign]
    assert stream.teller.due(SIGN_S - 0.01) == []
    assert stream.teller.due(SIGN_S) == [sign]
    assert stream.teller.due(2 * SIGN_S, rests=True) == []
    assert stream.teller.due(SIGN_S + SIGN_REST_S, rests=True) == [sign]


def test_what_the_budget_does_not_allow_waits_and_the_best_goes_first():
    stream = Stream(bytes_per_s=100.0)  # a burst of 400
    for _ in range(2):
        stream.outgoing.used((1, 2, 3), 0.0)
    first = stream.tell(range(10, 1000), 0.0)
    assert [delta.gained[:3] for delta in first] == [(1, 2, 3)]
    assert sum(map(size_bytes, first)) <= 400
    assert not stream.teller.due(0.3)
    assert stream.teller.due(1.5)[0].gained


def test_the_bytes_are_within_the_budget_whatever_there_is_to_tell():
    stream, spent = Stream(bytes_per_s=10_000.0), 0
    for tick in range(100):
        blocks = range(tick * 1000, tick * 1000 + 1000)
        spent += sum(map(size_bytes, stream.tell(blocks, tick * 0.05)))
    assert 80_000 < spent < 5 * 10_000 + 40_000 + 64


def test_a_peer_that_missed_little_gets_that_again():
    stream = Stream()
    deltas = [stream.tell((n,), float(n))[0] for n in range(20)]
    assert stream.ask(17) == deltas[17:]
    assert stream.ask(20) == [TrieDelta("us", "r1", 7, 20, (), ())]


def test_a_peer_of_another_epoch_gets_all():
    stream = Stream()
    stream.tell((1, 2), 0.0)
    for question in (stream.ask(0, epoch=6), stream.ask(9), stream.ask(-1)):
        [part] = question
        assert (part.seq, part.part, part.parts, set(part.blocks)) == (1, 0, 1, {1, 2})


def test_a_hole_older_than_the_log_is_answered_with_the_whole_set():
    stream = Stream()
    for n in range(LOG_DELTAS_MAX + 10):
        stream.tell((n,), float(n))
    assert isinstance(stream.ask(5)[0], TriePart)
    assert isinstance(stream.ask(LOG_DELTAS_MAX)[0], TrieDelta)


def test_deltas_that_take_more_than_the_set_are_not_repeated():
    stream = Stream(blocks_max=10)
    for n in range(50):
        stream.tell((n,), float(n))
    [part] = stream.ask(0)
    assert isinstance(part, TriePart) and len(part.blocks) <= 11


def test_a_large_set_comes_in_parts_that_make_it_up():
    stream = Stream(bytes_per_s=1e9)
    stream.tell(range(3 * PART_BLOCKS_MAX - 1), 0.0)
    parts = stream.ask(0, epoch=6)
    assert [(part.part, part.parts) for part in parts] == [(0, 3), (1, 3), (2, 3)]
    assert {b for part in parts for b in part.blocks} == set(range(3 * PART_BLOCKS_MAX - 1))


def test_an_empty_set_is_one_empty_part():
    assert Stream().ask(3) == [TriePart("us", "r1", 7, 0, 0, 1, ())]
