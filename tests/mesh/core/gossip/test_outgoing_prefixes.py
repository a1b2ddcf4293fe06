"""What is told next: the most used and latest paths, parents first, within a bound."""

from hypothesis import example, given
from hypothesis import strategies as st

from mesh.core.gossip.outgoing_prefixes import HALF_LIFE_S, WAITING_MAX, OutgoingPrefixes

ALL = 1000


def news(blocks_max=ALL):
    return OutgoingPrefixes(blocks_max)


def test_what_is_held_is_told_once_root_first():
    told = news()
    told.used((1, 2, 3), 0.0)
    assert told.take(ALL) == ((1, 2, 3), ())
    assert told.is_quiet and set(told.told) == {1, 2, 3}
    told.used((1, 2, 3, 4), 2.0)
    assert told.take(ALL) == ((4,), ())


def test_what_is_lost_before_it_was_told_is_never_mentioned():
    told = news()
    told.used((1, 2), 0.0)
    told.lost([2])
    assert told.take(ALL) == ((1,), ())
    told.lost([9])
    assert told.is_quiet


def test_what_comes_back_before_its_loss_was_told_was_never_away():
    told = news()
    told.used((1, 2), 0.0)
    told.take(ALL)
    told.lost([2])
    told.used((1, 2), 1.0)
    assert told.is_quiet
    told.lost([2])
    assert told.take(ALL) == ((), (2,))
    assert told.told == (1,)


def test_shared_blocks_go_first():
    told = news()
    told.used((1, 10, 11), 0.0)
    told.used((1, 20), 0.0)
    told.used((30, 31), 0.0)
    assert told.take(1) == ((1,), ())
    assert told.take(2)[0] == (10, 11)


def test_old_uses_count_less():
    told = news()
    for _ in range(3):
        told.used((1,), 0.0)
    told.used((2,), 0.0)
    told.used((2,), 3 * HALF_LIFE_S)
    assert told.take(1) == ((2,), ())


def test_values_hold_for_as_long_as_a_router_runs():
    told = news()
    month_s = 30 * 86_400.0
    for day in range(30):
        told.used((1,), day * 86_400.0)
    told.used((2,), month_s)
    told.used((3,), month_s)
    told.used((3,), month_s + 1.0)
    assert [told.take(1)[0] for _ in range(3)] == [(3,), (2,), (1,)]


def test_beyond_its_bound_the_longest_unused_is_untold():
    told = news(blocks_max=4)
    told.used((1, 2), 0.0)
    told.used((3, 4), 1.0)
    told.take(ALL)
    told.used((1, 2, 5), 2.0)
    assert told.take(ALL) == ((5,), (4,))  # a leaf, not its parent
    assert set(told.told) == {1, 2, 3, 5}


def test_what_waits_too_long_is_dropped_and_comes_back_with_its_next_use():
    told = news(blocks_max=2 * WAITING_MAX)
    told.used((1,), 0.0)
    told.used(tuple(range(2, WAITING_MAX + 2)), 0.0)
    assert len(told.take(2 * WAITING_MAX)[0]) == WAITING_MAX
    assert 1 not in told.told
    told.used((1,), 1.0)
    assert told.take(ALL)[0] == (1,)


PATHS = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
    lambda turns: tuple(hash(tuple(turns[: n + 1])) for n in range(len(turns)))
)


@example([((1, 2, 3), 1), ((1, 2), 2)])  # the parent's second use comes after the child's first
@given(st.lists(st.tuples(PATHS, st.integers(1, 6)), max_size=40))
def test_a_child_is_never_told_before_its_parent(steps):
    told, parents = news(), {}
    for number, (path, count) in enumerate(steps):
        parents |= dict(zip(path[1:], path, strict=False))
        told.used(path, float(number))
        known = set(told.told)
        for block in told.take(count)[0]:
            assert block not in parents or parents[block] in known
            known.add(block)


@given(st.lists(st.tuples(st.booleans(), PATHS, st.integers(0, 8)), max_size=40))
def test_a_listener_has_what_was_told(steps):
    told, listener = news(blocks_max=12), set()
    for number, (is_use, path, count) in enumerate(steps):
        if is_use:
            told.used(path, float(number))
        else:
            told.lost([path[-1]])
        gained, lost = told.take(count)
        assert len(gained) + len(lost) <= count
        listener = (listener | set(gained)) - set(lost)
        assert listener == set(told.told)
