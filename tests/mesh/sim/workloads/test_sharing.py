"""The endless cache finds exactly what was requested before."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.workload import Arrival, RequestNode, Segment
from mesh.sim.workloads.capacity import EndlessCache, in_order, shared
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import common_tokens

US = RegionId("us")
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda ids: tuple(Segment(number, number + 1) for number in ids)
)


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=12))
def test_a_hit_is_the_longest_common_beginning_with_anything_before(prompts):
    cache = EndlessCache()
    answers = [Segment(100 + at, 5) for at in range(len(prompts))]
    for at, prompt in enumerate(prompts):
        before = [
            (*earlier, answer) for earlier, answer in zip(prompts[:at], answers, strict=False)
        ]
        longest = max((common_tokens(prompt, known) for known in before), default=0)
        assert cache.add(prompt, answers[at]) == longest


def node(number: int, pause_s: float = 0.0, children: tuple[RequestNode, ...] = ()) -> RequestNode:
    return RequestNode(
        prompt=(Segment(number, 1),),
        answer=Segment(1000 + number, 1),
        pause_s=pause_s,
        children=children,
    )


def test_trees_are_walked_in_nominal_time():
    tree = node(1, children=(node(2, 5.0, (node(3, 1.0),)), node(4, 2.0)))
    walked = [(at_s, n.prompt[0].id) for at_s, n in in_order([Arrival(10.0, US, tree)])]
    assert walked == [(10.0, 1), (12.0, 4), (15.0, 2), (16.0, 3)]


def test_a_parent_s_answer_is_known_to_its_child():
    first = Segment(1, 10), Segment(2, 20)
    answer, more = Segment(3, 30), Segment(4, 40)
    child = RequestNode(prompt=(*first, answer, more), answer=Segment(5, 1))
    parent = RequestNode(prompt=first, answer=answer, children=(child,))
    assert [asked.shared_tokens for asked in shared([Arrival(0.0, US, parent)])] == [0, 60]
