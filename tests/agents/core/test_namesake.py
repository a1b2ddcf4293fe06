"""Which of two agents of one name leaves."""

import pytest

from agents.core.namesake import CLAIM_S, Namesake, Verdict

NOW = 100.0


def agent(epoch, asked_at):
    namesake = Namesake(epoch)
    namesake.ask(asked_at)
    return namesake


@pytest.mark.parametrize("epoch", [6, 8])
def test_whoever_is_there_stays_whatever_the_clocks_say(epoch):
    there = agent(7, NOW - CLAIM_S - 0.1)
    assert there.hear_question(epoch, NOW) is Verdict.ANSWER
    assert there.hear_answer(epoch, NOW) is Verdict.IGNORE, "said to somebody else"
    assert agent(epoch, NOW).hear_answer(7, NOW + 0.1) is Verdict.LEAVE


def test_ones_own_voice_says_nothing():
    assert agent(7, NOW).hear_question(7, NOW) is Verdict.IGNORE
    assert agent(7, NOW).hear_answer(7, NOW) is Verdict.IGNORE


@pytest.mark.parametrize("heard_by", ["both", "first", "second"])
def test_of_two_that_start_at_once_the_lower_epoch_stays(heard_by):
    first, second = agent(7, NOW), agent(8, NOW + 0.01)
    left = []
    if heard_by != "second" and first.hear_question(8, NOW + 0.02) is Verdict.ANSWER:
        left += [8] * (second.hear_answer(7, NOW + 0.03) is Verdict.LEAVE)
    if heard_by != "first" and second.hear_question(7, NOW + 0.02) is Verdict.LEAVE:
        left.append(8)
    assert set(left) == {8}


def test_who_comes_back_leaves_to_whoever_took_the_name_meanwhile():
    back, there = agent(7, NOW), agent(8, NOW - 60.0)
    assert there.hear_question(7, NOW) is Verdict.ANSWER
    assert back.hear_answer(8, NOW) is Verdict.LEAVE
