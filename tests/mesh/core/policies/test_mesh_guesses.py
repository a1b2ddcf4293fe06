"""What the `mesh` policy goes by before it has learned: its agents' word, or else a guess."""

import pytest

from mesh.core.model import effects as fx
from mesh.core.model.events import AnswerEnded, AnswerStarted, HeartbeatSeen, RequestArrived
from mesh.core.model.request import Served
from tests.mesh.core.build import beat, core, prompt, request


def played(ttft_s: float, **told) -> tuple[int, int]:
    """Requests sent and requests shed, of twenty that want their first token within 0.3 s."""
    router, sent, shed = core(policy="mesh"), 0, 0
    for key in range(1, 21):
        now = float(key)
        known = {"prefill_queued_tokens": 0, "kv_used_ratio": 0.0, "kv_capacity_tokens": 10**6}
        router.handle(HeartbeatSeen(beat("a", key, **known, **told)), now)
        asked = request(key, prompt=prompt("AB", 8000), arrived_at=now, slo_ttft_s=0.3)
        for effect in router.handle(RequestArrived(asked), now):
            shed += isinstance(effect, fx.Fail)
            if isinstance(effect, fx.Dispatch):
                sent += 1
                router.handle(AnswerStarted(key, effect.attempt), now + ttft_s)
                served = Served(8000, 0, 10)
                router.handle(AnswerEnded(key, effect.attempt, served), now + ttft_s + 0.1)
    return sent, shed


def test_no_request_is_shed_for_a_guess_without_answers():
    assert played(0.09) == (20, 0)


def test_an_agents_report_counts_from_the_first_request_on():
    assert played(0.09, prefill_s_per_token=1e-5, prefill_base_s=0.01) == (20, 0)
    assert played(8.0, prefill_s_per_token=1e-3, prefill_base_s=0.01) == (0, 20)


@pytest.mark.parametrize("slope", [1e-5, 1e-3])
def test_reported_speeds_are_priced(slope):
    router = core(policy="mesh")
    told = {"prefill_s_per_token": slope, "prefill_base_s": 0.0, "prefill_queued_tokens": 0}
    router.handle(HeartbeatSeen(beat("a", **told)), 0.0)
    effects = router.handle(RequestArrived(request(1, prompt=prompt("AB", 8000))), 0.0)
    decided = next(effect.decision for effect in effects if isinstance(effect, fx.Decided))
    assert decided.candidates[0].terms["prefill_s"] == pytest.approx(8000 * slope)


def test_an_agent_that_does_not_say_how_much_it_takes_is_not_asked_to_queue():
    """It is older than the header that would make it."""
    router = core(policy="mesh")
    router.handle(HeartbeatSeen(beat("a", pending=1, outstanding_max=None)), 0.0)
    effects = router.handle(RequestArrived(request(1)), 0.0)
    assert not [effect for effect in effects if isinstance(effect, fx.Dispatch)]
