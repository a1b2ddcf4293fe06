"""Speed shrinks every time alike and nothing else."""

import pytest

from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.workloads import make
from mesh.sim.workloads.arrivals import at_speed
from mesh.sim.workloads.capacity import in_order
from schemas.ids import RegionId

US = RegionId("us")


def chain(length: int) -> RequestNode:
    node: tuple[RequestNode, ...] = ()
    for at in reversed(range(length)):
        pause_s = 1.0 if at else 0.0
        prompt = (Segment(at, 1),)
        node = (
            RequestNode(prompt=prompt, answer=Segment(-at - 1, 1), pause_s=pause_s, children=node),
        )
    return node[0]


def test_arrivals_and_pauses_shrink_alike_in_chains_of_any_length():
    slow = Workload(name="x", arrivals=(Arrival(8.0, US, chain(3000)), Arrival(9.0, US, chain(1))))
    fast = at_speed(slow, 4.0)
    slow_times = [(at_s / 4, node.prompt) for at_s, node in in_order(slow.arrivals)]
    assert [(at_s, node.prompt) for at_s, node in in_order(fast.arrivals)] == slow_times
    assert fast.facts["at_speed"] == 4.0
    assert at_speed(slow, 1.0) is slow


def test_a_tree_s_own_branches_stay_its_own():
    workload = make("tot", duration_s=30.0, rate_per_s=3.0)
    assert at_speed(at_speed(workload, 2.0), 0.5).arrivals == workload.arrivals


def test_what_has_no_speed_is_refused():
    with pytest.raises(ValueError, match="speed must be above 0"):
        at_speed(make("toolbench", duration_s=5.0), 0.0)
    with pytest.raises(ValueError, match="chat is a closed loop"):
        at_speed(make("chat"), 2.0)
