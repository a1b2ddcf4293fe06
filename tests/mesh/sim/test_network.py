"""Delays, order, loss and cuts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.event_queue import EventQueue
from mesh.sim.network import BUS_S, HTTP_S, Network
from mesh.sim.rtt import RttTable
from tests.mesh.sim.build import EU, US


def make(jitter_s=0.0, loss=0.0, seed=1):
    queue = EventQueue()
    return queue, Network(queue, RttTable(), Random(seed), jitter_s=jitter_s, loss=loss)


def test_each_kind_of_way_takes_its_time():
    queue, network = make()
    seen = {}
    for name, send, to in (
        ("bus", network.send, US),
        ("http", network.send_http, US),
        ("wide", network.send, EU),
        ("wide http", network.send_http, EU),
    ):
        send(US, to, lambda name=name: seen.setdefault(name, queue.now))
    queue.run()
    assert seen == {
        "bus": BUS_S,
        "http": HTTP_S,
        "wide": pytest.approx(0.040),
        "wide http": pytest.approx(0.040 + HTTP_S),
    }


def test_a_counter_of_messages_gets_those_between_regions_even_over_a_cut_link():
    queue, network = make()
    sent, seen = [], []
    network.on_send = lambda link, call, args: sent.append((link, call, args))
    network.send(US, US, seen.append, 1)
    network.send(US, EU, seen.append, 2)
    network.send_state(EU, US, seen.append, 3)
    network.cut(US, EU)
    network.send(US, EU, seen.append, 4)
    queue.run()
    assert [(link, args) for link, _, args in sent] == [
        ((US, EU), (2,)),
        ((EU, US), (3,)),
        ((US, EU), (4,)),
    ]
    assert sorted(seen) == [1, 2, 3]


@given(
    gaps=st.lists(st.floats(0.0, 0.01), min_size=1, max_size=50),
    jitter_s=st.floats(0.001, 0.5),
    seed=st.integers(0, 1000),
)
def test_no_message_overtakes_another_of_its_link(gaps, jitter_s, seed):
    queue, network = make(jitter_s=jitter_s, seed=seed)
    seen = []
    at = 0.0
    for number, gap in enumerate(gaps):
        at += gap
        queue.at(at, network.send, US, EU, seen.append, number)
    queue.run()
    assert seen == list(range(len(gaps)))
    assert queue.now >= at + 0.040


def test_a_share_of_state_messages_is_lost_and_no_other():
    queue, network = make(loss=0.3)
    states, others = [], []
    for _ in range(2000):
        network.send_state(US, EU, states.append, 1)
        network.send(US, EU, others.append, 1)
    queue.run()
    assert len(others) == 2000
    assert 0.65 < len(states) / 2000 < 0.75


def test_a_cut_link_swallows_what_is_sent_while_it_is_cut():
    queue, network = make()
    seen = []
    network.send(US, EU, seen.append, "before")
    queue.at(0.01, network.cut, US, EU)
    queue.at(0.02, network.send, US, EU, seen.append, "there")
    queue.at(0.02, network.send, EU, US, seen.append, "back")
    queue.at(0.02, network.send, US, US, seen.append, "inside")
    queue.at(0.03, network.heal, EU, US)
    queue.at(0.04, network.send, EU, US, seen.append, "after")
    queue.run()
    assert seen == ["inside", "before", "after"]


def test_two_cuts_of_one_link_must_both_end():
    queue, network = make()
    seen = []
    for act in (network.cut, network.cut, network.heal):
        act(US, EU)
    network.send(US, EU, seen.append, 1)
    network.heal(US, EU)
    network.send(US, EU, seen.append, 2)
    queue.run()
    assert seen == [2]
