"""Holders of blocks as numbers: what a message names is what its receiver reads."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.gossip.replica_names import NameBits, as_received, as_sent, named_in
from schemas.gossip import HOLDER_NAMES_MAX

NAMES = [f"us-{number}" for number in range(12)]
SETS = st.lists(st.sets(st.sampled_from(NAMES)), max_size=20)


@given(SETS, st.permutations(NAMES))
def test_the_holders_that_are_sent_are_received(held_by, order):
    ours, theirs = NameBits(), NameBits()
    for name in order:
        ours.bit(name)
    sent = [sum(ours.bit(name) for name in names) for names in held_by]
    replicas, holders = as_sent(sent, ours.names)
    received = as_received(replicas, holders, len(held_by), theirs.bit)
    assert [set(theirs.names(bits)) for bits in received] == held_by
    assert named_in(replicas, holders, len(held_by)) == held_by


def test_a_message_names_so_many_replicas_at_most():
    names = NameBits()
    bits = [names.bit(f"us-{number}") for number in range(HOLDER_NAMES_MAX + 1)]
    replicas, holders = as_sent(bits, names.names)
    assert len(replicas) == HOLDER_NAMES_MAX
    assert holders[-1] == 0 and all(holders[:-1])


def test_what_fits_no_block_or_no_name_is_ignored():
    names = NameBits()
    assert as_received(("us-1",), (1,), 2, names.bit) == [0, 0]
    assert as_received((), (), 2, names.bit) == [0, 0]
    assert as_received(("us-1",), (2, 3, -1), 3, names.bit) == [0, 1, 1]
    many = [f"eu-{number}" for number in range(HOLDER_NAMES_MAX + 5)]
    [bits] = as_received(many, (2**64 - 1,), 1, names.bit)
    assert len(names.names(bits)) == HOLDER_NAMES_MAX


def test_a_freed_bit_is_given_again():
    names = NameBits()
    first, second = names.bit("us-1"), names.bit("us-2")
    names.free("us-1")
    assert (names.known("us-1"), names.bit("us-3")) == (0, first)
    assert names.names(first | second) == ["us-3", "us-2"]
    assert names.chars_at_most(1) == 4 and names.chars_at_most(9) == 8
