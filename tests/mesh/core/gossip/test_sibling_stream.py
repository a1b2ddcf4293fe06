"""What a router says of its placements, and what it remembers of that."""

from mesh.core.gossip.publisher import AGAIN_S, RECENT_MAX, SiblingPublisher
from mesh.core.gossip.remote_prefixes import Origin
from schemas.gossip import DELTA_BLOCKS_MAX, EVERYTHING


def placed():
    said = []
    return SiblingPublisher(Origin("us", "r1"), 7, said.append), said


def test_every_prompt_is_published_whole_with_its_replica_and_a_number():
    stream, said = placed()
    stream.used("us-0", (1, 2), 0.0)
    stream.used("us-1", (1, 2, 3), 0.0)
    stream.used("us-1", (), 0.0)
    assert [(d.seq, d.replica, d.gained) for d in said] == [
        (1, "us-0", (1, 2)),
        (2, "us-1", (1, 2, 3)),
    ]
    assert stream.sign(is_warm=True).seq == 2 and stream.sign(is_warm=True).is_sign


def test_a_prompt_is_published_again_after_a_while_or_once_it_was_lost():
    stream, said = placed()
    stream.used("us-0", (1, 2), 0.0)
    stream.used("us-0", (1, 2), AGAIN_S / 2)
    assert len(said) == 1
    stream.used("us-0", (1, 2), 2 * AGAIN_S)
    stream.lost("us-0", (2,))
    stream.used("us-0", (1, 2), 2 * AGAIN_S)
    assert [(d.gained, d.lost) for d in said[1:]] == [((1, 2), ()), ((), (2,)), ((1, 2), ())]


def test_a_miss_is_published_by_its_age():
    stream, said = placed()
    stream.now = 10.0
    stream.missed("us-0", 8.5)
    assert (said[0].missed_ms, said[0].is_sign) == (1500, False)


def test_a_sibling_that_missed_some_gets_the_replicas_concerned():
    stream, _ = placed()
    for number in range(5):
        stream.used(f"us-{number}", (number,), 0.0)
    assert stream.since(3) == {"us-3", "us-4"}
    assert stream.since(5) == set()
    assert stream.since(6) is None and stream.since(EVERYTHING) is None


def test_a_long_path_goes_end_first():
    stream, said = placed()
    stream.used("us-0", tuple(range(DELTA_BLOCKS_MAX + 3)), 0.0)
    assert [len(delta.gained) for delta in said] == [3, DELTA_BLOCKS_MAX]


def test_what_is_remembered_has_a_limit():
    stream, _ = placed()
    for number in range(RECENT_MAX + 10):
        stream.used("us-0", (number,), 0.0)
    assert len(stream._used_at["us-0"]) == RECENT_MAX
    stream.gone("us-0")
    assert not stream._used_at
