"""The order of trying: Preble's shares of a batch, and no request left behind."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.events import HeartbeatSeen, RequestArrived
from mesh.core.model.prompt import Prompt
from mesh.core.requests.hold_queue import GROUPS, HoldQueue, PriorityGroups, make_order
from schemas.exchange import Priority
from schemas.ids import ModelId
from schemas.settings import HoldOrder
from tests.mesh.core.build import MODEL, beat, core, request

ROUND = GROUPS * (GROUPS + 1) // 2  # Preble's 55
OTHER = ModelId("other")


def by_tokens(held):
    """Stands for an index: a prompt of n tokens has n percent cached."""
    return held.prompt.tokens / 100.0


def held(key, percent, **fields):
    return request(key, arrived_at=float(key), prompt=Prompt(percent, ()), **fields)


def queue_of(*requests):
    queue = HoldQueue(10_000, PriorityGroups(by_tokens))
    for one in requests:
        queue.put(one)
    return queue


def release(queue, most):
    """What a router with room for `most` does."""
    released = []
    for one in queue:
        if len(released) == most:
            break
        queue.release(one)
        released.append(one)
    return released


@pytest.mark.parametrize(
    ("percent", "group"), [(0, 1), (9, 1), (19, 1), (20, 2), (63, 6), (99, 9), (100, 10)]
)
def test_the_group_is_the_tenth_that_is_cached(percent, group):
    assert PriorityGroups(by_tokens).group(held(1, percent)) == group


@pytest.mark.parametrize(("priority", "group"), [("high", 10), ("normal", 6), ("low", 1)])
def test_high_and_low_have_their_groups_whatever_is_cached(priority, group):
    assert PriorityGroups(by_tokens).group(held(1, 63, priority=Priority(priority))) == group


def test_of_fifty_five_the_tenth_group_gets_ten_the_ninth_nine():
    requests = [held(100 * group + n, 10 * group) for n in range(20) for group in range(1, 11)]
    served = [one.prompt.tokens // 10 for one in release(queue_of(*requests), ROUND)]
    assert Counter(served) == {group: group for group in range(1, 11)}
    assert served == sorted(served, reverse=True)


def test_shares_are_kept_over_many_small_rooms():
    requests = [held(100 * group + n, 10 * group) for n in range(40) for group in (1, 5, 10)]
    queue = queue_of(*requests)
    served = [release(queue, 1)[0].prompt.tokens // 10 for _ in range(32)]
    assert Counter(served) == {10: 20, 5: 10, 1: 2}


def test_inside_a_group_it_is_first_come():
    queue = queue_of(held(3, 95), held(1, 91), held(2, 99), held(9, 0))
    assert [one.key for one in queue] == [1, 2, 3, 9]


def test_those_who_are_stuck_cost_the_others_nothing():
    """Walking on past a group is not its release: its share waits for it."""
    queue = queue_of(*(held(n, 100, model=OTHER) for n in range(20)), held(50, 0), held(51, 0))
    for one in queue:
        if one.model == MODEL:
            queue.release(one)
    assert (queue.waiting(MODEL), queue.waiting(OTHER)) == (0, 20)
    assert [one.key for one in release(queue, 3)] == [0, 1, 2]


@given(
    ahead=st.lists(st.integers(0, 100), max_size=30),
    percent=st.integers(0, 100),
    after=st.lists(st.integers(0, 100), min_size=1, max_size=20),
)
def test_nobody_starves(ahead, percent, after):
    """However many better ones keep coming: within a round for each share of its group."""
    queue = queue_of(*(held(key, share) for key, share in enumerate(ahead)))
    mine = held(1_000, percent)
    queue.put(mine)
    turns = PriorityGroups(by_tokens)
    group = turns.group(mine)
    before_me = sum(turns.group(held(0, share)) == group for share in ahead)
    bound = ROUND * ceil((before_me + 1) / group)
    key, releases = 2_000, 0
    while queue.remove(mine):
        queue.put(mine)
        for share in after:  # as many come as are released, and they never run out
            key += 1
            queue.put(held(key, share))
        releases += len(release(queue, len(after)))
        assert releases <= bound + len(after)


def test_first_come_knows_no_groups():
    order = make_order(HoldOrder.FIRST_COME, by_tokens)
    queue = HoldQueue(10, order)
    for one in (held(2, 100), held(1, 0), held(3, 50)):
        queue.put(one)
    assert [one.key for one in release(queue, 3)] == [1, 2, 3]


def test_a_router_tries_the_best_cached_first():
    router = core(policy="prefix-tree", hold_order=HoldOrder.HIT_RATIO)
    router.handle(seen("a", 1), 0.0)
    router.handle(arrived(1, "ABCD"), 0.0)
    router.handle(seen("a", 2, pending=1, running=8), 0.1)
    for key, text in ((2, "ZZZZ"), (3, "ABCE")):
        router.handle(arrived(key, text), 0.1)
    assert [one.key for one in router.held] == [3, 2]


def seen(name, seq, **fields):
    return HeartbeatSeen(beat(name, seq, **fields))


def arrived(key, text):
    return RequestArrived(request(key, text, float(key)))
