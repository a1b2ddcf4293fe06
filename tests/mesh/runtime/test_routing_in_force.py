"""Operators' routing over the configured one: what is followed, what is refused."""

import logging
from dataclasses import replace

import pytest

from mesh.core.model import events as ev
from mesh.core.model.settings import CHANGEABLE, RouterSettings
from mesh.runtime.routing_in_force import RouterRouting, as_keys, ordered_settings
from schemas.control import RegionControl, decode_control, encode_control
from schemas.exchange import Priority
from schemas.explain import RouterRequests, decode_answer, encode_answer
from schemas.settings import (
    ORDERED_KEYS,
    Pushing,
    PushingKind,
    RoutingTable,
    ordered_table,
)

BY_CLASS = RouterSettings(policy="mesh", policy_by_priority=((Priority.LOW, "round-robin"),))


class Edge:
    """A router's routing and the settings that its core was given."""

    def __init__(self, configured=RouterSettings()):  # noqa: B008 - frozen
        self.fed = []
        self.routing = RouterRouting(configured, self.fed.append)

    def order(self, seq, **routing):
        record = RegionControl(region="us", routing=routing, by="ann@desk")
        self.routing.order(seq, decode_control(encode_control(record)))
        return self.answer()

    def answer(self):
        """As it is read over the bus."""
        routing = self.routing.answer()
        answered = RouterRequests(region="us", router="r1", kept=0, routing=routing)
        return decode_answer(encode_answer(answered)).routing


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"policy": "e2:60"}, {"policy": "e2:60", "policy_by_priority": ()}),
        (
            {"policy": "e2", "policy_by_priority": {"high": "mesh"}},
            {"policy": "e2", "policy_by_priority": ((Priority.HIGH, "mesh"),)},
        ),
        (
            {"policy_by_priority": {"high": "e2"}},
            {"policy_by_priority": ((Priority.LOW, "round-robin"), (Priority.HIGH, "e2"))},
        ),
        ({"pushing": "outstanding:8"}, {"pushing": Pushing(PushingKind.OUTSTANDING, 8)}),
        ({"hops_max": 0, "own_ttft_goal_ms": 250}, {"hops_max": 0, "own_ttft_goal_s": 0.25}),
        ({}, {}),
    ],
)
def test_an_order_goes_over_the_configured_keys_and_leaves_the_others(keys, changed):
    assert ordered_settings(BY_CLASS, keys) == replace(BY_CLASS, **changed)


def test_the_core_is_told_once_whose_streams_are_to_be_moved():
    edge = Edge()
    edge.order(1, policy="e2")
    for seq, order in enumerate(({"moved": ("us-0",)}, {"moved": ("us-0",)}, {}), start=2):
        edge.routing.order(seq, RegionControl(region="us", routing={"policy": "e2"}, **order))
    moves = [one for one in edge.fed if isinstance(one, ev.MoveStreams)]
    assert moves == [ev.MoveStreams(("us-0",)), ev.MoveStreams()]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"policy": "fastest"}, "policy: unknown policy 'fastest'"),
        ({"policy": "mesh:-1"}, "policy: policy 'mesh': queue_s must be from 0 to 60"),
        ({"policy_by_priority": {"high": "fastest"}}, "policy_by_priority: unknown policy"),
        ({"policy_by_priority": {"urgent": "mesh"}}, "policy_by_priority"),
        ({"polcy": "mesh"}, "polcy is no key of [routing]; there are policy, "),
        ({"topology": "region-local"}, "topology can't change in a running router"),
        ({"gossip_kib_per_s": 0}, "gossip_kib_per_s can't change in a running router"),
        ({"proactive": {"idle_share": 0.1}}, "proactive is no key of [routing]"),
        ({"hops_max": True}, "hops_max"),
        ({"queue_delay_s_max": "10"}, "queue_delay_s_max"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key_and_changes_nothing(keys, said):
    with pytest.raises(ValueError) as caught:
        ordered_settings(RouterSettings(), keys)
    assert said in str(caught.value)
    edge = Edge()
    edge.order(1, pushing="blind")
    answer = edge.order(2, **keys)
    assert (answer.orders, answer.ordered) == (2, {"pushing": "blind"})
    assert "order 2 of ann@desk" in (answer.refused or "")
    assert len(edge.fed) == 1
    assert edge.routing.shown().refused == answer.refused
    assert edge.order(3).refused is None and len(edge.fed) == 2


def test_every_key_of_the_table_may_be_ordered_or_is_refused_by_name():
    for name in RoutingTable.model_fields:
        if name not in ORDERED_KEYS:
            with pytest.raises(ValueError, match="can't change in a running router"):
                ordered_table({name: 1})
    shown = as_keys(RouterSettings())
    assert tuple(shown) == ORDERED_KEYS
    changed = ordered_settings(RouterSettings(), {key: v for key, v in shown.items() if v})
    assert changed == RouterSettings()
    assert len(CHANGEABLE) == len(ORDERED_KEYS) + 2, "models and weights are not ordered"


def test_the_same_order_again_and_records_about_drains_change_nothing(caplog):
    caplog.set_level(logging.WARNING)
    edge = Edge()
    edge.order(1, policy="e2")
    edge.order(2, policy="e2")
    assert [event.settings.policy for event in edge.fed] == ["e2"]
    assert isinstance(edge.fed[0], ev.SettingsChanged)
    [line] = caplog.messages
    assert line.startswith("routing by order 1 (ann@desk): ") and "policy mesh -> e2" in line
    assert edge.routing.answer().orders == 2


def test_a_file_that_is_read_again_holds_where_no_order_does():
    edge = Edge()
    edge.order(1, policy="e2")
    edge.routing.reconfigure(RouterSettings(policy="skywalker", pushing="blind"))
    assert edge.routing.settings.policy == "e2"
    assert str(edge.routing.settings.pushing) == "blind"
    edge.order(2)
    assert edge.routing.settings.policy == "skywalker"
    assert [str(event.settings.pushing) for event in edge.fed] == ["pending", "blind", "blind"]


def test_after_an_order_that_was_refused_the_one_before_it_stays_when_the_file_is_read_again():
    edge = Edge()
    edge.order(1, policy="e2")
    edge.order(2, policy="fastest")
    edge.routing.reconfigure(RouterSettings(policy="skywalker", hops_max=0))
    assert (edge.routing.settings.policy, edge.routing.settings.hops_max) == ("e2", 0)
    assert "unknown policy" in edge.routing.answer().refused


def test_a_record_of_any_shape_is_bounded():
    edge = Edge()
    answer = edge.order(1, **{"x" * 60: "y" * 5000})
    assert answer.refused is not None and len(answer.refused) <= 500


def test_a_policy_of_a_class_is_answered_in_words_of_the_file():
    edge = Edge(BY_CLASS)
    assert edge.order(1).in_force["policy_by_priority"] == {"low": "round-robin"}
    answer = edge.order(2, policy_by_priority={"low": "e2", "high": "least-load"})
    assert answer.in_force["policy_by_priority"] == {"low": "e2", "high": "least-load"}
    assert answer.ordered == {"policy_by_priority": {"low": "e2", "high": "least-load"}}
