"""The hold queue: classes, order of arrival, models apart, and a length that is never wrong."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.served_names import served_name
from mesh.core.requests.hold_queue import (
    HEAD_START_S,
    LOWEST_FIRST,
    HoldQueue,
    effective_arrival,
    need_of,
)
from schemas.exchange import Priority
from schemas.http import EMBEDDINGS, MESSAGES
from schemas.ids import ModelId
from tests.mesh.core.build import MODEL, request

OTHER = ModelId("other")


def keys(queue):
    return [held.key for held in queue]


def test_order_is_arrival_whenever_it_was_put():
    queue = HoldQueue(10)
    for key, arrived_at in ((3, 3.0), (1, 1.0), (2, 2.0), (5, 2.0)):
        queue.put(request(key, arrived_at=arrived_at))
    assert keys(queue) == [1, 2, 5, 3]


def test_a_model_on_its_generating_routes_is_one_kind_of_work_and_embeddings_another():
    message, vector = served_name(MODEL, MESSAGES), served_name(MODEL, EMBEDDINGS)
    queue = HoldQueue(10)
    for key, model in enumerate((message, MODEL, vector, message)):
        queue.put(request(key, arrived_at=float(key), model=model))
    assert [queue.waiting(name) for name in (MODEL, message, vector)] == [3, 3, 1]
    later = request(9, arrived_at=9.0)
    assert queue.ahead(later) == 3
    assert queue.ahead(later, without={need_of(request(0, model=message))}) == 1
    assert queue.next_of(MODEL).key == 0
    assert set(queue.models()) == {message, MODEL, vector}
    assert set(queue.works()) == {MODEL, vector}
    for key, model in enumerate((message, MODEL, vector, message)):
        assert queue.remove(request(key, arrived_at=float(key), model=model))
    assert (queue.works(), queue.models(), queue.waiting(MODEL)) == ((), (), 0)


def test_models_have_lines_of_their_own():
    queue = HoldQueue(10)
    queue.put(request(1, arrived_at=1.0))
    queue.put(request(2, arrived_at=0.0, model=OTHER))
    assert (queue.waiting(MODEL), queue.waiting(OTHER), queue.waiting(ModelId("x"))) == (1, 1, 0)
    assert keys(queue) == [2, 1]
    assert sorted(queue.models()) == [MODEL, OTHER]


def test_full_counts_over_all_models():
    queue = HoldQueue(2)
    queue.put(request(1))
    assert not queue.is_full
    queue.put(request(2, model=OTHER))
    assert queue.is_full


def test_one_that_comes_back_has_its_place_in_a_full_queue():
    queue = HoldQueue(1)
    queue.put(request(2, arrived_at=2.0))
    queue.put(request(1, arrived_at=1.0))
    assert (keys(queue), len(queue), queue.is_full) == ([1, 2], 2, True)


def test_removing_while_walking_is_allowed():
    queue = HoldQueue(10)
    held = [request(key, arrived_at=float(key)) for key in range(6)]
    for one in held:
        queue.put(one)
    assert [one.key for one in queue if queue.remove(one)] == list(range(6))
    assert (len(queue), queue.models(), queue.remove(held[0])) == (0, (), False)


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 3), st.sampled_from([MODEL, OTHER])),
    max_size=40,
)


@given(STEPS)
def test_it_is_a_sorted_set(steps):
    queue, plain = HoldQueue(100), {}
    for put, key, arrived_at, model in steps:
        if put and key not in plain:
            plain[key] = request(key, arrived_at=float(arrived_at), model=model)
            queue.put(plain[key])
        elif not put:
            held = plain.pop(key, None)
            assert queue.remove(held or request(key)) is (held is not None)
    walked = list(queue)
    assert {one.key for one in walked} == set(plain)
    assert len(queue) == len(walked) == len(plain)
    assert all((a.arrived_at, a.key) < (b.arrived_at, b.key) for a, b in pairwise(walked))
    assert {model: queue.waiting(model) for model in queue.models()} == {
        model: sum(one.model == model for one in walked) for model in {o.model for o in walked}
    }


HELD = st.lists(
    st.tuples(st.sampled_from(Priority), st.floats(0.0, 60.0), st.sampled_from([MODEL, OTHER])),
    min_size=1,
    max_size=30,
)


def held_of(rows):
    return [
        request(key, arrived_at=arrived_at, priority=priority, model=model)
        for key, (priority, arrived_at, model) in enumerate(rows)
    ]


def test_a_higher_class_goes_first_for_a_head_start():
    queue = HoldQueue(10)
    late = HEAD_START_S + 1.0
    queue.put(request(1, arrived_at=0.0, priority=Priority.LOW))
    queue.put(request(2, arrived_at=1.0))
    queue.put(request(3, arrived_at=2.0, priority=Priority.HIGH))
    queue.put(request(4, arrived_at=late + 1.0, priority=Priority.HIGH))
    queue.put(request(5, arrived_at=late + 1.0))
    assert keys(queue) == [3, 2, 4, 1, 5]


@given(HELD)
def test_nobody_is_passed_by_who_came_two_head_starts_later(rows):
    queue, held = HoldQueue(100), held_of(rows)
    for one in held:
        queue.put(one)
    walked = list(queue)
    for place, one in enumerate(walked):
        for before in walked[:place]:
            assert before.arrived_at <= one.arrived_at + 2 * HEAD_START_S + 1e-9
            if before.priority is one.priority:
                assert before.arrived_at <= one.arrived_at + 1e-9  # of a float's rounding


@given(HELD, st.sampled_from(Priority))
def test_a_new_request_displaces_the_newest_of_the_longest_queue_or_of_a_lower_class(
    rows, priority
):
    queue, held = HoldQueue(100), held_of(rows)
    for one in held:
        queue.put(one)
    rank = LOWEST_FIRST.index
    models = MODEL, OTHER
    longest = max(models, key=queue.waiting)
    for model in models:
        shorter = queue.waiting(longest) > queue.waiting(model) + 1
        below = [
            one
            for one in held
            if shorter and one.model == longest and rank(one.priority) <= rank(priority)
        ] or [one for one in held if one.model == model and rank(one.priority) < rank(priority)]
        newest = max(
            below,
            key=lambda one: (-rank(one.priority), effective_arrival(one), one.key),
            default=None,
        )
        assert held and queue.gives_way(request(99, priority=priority, model=model)) == newest


@pytest.mark.parametrize("priority", Priority)
def test_a_request_for_another_model_displaces_none_of_a_higher_class(priority):
    queue = HoldQueue(3)
    for key in (1, 2, 3):
        queue.put(request(key, priority=Priority.NORMAL))
    last = queue.gives_way(request(9, model=OTHER, priority=priority))
    assert (last is None) == (priority is Priority.LOW)


def test_one_that_came_back_is_not_displaced():
    queue = HoldQueue(2)
    queue.put(request(1, priority=Priority.LOW), comes_back=True)
    high = request(3, priority=Priority.HIGH)
    assert queue.gives_way(high) is None
    queue.put(request(2))
    assert queue.gives_way(high).key == 2
    assert queue.remove(request(2))
    assert queue.gives_way(high) is None


def test_a_model_with_a_limit_of_its_own_leaves_room_for_others():
    queue = HoldQueue(10, model_max={"a": 2})
    queue.put(request(1, model="a", priority=Priority.LOW))
    assert not queue.is_full_for(request(2, model="a"))
    queue.put(request(2, model="a on /v1/messages"))  # another path of the same work
    full = request(3, model="a")
    assert queue.is_full_for(full) and not queue.is_full_for(request(3, model="b"))
    assert queue.gives_way(full).key == 1  # of its own, a lower class alone
    assert queue.gives_way(request(3, model="a", priority=Priority.LOW)) is None


@given(HELD)
def test_ahead_counts_those_of_the_model_who_stand_before(rows):
    queue, held = HoldQueue(100), held_of(rows)
    for one in held[1:]:
        queue.put(one)
    mine = held[0]
    before = [
        one
        for one in held[1:]
        if one.model == mine.model
        and (effective_arrival(one), one.key) < (effective_arrival(mine), mine.key)
    ]
    assert queue.ahead(mine) == len(before)


def test_kinds_are_models_on_one_ground():
    queue = HoldQueue(10)
    held = [request(1), request(2, residency=("eu",)), request(3, residency=("eu",))]
    for one in held:
        queue.put(one)
    assert (
        len(queue.held_needs),
        queue.alike(need_of(held[0])),
        queue.alike(need_of(held[1])),
    ) == (2, 1, 2)
    assert set(queue.held_needs) == {need_of(held[0]), need_of(held[1])}
    queue.remove(held[1])
    queue.remove(held[2])
    assert set(queue.held_needs) == {need_of(held[0])}
    assert (len(queue.held_needs), queue.alike(need_of(held[1]))) == (1, 0)


def test_the_next_of_a_model_is_whoever_stands_first():
    queue = HoldQueue(10)
    assert queue.next_of(MODEL) is None
    held = [request(key, arrived_at=10.0 - key) for key in (1, 9, 5)]
    for one in held:
        assert one not in queue
        queue.put(one)
        assert one in queue
    assert queue.next_of(MODEL) is held[1]
    queue.remove(held[1])
    assert queue.next_of(MODEL) is held[2]
    assert queue.next_of(ModelId("other")) is None
