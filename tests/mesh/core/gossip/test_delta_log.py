"""The last deltas, as far as there is room."""

from mesh.core.gossip.publisher import DeltaLog
from schemas.gossip import TrieDelta


def kept(count, **limits):
    log = DeltaLog(**{"deltas_max": 100, "blocks_max": 1000} | limits)
    for seq in range(1, count + 1):
        log.keep(TrieDelta("us", "r1", 1, seq, (seq, seq), (seq,)))
    return log


def numbers(deltas):
    return None if deltas is None else [delta.seq for delta in deltas]


def test_deltas_after_a_number_are_sent_again():
    log = kept(5)
    assert numbers(log.since(3, 5)) == [4, 5]
    assert numbers(log.since(0, 5)) == [1, 2, 3, 4, 5]
    assert numbers(log.since(5, 5)) == []


def test_numbers_that_never_were_have_no_answer():
    assert kept(5).since(6, 5) is None
    assert kept(5).since(-1, 5) is None


def test_the_oldest_make_room_by_number_and_by_blocks():
    assert kept(5, deltas_max=3).since(1, 5) is None
    assert numbers(kept(5, deltas_max=3).since(2, 5)) == [3, 4, 5]
    assert kept(5, blocks_max=7).since(2, 5) is None
    assert numbers(kept(5, blocks_max=7).since(3, 5)) == [4, 5]
