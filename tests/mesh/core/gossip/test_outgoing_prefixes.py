"""What is published next: the most used and latest paths, parents first, within a bound."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mesh.core.gossip.publisher import DROPPED_AT_ONCE, HALF_LIFE_S, WAITING_MAX, OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes
from mesh.core.prefixes.prefix_index import PrefixIndex

ALL = 1000


def prefixes(blocks_max=ALL):
    return OutgoingPrefixes(blocks_max)


def test_what_is_held_is_published_once_root_first():
    outgoing = prefixes()
    outgoing.used((1, 2, 3), 0.0)
    assert outgoing.take(ALL) == ((1, 2, 3), ())
    assert outgoing.is_empty and set(outgoing.published) == {1, 2, 3}
    outgoing.used((1, 2, 3, 4), 2.0)
    assert outgoing.take(ALL) == ((4,), ())


def test_what_is_lost_before_it_was_published_is_never_published():
    outgoing = prefixes()
    outgoing.used((1, 2), 0.0)
    outgoing.lost([2])
    assert outgoing.take(ALL) == ((1,), ())
    outgoing.lost([9])
    assert outgoing.is_empty


def test_what_comes_back_before_its_loss_was_published_was_never_lost():
    outgoing = prefixes()
    outgoing.used((1, 2), 0.0)
    outgoing.take(ALL)
    outgoing.lost([2])
    outgoing.used((1, 2), 1.0)
    assert outgoing.is_empty
    outgoing.lost([2])
    assert outgoing.take(ALL) == ((), (2,))
    assert outgoing.published == (1,)


def test_shared_blocks_go_first():
    outgoing = prefixes()
    outgoing.used((1, 10, 11), 0.0)
    outgoing.used((1, 20), 0.0)
    outgoing.used((30, 31), 0.0)
    assert outgoing.take(1) == ((1,), ())
    assert outgoing.take(2)[0] == (10, 11)


def test_old_uses_count_less():
    outgoing = prefixes()
    for _ in range(3):
        outgoing.used((1,), 0.0)
    outgoing.used((2,), 0.0)
    outgoing.used((2,), 3 * HALF_LIFE_S)
    assert outgoing.take(1) == ((2,), ())


def test_values_hold_for_as_long_as_a_router_runs():
    outgoing = prefixes()
    month_s = 30 * 86_400.0
    for day in range(30):
        outgoing.used((1,), day * 86_400.0)
    outgoing.used((2,), month_s)
    outgoing.used((3,), month_s)
    outgoing.used((3,), month_s + 1.0)
    assert [outgoing.take(1)[0] for _ in range(3)] == [(3,), (2,), (1,)]


def test_beyond_its_bound_the_longest_unused_is_published_as_lost():
    outgoing = prefixes(blocks_max=4)
    outgoing.used((1, 2), 0.0)
    outgoing.used((3, 4), 1.0)
    outgoing.take(ALL)
    outgoing.used((1, 2, 5), 2.0)
    assert outgoing.take(ALL) == ((5,), (4,))  # a leaf, not its parent
    assert set(outgoing.published) == {1, 2, 3, 5}


def test_what_waits_too_long_is_dropped_and_comes_back_with_its_next_use():
    outgoing = prefixes(blocks_max=2 * WAITING_MAX)
    outgoing.used((1,), 0.0)
    outgoing.used(tuple(range(2, WAITING_MAX + 2)), 0.0)
    assert outgoing.waiting == WAITING_MAX - DROPPED_AT_ONCE
    assert outgoing.dropped == DROPPED_AT_ONCE + 1
    outgoing.take(2 * WAITING_MAX)
    assert 1 not in outgoing.published
    outgoing.used((1,), 1.0)
    assert outgoing.take(ALL)[0] == (1,)


PATHS = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
    lambda turns: tuple(hash(tuple(turns[: n + 1])) for n in range(len(turns)))
)


@example([((1, 2, 3), 1), ((1, 2), 2)])  # the parent's second use comes after the child's first
@given(st.lists(st.tuples(PATHS, st.integers(1, 6)), max_size=40))
def test_a_child_is_never_published_before_its_parent(steps):
    outgoing, parents = prefixes(), {}
    for number, (path, count) in enumerate(steps):
        parents |= dict(zip(path[1:], path, strict=False))
        outgoing.used(path, float(number))
        known = set(outgoing.published)
        for block in outgoing.take(count)[0]:
            assert block not in parents or parents[block] in known
            known.add(block)


@given(st.lists(st.tuples(st.booleans(), PATHS, st.integers(0, 8)), max_size=40))
def test_a_receiver_has_what_was_published(steps):
    outgoing, listener = prefixes(blocks_max=12), set()
    for number, (is_use, path, count) in enumerate(steps):
        if is_use:
            outgoing.used(path, float(number))
        else:
            outgoing.lost([path[-1]])
        gained, lost = outgoing.take(count)
        assert len(gained) + len(lost) <= count
        listener = (listener | set(gained)) - set(lost)
        assert listener == set(outgoing.published)


def test_blocks_go_with_their_holders_and_again_when_those_change():
    outgoing = prefixes()
    outgoing.used((1, 2), 0.0, "us-0")
    outgoing.used((1,), 0.1, "us-1")
    assert outgoing.take(ALL) == ((1, 2), ())
    assert outgoing.holders((1, 2)) == (("us-0", "us-1"), (3, 1))
    outgoing.used((1, 2), 1.0, "us-0")
    assert outgoing.is_empty  # nothing new
    outgoing.used((1, 2), 1.1, "us-1")
    assert outgoing.take(ALL) == ((2,), ())
    outgoing.left("us-0", (1, 2))
    outgoing.left("us-9", (1,))  # which was never named
    assert set(outgoing.take(ALL)[0]) == {1, 2}
    assert outgoing.holders((1, 2)) == (("us-1",), (1, 1))
    outgoing.left("us-1", (1,))  # held by one that is not named
    assert outgoing.take(ALL) == ((1,), ())
    assert outgoing.holders((1, 2)) == (("us-1",), (0, 1))


def test_a_use_that_peers_may_not_know_of_names_nobody():
    outgoing = prefixes()
    outgoing.used((1,), 0.0, "us-0")
    outgoing.take(ALL)
    outgoing.is_paused = True
    outgoing.used((1, 2), 1.0, "us-1")
    assert outgoing.is_empty
    outgoing.is_paused = False
    outgoing.left("us-1", (1,))
    assert outgoing.is_empty and outgoing.holders((1,)) == (("us-0",), (1,))


def test_what_is_held_again_is_held_by_that_replica_alone():
    outgoing = prefixes()
    outgoing.used((1,), 0.0, "us-0")
    outgoing.take(ALL)
    outgoing.lost([1])
    outgoing.gone("us-0")
    outgoing.used((1,), 1.0, "us-1")
    assert outgoing.take(ALL) == ((1,), ())
    assert outgoing.holders((1,)) == (("us-1",), (1,))


def test_changed_holders_come_after_new_blocks_and_within_the_same_budget():
    outgoing = prefixes()
    outgoing.used((1, 2, 3), 0.0, "us-0")
    outgoing.take(ALL)
    outgoing.used((1, 2, 3, 4), 1.0, "us-1")
    assert outgoing.take(2) == ((4, 3), ())
    assert outgoing.take(2) == ((2, 1), ())
    assert outgoing.is_empty


@pytest.mark.parametrize("seed", range(20))
def test_peers_know_the_holders_of_every_block(seed):
    dice, index, outgoing = Random(seed), PrefixIndex(12), prefixes(blocks_max=30)
    index.outgoing, known = outgoing, RemotePrefixes()
    origin = Origin("us", "r1")
    known.trust(origin, True)
    for number in range(400):
        path = tuple(dice.randrange(3) + 3 * depth for depth in range(dice.randrange(1, 6)))
        index.insert(f"us-{dice.randrange(3)}", path, float(number))
        if dice.random() < 0.05:
            index.forget(f"us-{dice.randrange(3)}")
        gained, lost = outgoing.take(dice.randrange(6))
        known.remove(origin, lost)
        known.add(origin, gained, *outgoing.holders(gained))
    gained, lost = outgoing.take(ALL)
    known.remove(origin, lost)
    known.add(origin, gained, *outgoing.holders(gained))
    for block in known.blocks(origin):
        held_by = {owner for owner in index.owners if block in dict(index.held(owner))}
        assert set(known.holders((block,), ("us",))["us"]) - {""} == held_by
