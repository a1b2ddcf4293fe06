"""Which of two agents of one name leaves."""

import itertools

import pytest

from agents.core.name_claim import CLAIM_S, NameClaim, NameDecision

NOW = 100.0


LATER = NOW + CLAIM_S + 0.1


def agent(epoch, asked_at, *, has_it=False):
    namesake = NameClaim(epoch)
    namesake.ask(asked_at)
    if has_it:
        namesake.take()
    return namesake


@pytest.mark.parametrize("epoch", [6, 8])
def test_the_holder_of_a_name_stays_whatever_the_epochs(epoch):
    there = agent(7, NOW - CLAIM_S - 0.1, has_it=True)
    assert there.question_arrived(epoch, NOW) is NameDecision.ANSWER
    assert agent(epoch, NOW).answer_arrived(7) is NameDecision.LEAVE


def test_an_agents_own_question_is_ignored():
    assert agent(7, NOW).question_arrived(7, NOW) is NameDecision.IGNORE
    assert agent(7, NOW).answer_arrived(7) is NameDecision.IGNORE


@pytest.mark.parametrize("heard_by", ["both", "first", "second"])
def test_of_two_that_start_at_once_the_lower_epoch_stays(heard_by):
    first, second = agent(7, NOW, has_it=True), agent(8, NOW + 0.01, has_it=True)
    left = []
    if heard_by != "second" and first.question_arrived(8, NOW + 0.02) is NameDecision.ANSWER:
        left += [8] * (second.answer_arrived(7) is NameDecision.LEAVE)
    if heard_by != "first" and second.question_arrived(7, NOW + 0.02) is NameDecision.LEAVE:
        left.append(8)
    assert set(left) == {8}


@pytest.mark.parametrize("asks", [{7}, {8}, {7, 8}])
@pytest.mark.parametrize("now", [NOW, LATER])
def test_of_two_holders_the_lower_epoch_stays_in_any_order_of_messages(asks, now):
    """One was stopped while the other took the name; it wakes to an old question, or asks anew."""
    for order in itertools.product((True, False), repeat=6):
        agents = {epoch: agent(epoch, NOW, has_it=True) for epoch in (7, 8)}
        said = {7: [], 8: []}  # on its way from each
        for epoch in asks:
            said[epoch].append("question")
        left = set()
        for lower_first in (*order, *(True, False) * 3):
            speaker = 7 if lower_first else 8
            if not said[speaker]:
                continue
            hearer, what = agents[15 - speaker], said[speaker].pop(0)
            decision = (
                hearer.question_arrived(speaker, now)
                if what == "question"
                else hearer.answer_arrived(speaker)
            )
            if decision is NameDecision.LEAVE:
                left.add(15 - speaker)
            elif decision is NameDecision.ANSWER:
                said[15 - speaker].append("answer")
        assert left == {8}
        assert said == {7: [], 8: []}
