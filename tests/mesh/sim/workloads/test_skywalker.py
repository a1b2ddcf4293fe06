"""Chat shares as SkyWalker measured and is as long as the data sets are."""

import random
from dataclasses import replace
from itertools import combinations, islice
from statistics import mean

import pytest

from mesh.sim.workload import RequestNode
from mesh.sim.workloads.skywalker import ARENA, WILDCHAT, ChatHabits, ChatUsers, chat
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import common_tokens, nodes_of

REGIONS = [RegionId("us"), RegionId("eu"), RegionId("ap")]


def people(habits: ChatHabits, number: int) -> list[list[RequestNode]]:
    """Each person's requests."""
    places = (ChatUsers(habits, 1, REGIONS[at % 3], at) for at in range(number))
    return [[node for talk in place.user(0) for node in nodes_of(talk)] for place in places]


def similarity(one: RequestNode, other: RequestNode) -> float:
    return common_tokens(one.prompt, other.prompt) / min(one.prompt_tokens, other.prompt_tokens)


def similarities(habits: ChatHabits) -> tuple[float, float]:
    """Mean similarity of two requests of one person, and of two people, over pairs."""
    rng = random.Random(3)
    requests = people(habits, 600)
    within = [
        similarity(*pair)
        for mine in requests
        for pair in islice(combinations(rng.sample(mine, len(mine)), 2), 300)
    ]
    across = [
        similarity(rng.choice(one), rng.choice(other))
        for one, other in (rng.sample(requests, 2) for _ in range(20_000))
    ]
    return mean(within), mean(across)


@pytest.mark.parametrize(("habits", "times"), [(WILDCHAT, 7.60), (ARENA, 2.47)])
def test_one_person_s_prompts_are_as_much_more_alike_as_in_figure_5(habits, times):
    within, across = similarities(habits)
    assert within / across == pytest.approx(times, rel=0.25)


def test_a_region_shares_more_than_the_world():
    requests = people(replace(WILDCHAT, region_share=0.4), 900)
    rng = random.Random(5)

    def mean_similarity(step: int) -> float:
        firsts = [rng.randrange(len(requests) - step) for _ in range(20_000)]
        return mean(
            similarity(rng.choice(requests[at]), rng.choice(requests[at + step])) for at in firsts
        )

    assert mean_similarity(3) > 1.2 * mean_similarity(2)  # every third place is in one region


@pytest.mark.parametrize(
    ("habits", "turns", "question", "answer"), [(WILDCHAT, 2.54, 240, 405), (ARENA, 1.2, 51, 186)]
)
def test_turns_and_lengths_are_the_data_sets(habits, turns, question, answer):
    # Means after the cuts: WildChat's 296 and 441 lose their tails beyond 4,096 and 1,024.
    places = [ChatUsers(habits, 7, REGIONS[0], at) for at in range(600)]
    talks = [list(nodes_of(talk)) for place in places for talk in place.user(0)]
    assert len(talks) / 600 == pytest.approx(habits.conversations, rel=0.1)
    assert mean(map(len, talks)) == pytest.approx(turns, rel=0.05)
    asked = [node for talk in talks for node in talk]
    assert mean(node.prompt[-1].tokens for node in asked) == pytest.approx(question, rel=0.08)
    assert mean(node.answer.tokens for node in asked) == pytest.approx(answer, rel=0.05)


def test_a_talk_is_a_chain_whose_prompts_grow_by_answer_and_question():
    (client,) = chat(clients={REGIONS[0]: 1}).clients
    talk = next(tree for tree in client.trees if tree.children)
    for turn in nodes_of(talk):
        for following in turn.children:
            assert len(turn.children) == 1
            assert following.prompt[:-1] == (*turn.prompt, turn.answer)
            assert following.pause_s == 0.0


def test_the_papers_clients_are_40_30_30():
    counts = [client.region for client in chat().clients]
    assert [counts.count(region) for region in REGIONS] == [40, 30, 30]
