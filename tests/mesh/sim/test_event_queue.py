"""Order is by time, then by when it was scheduled."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.event_queue import EventQueue


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5]), max_size=30))
def test_calls_are_made_by_time_and_then_in_the_order_of_scheduling(times):
    queue, seen = EventQueue(), []
    for number, when in enumerate(times):
        queue.at(when, lambda *what: seen.append(what), when, number)
    queue.run()
    assert seen == sorted((when, number) for number, when in enumerate(times))


def test_what_is_late_happens_at_once_and_after_what_is_due():
    queue, seen = EventQueue(), []
    queue.at(2.0, lambda: queue.at(1.0, lambda: seen.append(("late", queue.now))))
    queue.at(2.0, lambda: seen.append(("due", queue.now)))
    queue.run()
    assert seen == [("due", 2.0), ("late", 2.0)]


def test_stop_leaves_the_rest():
    queue, seen = EventQueue(), []
    queue.at(1.0, queue.stop)
    queue.at(2.0, seen.append, "never")
    queue.run()
    assert (seen, len(queue), queue.now) == ([], 1, 1.0)
