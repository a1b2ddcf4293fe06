"""One origin's set as received: gaps, early and late deltas, snapshots, restarts, silence."""

import pytest

from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes, RemotePrefixSet, SetOutcome
from mesh.core.gossip.stream_receiver import (
    AHEAD_MAX,
    GONE_S,
    GRACE_S,
    RETRY_S,
    SILENT_S,
    StreamReceiver,
)
from schemas.gossip import (
    BLOCKS_MAX,
    DELTA_BLOCKS_MAX,
    PART_BLOCKS_MAX,
    PARTS_MAX,
    TrieAsk,
    TrieDelta,
    TriePart,
)

EU = Origin("eu", "r1")


class Ear:
    """A receiver of eu's stream, and the set that it keeps."""

    def __init__(self):
        self.told = RemotePrefixes()
        self.receiver = StreamReceiver(EU, RemotePrefixSet(self.told, EU))

    def receive(self, seq, gained=(), lost=(), now=0.0, epoch=1):
        self.receiver.receive(TrieDelta("eu", "r1", epoch, seq, tuple(gained), tuple(lost)), now)

    def part(self, seq, part, parts, blocks, now=0.0, epoch=1):
        self.receiver.receive_part(
            TriePart("eu", "r1", epoch, seq, part, parts, tuple(blocks)), now
        )

    @property
    def blocks(self):
        return sorted(self.told.blocks(EU))

    @property
    def is_whole(self):
        return self.told.is_trusted(EU)


def test_a_stream_without_a_gap_is_followed():
    stream = Ear()
    stream.receive(1, (1, 2))
    stream.receive(2, (3,), (2,))
    stream.receive(2)
    assert (stream.blocks, stream.is_whole) == ([1, 3], True)
    assert stream.receiver.repair_request(1.0) is None


def test_what_comes_twice_or_late_changes_nothing():
    stream = Ear()
    stream.receive(1, (1,))
    stream.receive(2, (), (1,))
    stream.receive(1, (1,))
    assert (stream.blocks, stream.is_whole) == ([], True)


def test_early_deltas_wait_for_the_missing_one():
    stream = Ear()
    stream.receive(3, (3,))
    stream.receive(2, (2,))
    assert (stream.blocks, stream.is_whole) == ([], False)
    stream.receive(1, (1,))
    assert (stream.blocks, stream.is_whole) == ([1, 2, 3], True)


def test_a_gap_is_requested_after_a_moment_and_again_without_an_answer():
    stream = Ear()
    stream.receive(1, (1,), now=0.0)
    stream.receive(3, (3,), now=1.0)
    assert stream.receiver.repair_request(1.0 + GRACE_S / 2) is None
    assert stream.receiver.repair_request(1.0 + GRACE_S) == TrieAsk("r1", 1, 1)
    assert stream.receiver.repair_request(1.0 + GRACE_S + RETRY_S / 2) is None
    assert stream.receiver.repair_request(1.0 + GRACE_S + RETRY_S) == TrieAsk("r1", 1, 1)
    stream.receive(2, (2,), now=2.0)
    assert stream.receiver.repair_request(9.0) is None


def test_a_sign_shows_that_the_end_was_missed():
    stream = Ear()
    stream.receive(1, (1,))
    stream.receive(2)
    assert not stream.is_whole
    assert stream.receiver.repair_request(GRACE_S) == TrieAsk("r1", 1, 1)


def test_a_newcomer_asks_for_everything_and_takes_it_in_parts_of_any_order():
    stream = Ear()
    stream.receive(57)
    assert stream.receiver.repair_request(GRACE_S) == TrieAsk("r1", 1, 0)
    stream.part(57, 1, 2, (3,))
    stream.receive(58, (4,), (3,))
    assert (stream.blocks, stream.is_whole) == ([], False)
    stream.part(57, 0, 2, (1, 2))
    assert (stream.blocks, stream.is_whole) == ([1, 2, 4], True)


def test_a_snapshot_takes_the_place_of_what_was_known():
    stream = Ear()
    stream.receive(1, (1, 2))
    stream.receive(9)
    stream.part(9, 0, 1, (2, 5))
    assert (stream.blocks, stream.is_whole) == ([2, 5], True)


def test_an_old_snapshot_changes_nothing():
    stream = Ear()
    stream.receive(1, (1,))
    stream.receive(2, (2,))
    stream.part(1, 0, 1, (1,))
    stream.part(2, 0, 1, (7,))
    assert (stream.blocks, stream.is_whole) == ([1, 2], True)


def test_parts_of_two_snapshots_are_not_mixed():
    stream = Ear()
    stream.receive(9)
    stream.part(8, 0, 2, (1,))
    stream.part(9, 1, 2, (2,))
    assert stream.blocks == []
    stream.part(9, 0, 2, (3,))
    assert (stream.blocks, stream.is_whole) == ([2, 3], True)


