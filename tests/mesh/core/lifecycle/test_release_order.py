"""How many go before a request, where those with less to compute go first."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.lifecycle import release_order
from mesh.core.lifecycle.release_order import SORTED_MAX
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.requests.hold_queue import need_of
from schemas.exchange import Priority
from tests.mesh.core.build import beat, request, state

LONG, SHORT = Prompt(2000, ()), Prompt(100, ())  # at 1 ms a token they give way for 30 s, and 3 s


class Queue:
    """Held requests, and a replica that needs a millisecond a token."""

    def __init__(self, *held: Request):
        self.state = state(queue_delay_s_max=0.0)
        self.held, self.cached, self.judges_load = self.state.held, {}, True
        self.state.placer = self
        self.state.replicas.see(beat("a", prefill_s_per_token=0.001), 0.0)
        self.looked_up = 0
        for one in held:
            self.put(one)

    def hit_ratio(self, one):
        self.looked_up += 1
        return self.cached.get(one.key, 0.0)

    def put(self, one):
        self.held.put(one)
        release_order.joined(self.state, one)

    def turns(self):
        return [one.key for one in release_order.in_order(self.state, 1e6)]


def asked(key, at=0.0, prompt=LONG, **fields):
    return request(key, arrived_at=at, prompt=prompt, **fields)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 2000), st.sampled_from(Priority)),
    min_size=3,
    max_size=30,
)


def held_as(requests):
    return [
        asked(key, at=float(at), prompt=Prompt(tokens, ()), priority=priority)
        for key, (at, tokens, priority) in enumerate(requests)
    ]


@given(REQUESTS, st.booleans())
def test_a_newcomer_is_told_the_place_that_it_gets(requests, tried):
    *held, newcomer = held_as(requests)
    queue = Queue(*held)
    if tried:
        queue.turns()
    told = release_order.ahead(queue.state, newcomer)
    queue.held.put(newcomer)
    assert told == queue.turns().index(newcomer.key)


@given(REQUESTS, st.integers(0, 2**32))
def test_those_who_are_held_know_their_place_also_when_others_have_left_and_come(requests, seed):
    held = held_as(requests)
    queue, dice = Queue(), Random(seed)
    for one in held:
        queue.put(one)
        if dice.random() < 0.3:
            queue.turns()
        if dice.random() < 0.3:
            queue.held.remove(dice.choice(held))
    told = {one.key: release_order.ahead(queue.state, one) for one in held if one in queue.held}
    assert told == {key: place for place, key in enumerate(queue.turns())}


@given(REQUESTS, st.integers(0, 50))
def test_one_that_leaves_and_comes_back_is_not_before_itself(requests, at):
    held = held_as(requests)
    queue, gone = Queue(*held), held[0]
    back = replace(gone, arrived_at=float(at))
    told = release_order.ahead(queue.state, back, gone=gone)
    queue.held.remove(gone)
    queue.put(back)
    assert told == queue.turns().index(back.key)


def test_a_short_newcomer_is_not_told_to_wait_for_long_ones():
    queue = Queue(asked(1), asked(2), asked(3))
    assert release_order.ahead(queue.state, asked(9, at=5.0, prompt=SHORT)) == 0
    assert release_order.ahead(queue.state, asked(10, at=5.0)) == 3
    assert release_order.ahead(queue.state, asked(11, at=28.0, prompt=SHORT)) == 3


def test_another_models_crowd_leaves_no_turns():
    crowd = [asked(key, model="a") for key in range(SORTED_MAX)]
    queue = Queue(*crowd, asked(901, at=1.0, model="b"))
    newcomer = asked(902, at=2.0, prompt=SHORT, model="b")
    assert release_order.ahead(queue.state, newcomer) == 1
    queue.put(newcomer)
    assert queue.turns()[-2:] == [901, 902]
    queue.held.remove(crowd[0])
    queue.held.remove(crowd[1])
    assert queue.turns()[-2:] == [902, 901] and release_order.ahead(queue.state, newcomer) == 0


def test_one_that_is_held_for_another_model_now_has_no_turn_of_the_old_one():
    queue = Queue(asked(1), asked(2, prompt=SHORT))
    assert release_order.ahead(queue.state, asked(1)) == 1
    queue.held.remove(asked(2))
    queue.put(asked(2, prompt=SHORT, model="b"))
    assert release_order.ahead(queue.state, asked(1)) == 0


def test_while_nothing_is_tried_no_more_is_kept_than_twice_what_is_sorted():
    queue = Queue()
    for key in range(10 * SORTED_MAX):
        queue.put(asked(key))
        queue.held.remove(asked(key))
    assert len(queue.state.turns) <= 2 * SORTED_MAX


def test_what_is_cached_of_a_newcomer_is_looked_up_once():
    queue = Queue(asked(1), asked(2))
    queue.turns()
    before, newcomer = queue.looked_up, asked(9, at=5.0)
    queue.cached = {9: 0.95}
    assert [release_order.ahead(queue.state, newcomer) for _ in range(3)] == [0, 0, 0]
    assert queue.looked_up == before + 1


def test_where_the_policy_does_not_judge_load_it_is_the_place_by_arrival():
    queue = Queue(asked(1), asked(2))
    queue.judges_load = False
    assert release_order.ahead(queue.state, asked(9, at=5.0, prompt=SHORT)) == 2
    assert queue.turns() == [1, 2]


def test_beyond_the_first_ones_it_is_the_place_by_arrival():
    queue = Queue(*(asked(key) for key in range(SORTED_MAX)))
    assert release_order.ahead(queue.state, asked(999, at=5.0, prompt=SHORT)) == SORTED_MAX
    queue.held.remove(asked(0))
    assert release_order.ahead(queue.state, asked(999, at=5.0, prompt=SHORT)) == 0


@pytest.mark.parametrize("own", [False, True])
def test_requests_that_no_replica_serves_do_not_count_unless_it_is_one_of_them(own):
    labelled = replace(asked(1), residency=("eu",))
    queue = Queue(labelled, asked(2), asked(3))
    queue.turns()
    newcomer = asked(9, at=1.0, prompt=LONG)
    if own:
        newcomer = replace(newcomer, residency=("eu",))
    assert release_order.ahead(queue.state, newcomer, {need_of(labelled)}) == (3 if own else 2)
    short = replace(newcomer, key=10, prompt=SHORT)
    assert release_order.ahead(queue.state, short, {need_of(labelled)}) == 0
