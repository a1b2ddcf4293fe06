"""What an engine may still compute of requests that were cut, and how that is learned."""

import pytest

from agents.core import effects, events
from agents.core.cut_requests import (
    ANSWER_TOKENS,
    CUT_S_MAX,
    CUTS_MAX,
    STOPS_AFTER,
    TOKEN_S,
    CutRequests,
    plain_answer_tokens,
)
from agents.core.engine_health import BLIND_S
from agents.core.engine_results import ANSWERED
from agents.core.events import NOTHING_KNOWN, TokenUsage
from schemas.exchange import Outcome
from tests.agents.core.bench import Bench, inbox


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"max_tokens": 3000}', 3000),
        (b'{"max_completion_tokens":7,"stream":false}', 7),
        (b'{"max_output_tokens" : 9}', 9),
        (b"{}", ANSWER_TOKENS),
        (b'{"max_tokens": null}', ANSWER_TOKENS),
        (b'{"max_tokens": 99999999999}', ANSWER_TOKENS),
        (b'{"prompt": "say \\"max_tokens\\": 5 and \\"stream\\": true"}', ANSWER_TOKENS),
        (b'{"max_tokens": 5, "stream": true}', None),
    ],
)
def test_what_a_plain_request_may_take(body, tokens) -> None:
    assert plain_answer_tokens(body) == tokens


def test_a_request_that_was_cut_counts_until_its_estimated_end() -> None:
    cuts = CutRequests()
    cuts.cut(100, sent_at=10.0, now=12.0)
    assert cuts.count == 1
    ends_at = 10.0 + 100 * TOKEN_S
    cuts.update(ends_at - 0.01)
    assert cuts.count == 1
    cuts.update(ends_at + 0.01)
    assert cuts.count == 0


def test_what_is_nearly_over_does_not_count() -> None:
    cuts = CutRequests()
    cuts.cut(100, sent_at=10.0, now=10.0 + 100 * TOKEN_S - 0.5)
    assert cuts.count == 0


def test_both_number_and_time_are_bounded() -> None:
    cuts = CutRequests()
    for _ in range(CUTS_MAX + 10):
        cuts.cut(9_999_999, sent_at=0.0, now=0.0)
    assert cuts.count == CUTS_MAX
    cuts.update(CUT_S_MAX + 0.1)
    assert cuts.count == 0


def test_a_good_answer_to_a_later_request_shows_that_it_is_over() -> None:
    cuts = CutRequests()
    cuts.cut(1000, sent_at=10.0, now=12.0)
    cuts.answered(5, sent_at=11.0, now=13.0)
    assert cuts.count == 1, "it was sent before the other was cut"
    cuts.answered(5, sent_at=14.0, now=15.0)
    assert cuts.count == 0


def test_the_pace_is_that_of_its_answers() -> None:
    cuts = CutRequests()
    for _ in range(40):
        cuts.answered(100, sent_at=0.0, now=0.1)
    cuts.cut(900, sent_at=0.0, now=0.0)
    assert cuts.count == 0, "too short to count"
    cuts.cut(3000, sent_at=0.0, now=0.0)
    cuts.update(2.9)
    assert cuts.count == 1
    cuts.update(3.2)
    assert cuts.count == 0


def test_an_engine_that_stops_is_learned_and_unlearned() -> None:
    cuts, now = CutRequests(), 0.0
    for number in range(STOPS_AFTER + 2):
        cuts.cut(1000, sent_at=now, now=now + 1.0)
        assert cuts.count == (number < STOPS_AFTER)
        cuts.answered(5, sent_at=now + 2.0, now=now + 2.2)
        now += 100.0
    cuts.cut(1000, sent_at=now, now=now + 1.0)
    cuts.answered(5, sent_at=now + 2.0, now=now + 48.0)  # it had gone on
    cuts.cut(1000, sent_at=now + 100.0, now=now + 101.0)
    assert cuts.count == 1