def test_while_parts_arrive_no_request_is_repeated():
    stream = Ear()
    stream.receive(9)
    assert stream.receiver.repair_request(1.0) is not None
    stream.part(9, 0, 3, (1,), now=1.4)
    assert stream.receiver.repair_request(1.4 + RETRY_S / 2) is None
    assert stream.receiver.repair_request(1.4 + RETRY_S) is not None


def test_a_new_epoch_begins_empty_and_the_old_one_is_deaf():
    stream = Ear()
    stream.receive(1, (1,), epoch=1)
    stream.receive(0, epoch=2)
    assert (stream.blocks, stream.is_whole) == ([], True)
    stream.receive(2, (2,), epoch=1)
    stream.part(9, 0, 1, (9,), epoch=1)
    stream.receive(1, (3,), epoch=2)
    assert (stream.blocks, stream.is_whole) == ([3], True)


def test_a_silent_origin_is_not_trusted_nor_asked_and_forgotten_in_the_end():
    stream = Ear()
    stream.receive(1, (1,), now=0.0)
    stream.receive(3, now=0.0)
    assert stream.receiver.repair_request(SILENT_S + 0.1) is None
    stream.receive(2, (2,), now=4.0)
    stream.receive(3, (3,), now=4.0)
    assert stream.is_whole
    assert stream.receiver.repair_request(4.1 + SILENT_S) is None
    assert (stream.blocks, stream.is_whole) == ([1, 2, 3], False)
    stream.receive(3, now=8.0)
    assert stream.is_whole
    assert not stream.receiver.is_gone(8.0 + GONE_S)
    assert stream.receiver.is_gone(8.1 + GONE_S)


def test_an_origin_with_too_large_a_set_does_not_count():
    stream = Ear()
    starts = range(0, BLOCKS_MAX + 3 * DELTA_BLOCKS_MAX, DELTA_BLOCKS_MAX)
    for seq, start in enumerate(starts, 1):
        stream.receive(seq, range(start, start + DELTA_BLOCKS_MAX))
    assert len(stream.blocks) <= BLOCKS_MAX + DELTA_BLOCKS_MAX
    assert not stream.is_whole
    assert stream.receiver.repair_request(1.0) is None
    stream.receive(0, epoch=2)
    assert (stream.blocks, stream.is_whole) == ([], True)


def test_a_snapshot_of_the_largest_set_over_itself_leaves_it_whole():
    stream = Ear()
    starts = range(0, BLOCKS_MAX, DELTA_BLOCKS_MAX)
    for seq, start in enumerate(starts, 1):
        stream.receive(seq, range(start, start + DELTA_BLOCKS_MAX))
    last = len(starts) + 1
    stream.receive(last)
    for part in range(PARTS_MAX):
        start = 1 + part * PART_BLOCKS_MAX
        stream.part(last, part, PARTS_MAX, range(start, start + PART_BLOCKS_MAX))
    assert stream.blocks == list(range(1, BLOCKS_MAX + 1))
    assert stream.is_whole


def test_deltas_far_ahead_take_no_more_than_their_room():
    stream = Ear()
    for seq in range(2, 500):
        stream.receive(seq, (seq,))
    stream.receive(1, (1,))
    assert stream.blocks == list(range(1, AHEAD_MAX + 2))
    assert stream.receiver.repair_request(1.0) == TrieAsk("r1", 1, AHEAD_MAX + 1)


@pytest.mark.parametrize(
    ("part", "parts"), [(-1, 2), (2, 2), (0, 0), (0, 10**9)], ids=lambda number: str(number)
)
def test_parts_that_can_not_be_are_ignored(part, parts):
    stream = Ear()
    stream.receive(9)
    stream.part(9, part, parts, (1,))
    assert (stream.blocks, stream.is_whole) == ([], False)


class Choosy(RemotePrefixSet):
    """Takes the first snapshot in part, as an index does that has lost a replica meanwhile."""

    asked = ()

    def put(self, parts, asked_at, now):
        self.asked += (asked_at,)
        taken = super().put(parts, asked_at, now)
        return SetOutcome.IN_PART if len(self.asked) == 1 else taken


def test_a_snapshot_that_was_taken_in_part_is_asked_for_again():
    shelf = Choosy(RemotePrefixes(), EU)
    receiver = StreamReceiver(EU, shelf)
    receiver.request_all(0.0)
    assert receiver.repair_request(GRACE_S) is None  # it may be silent
    receiver.receive(TrieDelta("eu", "r1", 1, 0, (), ()), 1.0)
    assert receiver.repair_request(1.0 + GRACE_S) is not None
    assert receiver.repair_request(1.0 + GRACE_S + RETRY_S) is not None
    receiver.receive_part(TriePart("eu", "r1", 1, 0, 0, 1, (1,), is_all=1), 2.0)
    assert not receiver.is_whole
    again_at = 2.0 + RETRY_S + GRACE_S
    assert receiver.repair_request(again_at) is not None
    receiver.receive_part(TriePart("eu", "r1", 1, 0, 0, 1, (1,), is_all=1), 3.0)
    assert receiver.is_whole
    # What was asked twice may be the answer to the first question.
    assert shelf.asked == (1.0 + GRACE_S, again_at)
