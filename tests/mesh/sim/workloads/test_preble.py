"""Preble's Table 1, workload by workload: lengths, sharing, key portions, popularity."""

from collections import Counter
from functools import cache
from statistics import mean, pstdev

import pytest

from mesh.sim.workload import RequestNode
from mesh.sim.workloads import make
from mesh.sim.workloads.content import Zipf
from mesh.sim.workloads.preble import CANDIDATES, DOCUMENTS, TOOLS, VIDEOS, programming
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import asked, nodes_of, shared_with_another

US = RegionId("us")


@cache
def requests(name: str) -> list[RequestNode]:
    """About as many requests as Preble's data sets have; Toolbench's is larger."""
    rate_per_s = 40.0 if name == "toolbench" else 8.0
    return asked(make(name, seed=3, duration_s=1000.0, rate_per_s=rate_per_s))


def key_portion(node: RequestNode) -> tuple[int, float]:
    """Where the deepest part lies that is longer than all before it, and its share."""
    before, found = 0, (0, 0.0)
    for place, part in enumerate(node.prompt):
        if part.tokens > before:
            found = (place, part.tokens / node.prompt_tokens)
        before += part.tokens
    return found


TABLE_1 = [
    # name, prompt, its spread, answer, its spread, shared, key portion
    ("toolbench", 1835, 742, 43, 16, 0.85, 0.76),
    ("agent", 2285, 471, 16, 13, 0.97, 0.76),
    ("programming", 3871, 1656, 190, 343, 0.97, 0.78),
    ("video-qa", 9865, 5976, 4, 1.5, 0.88, 0.99),
    ("loogle", 23474, 6105, 16, 9.9, 0.91, 0.94),
]


@pytest.mark.parametrize(
    ("name", "prompt", "prompt_spread", "answer", "answer_spread", "shared", "key"), TABLE_1
)
def test_table_1(name, prompt, prompt_spread, answer, answer_spread, shared, key):
    nodes = requests(name)
    assert len(nodes) > 6000
    lengths = [node.prompt_tokens for node in nodes]
    answers = [node.answer.tokens for node in nodes]
    assert mean(lengths) == pytest.approx(prompt, rel=0.1)
    assert pstdev(lengths) == pytest.approx(prompt_spread, rel=0.35)
    assert mean(answers) == pytest.approx(answer, rel=0.1)
    assert pstdev(answers) == pytest.approx(answer_spread, rel=0.25)
    assert shared_with_another(nodes) == pytest.approx(shared, abs=0.1)
    assert mean(key_portion(node)[1] for node in nodes) == pytest.approx(key, abs=0.1)


@pytest.mark.parametrize(
    ("name", "subject"), [("toolbench", TOOLS), ("video-qa", VIDEOS), ("loogle", DOCUMENTS)]
)
def test_content_is_as_popular_as_in_zipf_1_1(name, subject):
    nodes = requests(name)
    ranked = Counter(node.prompt[1].id for node in nodes).most_common()
    zipf = Zipf(subject.contents, 1.1)
    for rank in range(5):
        assert ranked[rank][1] / len(nodes) == pytest.approx(zipf.share(rank), rel=0.2)
    assert all(node.prompt[0] == nodes[0].prompt[0] for node in nodes)


def test_an_episode_is_a_chain_of_about_48_steps():
    workload = make("agent", seed=3, duration_s=1000.0, rate_per_s=8.0)
    sizes = [sum(1 for _ in nodes_of(arrival.node)) for arrival in workload.arrivals]
    assert mean(sizes) == pytest.approx(48, abs=2.5)
    assert pstdev(sizes) == pytest.approx(8, abs=2)
    heads = {arrival.node.prompt[1].id for arrival in workload.arrivals}
    assert len(heads) == len(sizes)  # an episode's task is its own


def test_a_problem_s_candidates_come_at_once_with_one_prompt():
    workload = programming(clients={US: 2}, duration_s=100.0, rate_per_s=4.0)
    arrivals = workload.arrivals
    assert len(arrivals) % CANDIDATES == 0
    for start in range(0, len(arrivals), CANDIDATES):
        group = arrivals[start : start + CANDIDATES]
        assert len({(arrival.at_s, arrival.node.prompt) for arrival in group}) == 1
        assert len({arrival.node.answer.id for arrival in group}) == CANDIDATES
