"""The hold queue: order of arrival per model and over all, a length that is never wrong."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.hold_queue import HoldQueue
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
