"""How much of a router's time people who ask may take."""

from mesh.runtime.request_questions import (
    ANSWERING_AT_ONCE_S,
    ANSWERING_SHARE_MAX,
    AnsweringTime,
)

ANSWER_S = 0.05


def test_answers_take_a_small_share_of_the_time_however_many_ask():
    time, now, spent_s = AnsweringTime(), 1000.0, 0.0
    assert time.is_left(now)
    while now < 1100.0:
        if time.is_left(now):
            time.spend(ANSWER_S)
            spent_s += ANSWER_S
            now += ANSWER_S
        now += 0.01
    assert spent_s <= 100.0 * ANSWERING_SHARE_MAX + ANSWERING_AT_ONCE_S + 2 * ANSWER_S
    assert spent_s >= 90.0 * ANSWERING_SHARE_MAX, "and the time is there for some"


def test_a_few_may_ask_at_the_same_moment():
    time = AnsweringTime()
    answered = 0
    while time.is_left(5.0):
        time.spend(ANSWER_S)
        answered += 1
    assert answered == round(ANSWERING_AT_ONCE_S / ANSWER_S)
    assert time.is_left(5.0 + ANSWER_S / ANSWERING_SHARE_MAX + 0.1)
