"""What the admission takes an engine's batch for: each answer a sequence, and what waits there."""

import pytest

from agents.core.offline_admission import Admit
from agents.core.offline_request import OfflineRequest
from tests.agents.core.test_offline_admission import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_each_answer_of_a_line_decodes(desk) -> None:
    """Beside a user: 13 ms with one answer of 3,000 tokens, 34 with eight."""
    for answers, admitted in ((1, [Admit("line")]), (8, [])):
        desk = Desk(prefill_tokens_max=10_000, burst_s=60.0)
        desk.online("user")
        desk.begin("user")
        desk.decide(10.0)  # saves what the prompt takes
        assert desk.admission.offer(OfflineRequest("line", 2900, 100, answers=answers), desk.now)
        assert desk.decide() == admitted


def test_prompts_of_one_line_have_contexts_of_their_own() -> None:
    desk = Desk(prefill_tokens_max=10_000, burst_s=60.0)
    desk.online("user")
    desk.begin("user")
    desk.decide(10.0)
    desk.admission.offer(OfflineRequest("line", 4000, 100, answers=8, prompts=8), desk.now)
    assert desk.decide() == [Admit("line")]  # eight of 600 tokens


def test_answers_that_left_leave_no_load_behind(desk) -> None:
    desk.admission.offer(OfflineRequest("line", 100, 5000, answers=4), desk.now)
    assert desk.decide() == [Admit("line")]
    desk.begin("line")
    assert desk.admission.offline_kv_tokens() == 100  # the prompt is there once
    desk.decide(0.1024)  # ten iterations
    assert desk.admission.offline_kv_tokens() == pytest.approx(140, abs=4)
    desk.admission.ended("line", desk.now)
    desk.online("user")
    desk.begin("user")
    desk.offer("next", 10)
    assert desk.decide() == [Admit("next")]
    desk.begin("next")
    assert desk.admission.offline_kv_tokens() == 10


def test_a_new_prompt_waits_for_the_online_ones_before_it(desk) -> None:
    assert desk.admission.queue_s(desk.now) == 0.0
    desk.offer("line", 400)
    assert desk.decide() == [Admit("line")]
    assert desk.admission.queue_s(desk.now) == 0.0  # it leaves for an online one
    desk.online("user", 1024)
    desk.admission.ended("line", desk.now)
    # Two chunks of 512: 10 ms each, 51.2 for their tokens, 1 for their context.
    assert desk.admission.queue_s(desk.now) == pytest.approx(2 * 0.0622, rel=0.02)
    desk.now += 0.0622
    assert desk.admission.queue_s(desk.now) == pytest.approx(0.0622, rel=0.04)
    desk.begin("user")
    assert desk.admission.queue_s(desk.now) == 0.0
