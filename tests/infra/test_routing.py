"""`[routing]`: a region's choices over the mesh's, and every mistake named with what to do."""

import re

import pytest

from infra.topology import DEFAULT_FILE, TopologyError, parse
from schemas.exchange import Priority
from schemas.settings import RoutingScope, RoutingTable

DEFAULT = DEFAULT_FILE.read_text()


def topology(whole="", us="", eu=""):
    text = f"[routing]\n{whole}\n" + DEFAULT
    text += f"\n[regions.us.routing]\n{us}\n[regions.eu.routing]\n{eu}\n"
    return parse(text, "mesh.toml")


def test_a_file_without_routing_chooses_nothing():
    assert parse(DEFAULT, "mesh.toml").routing_of("us") == RoutingTable()


def test_a_region_overrides_single_keys():
    made = topology(
        whole='policy = "mesh"\npushing = "pending"\npolicy_by_priority = {low = "least-load"}',
        us='policy = "skywalker"\npolicy_by_priority = {high = "smg"}\nhops_max = 0',
    )
    us, eu = made.routing_of("us"), made.routing_of("eu")
    assert (us.policy, us.pushing, us.hops_max) == ("skywalker", "pending", 0)
    assert us.policy_by_priority == {Priority.LOW: "least-load", Priority.HIGH: "smg"}
    assert (eu.policy, eu.hops_max) == ("mesh", None)
    assert eu.policy_by_priority == {Priority.LOW: "least-load"}


def test_a_region_local_region_neither_forwards_nor_is_forwarded_to():
    made = topology(us='topology = "region-local"')
    assert made.asked_by("us") == ()
    assert made.asked_by("eu") == ("ap",)
    assert made.peers("eu") == ("ap", "us")


def test_a_region_may_be_of_the_mesh_where_others_are_not():
    made = topology(
        whole='topology = "region-local"', us='topology = "mesh"', eu='topology = "mesh"'
    )
    assert made.routing_of("ap").topology is RoutingScope.REGION_LOCAL
    assert (made.asked_by("us"), made.asked_by("ap")) == (("eu",), ())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('polcy = "mesh"', 'polcy: unknown key; did you mean "policy"?'),
        ("policy = 1", "policy: must be a text (there is 1)"),
        ('policy = ""', "policy: must have at least 1 character(s) (there is '')"),
        ('pushing = "soon"', 'pushing: write "blind", "pending" or "outstanding:N"'),
        ('pushing = "outstanding:x"', 'pushing: write "blind", "pending" or "outstanding:N"'),
        ('hold_order = "first-come"', "hold_order: unknown key"),
        ('topology = "ring"', 'topology: write "mesh" or "region-local"'),
        ('topology = "central:us"', "known to the simulator only (mesh sim --topology)"),
        ("hops_max = 2", "hops_max: write 1, or 0 to forward nothing"),
        ("hops_max = true", "hops_max: write 1"),
        ("proactive = { idle_share = 0.1 }", "proactive: unknown key"),
        ("own_ttft_goal_ms = 0", "own_ttft_goal_ms: must be at least 1"),
        ("queue_delay_s_max = -1", "queue_delay_s_max: must be at least 0"),
        ("queue_delay_s_max = nan", "queue_delay_s_max: must be a finite number"),
        ('policy_by_priority = {hgh = "mesh"}', "hgh: must be 'high', 'normal' or 'low'"),
        ('policy_by_priority = "mesh"', "must be a valid dictionary"),
    ],
)
@pytest.mark.parametrize("where", ["whole", "us"])
def test_mistakes_are_named_with_what_to_do(where, line, said):
    with pytest.raises(TopologyError) as caught:
        topology(**{where: line})
    key = "routing." if where == "whole" else "regions.us.routing."
    [problem] = str(caught.value).splitlines()
    assert re.match(rf"mesh\.toml:\d+:\d+: {re.escape(key)}", problem)
    assert said in problem
