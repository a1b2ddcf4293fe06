"""SkyWalker's trees: 15 requests with two branches, 85 with four, nearly all of it shared."""

from itertools import islice
from statistics import mean

import pytest

from mesh.sim.workloads.capacity import demand
from mesh.sim.workloads.skywalker import mixed_tree, tot
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import nodes_of, shared_ratio

US, EU, AP = RegionId("us"), RegionId("eu"), RegionId("ap")


def levels(root) -> list[int]:
    sizes, level = [], [root]
    while level:
        sizes.append(len(level))
        level = [child for node in level for child in node.children]
    return sizes


def test_a_tree_of_two_branches_has_15_requests_in_four_levels():
    workload = tot()
    assert workload.facts["clients"] == {US: 40, EU: 20, AP: 20}
    for client in workload.clients[:5]:
        for tree in islice(client.trees, 3):
            assert levels(tree) == [1, 2, 4, 8]


def test_in_the_mixed_case_the_first_region_s_trees_have_85():
    workload = mixed_tree()
    assert sum(client.region == US for client in workload.clients) == 2
    for client in workload.clients:
        wanted = [1, 4, 16, 64] if client.region == US else [1, 2, 4, 8]
        assert levels(next(client.trees)) == wanted
    other = mixed_tree(clients={EU: 1, US: 1})
    assert [levels(next(client.trees)) for client in other.clients] == [
        [1, 4, 16, 64],
        [1, 2, 4, 8],
    ]


def test_siblings_ask_the_same_and_get_different_answers():
    (client,) = tot(clients={US: 1}).clients
    root = next(client.trees)
    one, other = root.children
    assert one.prompt == other.prompt
    assert one.answer.id != other.answer.id
    assert one.children[0].prompt[-2] == one.answer


def test_questions_and_answers_are_as_long_as_gsm8k_s_and_end_at_256():
    (client,) = tot(clients={US: 1}).clients
    trees = list(islice(client.trees, 400))
    assert mean(tree.prompt[1].tokens for tree in trees) == pytest.approx(60, rel=0.05)
    answers = [node.answer.tokens for tree in trees for node in nodes_of(tree)]
    assert max(answers) == 256
    assert mean(answers) == pytest.approx(176, rel=0.03)


def test_what_can_be_hit_is_more_than_skywalker_reached():
    # §5.1: its best policy hit 89.56 to 90.01% of the tokens.
    assert 0.90 < shared_ratio(demand(tot(rate_per_s=20.0))) < 0.98