def test_an_engine_that_stops_is_learned_though_few_requests_come() -> None:
    cuts, now = CutRequests(), 0.0
    for number in range(2 * STOPS_AFTER):
        cuts.cut(1000, sent_at=now, now=now + 1.0)
        if number % 2:
            cuts.answered(5, sent_at=now + 2.0, now=now + 2.2)
        else:  # the next one comes long after the estimated end
            cuts.answered(5, sent_at=now + 90.0, now=now + 95.0)
        now += 100.0
    cuts.cut(1000, sent_at=now, now=now + 1.0)
    assert cuts.count == 0


PLAIN, STREAM = b'{"max_tokens": 3000}', b'{"max_tokens": 3000, "stream": true}'


def bench(**more) -> Bench:
    made = Bench(**{"engine": "openai", "counts_own": True, "outstanding_max": 4, **more})
    made.read(NOTHING_KNOWN)
    return made


def cut(one: Bench, number: int, body: bytes = PLAIN) -> None:
    """It is sent, and its client leaves."""
    one.work(number, body)
    one.feed(events.CancelArrived(inbox(number)))
    one.end(number, Outcome.CANCELLED)


def test_an_agent_counts_it_as_running_and_takes_less() -> None:
    one = bench()
    for number in range(4):
        cut(one, number)
    assert (one.beat.running, one.beat.outstanding, one.beat.full) == (4, 0, False)
    [sent] = one.work(5)
    assert isinstance(sent, effects.StartRelay), "one is always taken"
    assert (one.beat.running, one.beat.full) == (5, True)
    one.now += 0.5
    one.end(5)
    assert one.beat.running == 4, "an error shows nothing"
    one.work(6)
    one.end(6, usage=TokenUsage(completion_tokens=2), verdict=ANSWERED)
    assert (one.beat.running, one.beat.full) == (0, False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [({}, STREAM), ({"counts_own": False, "engine": "vllm"}, PLAIN)],
)
def test_streams_stop_and_so_do_engines_with_a_page(kind, body) -> None:
    one = bench(**kind)
    cut(one, 1, body)
    assert not one.beat.running


def test_an_answer_that_came_whole_is_not_cut() -> None:
    one = bench()
    one.work(1, PLAIN)
    one.feed(events.CancelArrived(inbox(1)))
    one.end(1, Outcome.DONE)
    assert one.beat.running == 0


def test_what_an_engine_computed_goes_with_it() -> None:
    one = bench()
    cut(one, 1)
    one.fail()
    one.read(NOTHING_KNOWN)
    assert one.beat.running == 0


def test_it_ends_by_time() -> None:
    one = bench()
    cut(one, 1)
    one.tick(3000 * TOKEN_S + 1.0)
    one.read(NOTHING_KNOWN)
    assert one.beat.running == 0


@pytest.mark.parametrize(
    ("sent_at", "excused"), [(0.0, True), (BLIND_S - 1.0, True), (61.0, False)]
)
def test_only_what_was_sent_before_a_silence_is_long_explains_it(sent_at, excused) -> None:
    """An engine that hangs would stay excused for as long as clients send and leave."""
    cuts = CutRequests()
    cuts.cut(3000, sent_at, sent_at + 1.0)
    assert cuts.count == 1
    assert cuts.may_compute(BLIND_S, sent_at + 2.0) is excused
    assert not cuts.may_compute(BLIND_S, sent_at + 3000 * TOKEN_S), "not after its estimated end"


@pytest.mark.parametrize(("cut_at", "excused"), [(10.0, True), (70.0, False)])
def test_a_hung_engine_is_probed_though_clients_send_and_leave(cut_at, excused) -> None:
    one, patient = bench(), {"Mesh-Deadline-Ms": "900000"}
    one.work(1, PLAIN, **patient)
    one.tick(6.0)  # so it has more than a minute
    one.feed(events.RelayBegan(inbox(1)))
    one.end(1, verdict=ANSWERED)
    one.read(NOTHING_KNOWN)
    one.work(2, PLAIN, **patient)
    done = []
    for second in range(100):
        if second == cut_at:
            cut(one, 3)
        one.feed(events.AliveArrived("us", "r1", 1))
        one.read(NOTHING_KNOWN)
        done += one.tick(1.0)
    probed = any(isinstance(each, effects.ProbeEngine) for each in done)
    assert probed is not excused
