"""What a run's file says of each request."""

from dataclasses import replace

import pytest

from agents.sim.profiles import H100_LLAMA, L4_LLAMA
from mesh.replay.tally import RequestOutcome
from mesh.sim.workload import Arrival, RequestEnd, RequestNode, Segment, Workload
from mesh.sim.workloads.capacity import in_order
from mesh.sim.world import SETTLE_S, World
from tests.mesh.sim.build import PLAIN, US, arrivals, config
from tests.mesh.sim.build import node as plain_node
from tests.programs.studies.tables.client_view import ClientView

OK = RequestEnd(RequestOutcome.OK)
SHED = RequestEnd(RequestOutcome.SHED)


def node(number, *children, prompt=512, answer=100):
    return RequestNode(
        prompt=(Segment(number, prompt),),
        answer=Segment(number + 1000, answer),
        pause_s=1.0,
        children=children,
    )


class Sent:
    """As much of a sent request as the view reads."""

    def __init__(self, one, sent_s, ttft_s):
        self.node = one
        self.sent_at = SETTLE_S + sent_s
        self.first_at = None if ttft_s is None else self.sent_at + ttft_s


def view(nodes, *, warm_up=0, patience_s=60.0, gap_s=10.0, profiles=(L4_LLAMA,)):
    arrivals = tuple(Arrival(gap_s * at, "us", one) for at, one in enumerate(nodes))
    workload = Workload(name="test", arrivals=arrivals)
    return ClientView(workload, list(profiles), warm_up=warm_up, patience_s=patience_s)


def test_a_lost_request_counts_with_the_patience_and_never_with_less():
    nodes = [node(number) for number in range(3)]
    seen = view(nodes, patience_s=20.0)
    seen.add(Sent(nodes[0], 0.0, 0.3), OK, SETTLE_S + 8.0)
    seen.add(Sent(nodes[1], 10.0, None), SHED, SETTLE_S + 10.001)
    seen.add(Sent(nodes[2], 20.0, 25.0), OK, SETTLE_S + 50.0)  # answered too late
    found = seen.figures()
    assert found["end"] == "+xx"
    assert found["ttft_s"] == [0.3, 20.0, 20.0]
    stream_s = 99 * 0.0457
    assert found["latency_s"] == pytest.approx([8.0, 20.0 + stream_s, 20.0 + stream_s], abs=0.001)


def test_what_follows_a_lost_request_is_never_sent_and_lost_too():
    # An engine of 16,000 tokens refuses the second of three turns; the third is never sent.
    last = plain_node(50, name=3)
    chain = plain_node(50, name=1, children=(plain_node(20_000, name=2, children=(last,)),))
    whole = plain_node(50, name=4, children=(plain_node(50, name=5),))
    asked = arrivals((0.0, US, chain), (1.0, US, whole))
    world = World(asked, config())
    seen = ClientView(asked, [PLAIN], warm_up=0)
    sent = []
    world.requests.watch = lambda one, end, now: (sent.append(one.node), seen.add(one, end, now))
    world.run()
    assert len(sent) == 4
    assert not any(one is last for one in sent)
    order = [one for _, one in in_order(asked.arrivals)]
    lost = {id(order[at]) for at, end in enumerate(seen.figures()["end"]) if end == "x"}
    assert lost == {id(chain.children[0]), id(last)}


def test_followers_are_those_that_wait_for_an_answer():
    assert view([node(1, node(2, node(3))), node(4)]).figures()["follow"] == 0.5
    assert view([node(1), node(4)]).figures()["follow"] == 0.0


def test_the_service_level_is_of_the_request_and_the_slowest_gpu():
    assert L4_LLAMA.alone_s(1024) == pytest.approx(2 * (0.045 + 0.256))
    both = (H100_LLAMA, replace(L4_LLAMA, arrival_s=0.1))
    long, short = node(1, prompt=1024), node(2, prompt=512)
    for ttft_s, ends in ((1.0 + 3 * 0.401, "++"), (1.0 + 3 * 0.401 + 0.01, "+-")):
        seen = view([long, short], profiles=both)
        for at, one in enumerate((long, short)):
            seen.add(Sent(one, 10.0 * at, ttft_s), OK, SETTLE_S + 30)
        assert seen.figures()["end"] == ends


def test_the_warm_up_is_set_apart_by_the_order_in_which_requests_would_be_sent():
    late = node(9)
    nodes = [node(1, node(2)), node(3), late]
    seen = view(nodes, warm_up=2)
    found = seen.figures()
    assert found["measured_from"] == 2
    assert found["offered_s"] == pytest.approx(10.0)  # from the second tree to the third
    assert view(nodes, warm_up=100).figures()["measured_from"] == 2, "half of them at most"


def test_clocks_begin_with_the_first_measured_request():
    nodes = [node(number, answer=10 * (number + 1)) for number in range(4)]
    seen = view(nodes, warm_up=2)  # measured from 20 s to 30 s
    for one, ended_s in zip(nodes[:3], (19.9, 20.1, 30.0), strict=True):
        seen.add(Sent(one, 0.0, 0.1), OK, SETTLE_S + ended_s)
    found = seen.figures()
    assert found["tokens"] == [10, 20, 30, 40]
    assert found["ended_s"] == [-0.1, 0.1, 10.0, None]


def test_a_closed_loop_is_refused():
    with pytest.raises(ValueError, match="closed loop"):
        ClientView(Workload(name="loop", clients=(None,)), [L4_LLAMA])
