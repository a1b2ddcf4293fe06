"""The ended requests that a router keeps: how many, found by what, and as large as may be."""

from dataclasses import replace

import orjson
import pytest

from mesh.adapters.access_log import VALUE_CHARS_MAX
from mesh.adapters.ended_requests import STEPS_MAX, EndedRequests
from mesh.adapters.refused import RequestRefused
from mesh.cli.explain import _worst
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.served_names import served_name
from mesh.core.placement.candidates import CandidateLayer
from mesh.core.placement.receipt import SCORES_MAX, receipt, unlisted
from mesh.core.policies.base import Choice, Score, Target
from mesh.session.client_request import ClientRequest
from mesh.session.cost import Cost
from mesh.session.record import OpenRequest, Step
from schemas.decision import CandidateKind, Decision, Placement
from schemas.explain import (
    ANSWER_BYTES_MAX,
    COUNTED_MAX,
    LIVES_MAX,
    OTHERS,
    RECENT_MAX,
    SLOWEST_MAX,
    TENANTS_MAX,
    RequestQuestion,
    decode_answer,
    decode_question,
    encode_answer,
)
from schemas.http import MESSAGES, Fault
from schemas.wire import WireError
from tests.mesh.adapters.test_access_log import HELD
from tests.mesh.core.build import foreign

REPLICA = CandidateKind.REPLICA
WALL_S = 1_700_000_000.0


def kept(most: int = 100) -> EndedRequests:
    return EndedRequests("us", "r1", lambda: 50.0, None, most, lambda: WALL_S + 50.0)


def decided(reason: str = "because") -> fx.Decided:
    targets = [Target(f"us-{number}", 0) for number in range(4)]
    scores = [
        Score(one, float(place), {"queue_s": float(place)}) for place, one in enumerate(targets)
    ]
    busy = [(Target("us-9", 0), "full")]
    choice = Choice(targets[0], reason, 0, scores)
    layers = [CandidateLayer(REPLICA, targets, busy)]
    decision = Decision(
        request="r", region="us", policy="mesh", placement=Placement.LOCAL, replica="us-0",
        reason=reason,
    )  # fmt: skip
    return fx.Decided(1, decision, unlisted(layers, choice, Prompt(100, ())))


def test_only_the_last_ones_are_kept():
    ring = kept(3)
    for number in range(10):
        ring.add(HELD._replace(request=f"r{number}", ended_at=float(number)))
    assert [ring.find(f"r{number}").requests != () for number in range(10)] == [False] * 7 + [
        True
    ] * 3
    answer = ring.find("r0")
    assert (answer.kept, answer.since) == (3, WALL_S + 7.0)
    assert kept().find("r0").since is None


@pytest.mark.parametrize("kind", [ClientRequest, OpenRequest])
def test_its_model_is_named_without_its_path(kind):
    asked = foreign(1, model=served_name("tiny", MESSAGES))
    assert kind(request=asked, path=MESSAGES).ending_at(1.0, "ok").model == "tiny"


def test_one_is_found_by_its_id_or_its_trace():
    ring = kept()
    ring.add(HELD)
    [by_id], [by_trace] = ring.find("r").requests, ring.find("ab" * 16).requests
    assert by_id == by_trace
    assert by_id.arrived_at == WALL_S + 1.0 and by_id.agent_ttft_s == 0.1
    assert not ring.find("").requests


def test_an_id_that_is_used_again_has_its_last_requests_in_the_answer():
    ring = kept()
    for number in range(LIVES_MAX + 5):
        ring.add(HELD._replace(arrived_at=float(number)))
    found = ring.find("r").requests
    assert [one.arrived_at - WALL_S for one in found] == list(range(5, LIVES_MAX + 5))


def test_the_slowest_are_those_that_failed_and_then_those_that_waited():
    ring = kept()
    for name, started_at, outcome in (("a", 2.0, "ok"), ("b", 9.0, "ok"), ("c", 1.5, "shed")):
        ring.add(HELD._replace(request=name, started_at=started_at, outcome=outcome))
    ring.add(HELD._replace(request="of a peer", origin="eu"))
    ring.refused("refused", "/v1/completions", RequestRefused(Fault.INVALID, "no"))
    assert [one.request for one in ring.slowest(9).requests] == ["a", "b", "c"]
    ring.add(HELD._replace(request="d", started_at=2.5, status=400))  # an engine's: no failure
    ring.add(HELD._replace(request="e", started_at=2.6, outcome="client_gone"))
    slowest = ring.slowest(9).requests
    assert [one.request for one in slowest] == ["a", "d", "e", "b", "c"]
    assert slowest[1].outcome == "refused"
    assert [one.request for one in _worst(slowest, 9)] == ["c", "b", "e", "d", "a"]
    assert len(ring.slowest(2).requests) == 2
    for _ in range(90):
        ring.add(HELD)
    assert len(ring.slowest(10_000).requests) == SLOWEST_MAX


def test_streams_that_broke_and_went_on_are_listed_after_those_that_failed():
    ring = kept()
    assert HELD.decided is not None
    steps = Step(1.1, HELD.decided), Step(1.9, HELD.decided)
    for name, change in (
        ("broke", {"started_at": 1.6, "steps": steps}),
        ("slow", {"steps": steps}),
        ("failed", {"outcome": "failed"}),
    ):
        ring.add(HELD._replace(request=name, **change))
    found = ring.slowest(2).requests
    assert [one.request for one in found] == ["broke", "failed"]
    assert [one.request for one in _worst(ring.slowest(3).requests, 3)] == [
        "failed", "broke", "slow",
    ]  # fmt: skip


def test_the_worst_of_the_slowest_are_kept_where_not_all_fit():
    ring = kept()
    for number in range(SLOWEST_MAX):
        name, detail = f"r{number}", "y" * 200
        ring.add(HELD._replace(request=name, started_at=2.0 + number, detail=detail))
    answer = decode_answer(encode_answer(ring.slowest(SLOWEST_MAX), 10_000))
    assert answer.left_out > 0
    assert answer.requests[-1].request == f"r{SLOWEST_MAX - 1}"


def test_an_answer_can_be_sent_whatever_a_request_was_called():
    ring = kept()
    ring.add(HELD._replace(route="/caf\udce9", model="\udc80", detail="\udcff"))
    [life] = decode_answer(encode_answer(ring.find("r"))).requests
    assert (life.route, life.model, life.detail) == ("/caf\\udce9", "\\udc80", "\\udcff")


def test_of_a_long_path_or_method_the_beginning_is_kept():
    ring = kept()
    ring.of_http("long", route="/" + "x" * 8000, method="Y" * 8000, status=404)
    assert max(map(len, (ring._kept[-1].route, ring._kept[-1].method))) == VALUE_CHARS_MAX


@pytest.mark.parametrize("is_held", [True, False])
def test_a_peers_request_arrived_here_when_it_was_first_decided_on(is_held):
    """Not when its client's request arrived at home, half a minute ago."""
    record = OpenRequest(request=foreign(1, arrived_at=18.0))
    if is_held:
        record.decided = decided()
        record.steps = (Step(48.0, record.decided), Step(49.5, record.decided))
    ring = kept()  # at 50 s
    ring.add(record.ending_at(50.0, "placed" if is_held else "refused"))
    [life] = ring.find("request-1").requests
    assert life.arrived_at == WALL_S + (48.0 if is_held else 50.0)
    assert life.ended_at == WALL_S + 50.0


def test_an_attempt_that_was_lost_has_its_end_between_two_decisions():
    """The core says nothing of it; the time in the queue since then is known."""
    made = decided().decision
    held, first, again = (
        fx.Decided(1, replace(made, placement=placement, held_s=held_s))
        for placement, held_s in (("hold", 0.0), ("local", 0.5), ("local", 2.0))
    )
    refused = ev.AttemptRefused(1, 1, "busy", "us", "us-0", -1, -1)
    ring = kept()
    ring.add(HELD._replace(steps=(Step(0.5, held), Step(1.0, first), Step(4.0, again))))
    ring.add(HELD._replace(steps=(Step(1.0, first), Step(2.5, refused), Step(4.0, again))))
    lost, told = ([(s.at - WALL_S, s.what, s.detail) for s in life.steps if s.what != "decided"]
                  for life in ring.find("r").requests)  # fmt: skip
    assert lost == [(2.5, "failed", "us-0 was lost: it fell silent, restarted or left")]
    assert [(at, what) for at, what, _ in told] == [(2.5, "refused")]


def ended(name: str, at: float, **values):
    """A client's streamed request of half a second, that waited a tenth."""
    values = {"region": "us", "outcome": "ok", "is_stream": True, **values}
    made = decided()
    return HELD._replace(
        request=name, decided=made, steps=(Step(at, made),), ended_at=at, arrived_at=at - 0.5,
        started_at=at - 0.4, **values,
    )  # fmt: skip


def test_the_latest_come_without_steps_and_the_last_minute_is_counted():
    ring = kept()  # at 50 s
    ring.add(ended("old", -11.0))
    ring.add(ended("here", 10.0))
    ring.add(ended("peer-s", 11.0, origin="eu"))
    ring.add(ended("listing", 12.0)._replace(decided=None))
    ring.add(ended("far", 13.0, region="eu", is_stream=False))
    ring.add(ended("failed", 14.0, region="eu", outcome="failed"))
    ring.add(ended("shed", 15.0, region="", outcome="shed")._replace(started_at=None))
    ring.add(ended("left", 16.0, outcome="client_gone"))
    answer = decode_answer(encode_answer(ring.recent(3)))
    assert [one.request for one in answer.requests] == ["failed", "shed", "left"]
    assert [one.steps for one in answer.requests] == [()] * 3
    assert ring.find("here").requests[0].steps != ()
    assert answer.counted_s == 60.0
    assert [(one.served_by_region, one.requests, one.failed) for one in answer.flows] == [
        (None, 1, 1),
        ("eu", 2, 1),
        ("us", 2, 0),
    ]
    assert [one.ttft_s for one in answer.flows] == [(), (0.1,), (0.1, 0.1)]
    assert ring.find("here").counted_s is None
    assert kept().recent(1).flows == () and kept().recent(1).counted_s == 60.0


def test_whose_requests_wait_and_whose_work_was_done_lately():
    """Of many tenants those that wait most have a name; a key on no list has none."""
    ring = kept(99)
    for number, tenant in enumerate(("acme", "acme", "beta", "")):
        cost = Cost(uncached=100, cached=900, output=10)
        ring.add(ended(f"r{number}", 40.0, tenant=tenant)._replace(cost=cost))
    held = {"acme": 7, "key:0123": 2, "": 1}
    answer = decode_answer(encode_answer(ring.recent(1, held)))
    assert [(one.tenant, one.waiting, one.tokens) for one in answer.tenants] == [
        ("acme", 7, 240),
        ("", 3, 120),
        ("beta", 0, 120),
    ]
    many = {f"t{number:02}": 40 - number for number in range(TENANTS_MAX + 4)}
    told = decode_answer(encode_answer(ring.recent(1, many))).tenants
    assert [one.tenant for one in told] == [*list(many)[: TENANTS_MAX - 1], OTHERS]
    assert sum(one.waiting for one in told) == sum(many.values())
    assert told[-1].tokens == 480
    assert ring.find("r1").tenants == ()


def test_how_far_back_is_counted_where_requests_were_forgotten():
    ring = kept(3)
    for number in range(5):
        ring.add(ended(f"r{number}", 40.0 + number))
    assert ring.recent(1).counted_s == 50.0 - 42.0
    busy = kept(2 * COUNTED_MAX)
    for number in range(COUNTED_MAX + 100):
        busy.add(ended(f"r{number}", 40.0 + number / 1000))
    answer = busy.recent(RECENT_MAX + 9)
    assert answer.counted_s == pytest.approx(10.0 - 0.1)
    assert (answer.flows[0].requests, len(answer.requests)) == (COUNTED_MAX, RECENT_MAX)
    data = encode_answer(answer)
    assert len(data) <= ANSWER_BYTES_MAX and decode_answer(data).left_out == 0


def test_candidates_are_listed_when_somebody_asks():
    ring, made = kept(), decided()
    ring.add(HELD._replace(decided=made, steps=(Step(1.0, made),)))
    [life] = ring.find("r").requests
    [step] = life.steps
    assert step.decision is not None
    assert [one.name for one in step.decision.candidates] == [
        "us-0",
        "us-1",
        "us-2",
        "us-3",
        "us-9",
    ]
    assert step.decision.candidates[-1].why == "full" and step.decision.considered == 5
    assert step.decision.candidates[2].terms == {"queue_s": 2.0}


def test_a_late_list_is_the_receipts_own_whatever_has_changed_since():
    free, busy = [Target(f"us-{n}", n) for n in range(3)], [(Target("us-9", 9), "full")]
    layers = [CandidateLayer(REPLICA, free, busy)]
    choice = Choice(free[1], "because", 2, [Score(one, 0.1 * one.load) for one in free])
    prompt = Prompt(500, tuple(range(40)), 10.0, ((1, 30.0),))
    listed, considered = receipt(layers, choice, prompt)
    late = unlisted(layers, choice, prompt)
    free.clear(), busy.clear()
    assert late is not None
    assert late.candidates() == listed and late.considered == considered


def test_of_a_pair_the_last_prefill_stage_is_timed():
    """It is no step: routers of the version before know none of that name."""
    made = decided()
    made = replace(made, decision=replace(made.decision, prefill="us-3"))
    failed = ev.AttemptFailed(1, 2, "reset", prefill=True)
    steps = [
        Step(1.0, made), Step(1.5, ev.PrefillEnded(1, 1)), Step(2.0, failed),
        Step(3.0, made), Step(3.25, ev.PrefillEnded(1, 2)),
    ]  # fmt: skip

    def life(count, decision=made, started_at=9.1):
        ring, noted = kept(), tuple(steps[:count])
        ring.add(HELD._replace(decided=decision, steps=noted, started_at=started_at))
        [found] = decode_answer(encode_answer(ring.find("r"))).requests
        return found

    assert (life(5).prefill_replica, life(5).prefill_s) == ("us-3", 0.25)
    assert life(4).prefill_s is None, "the last attempt's has not ended"
    assert life(5, started_at=3.2).prefill_s is None, "the first byte came before its end"
    assert [step.what for step in life(5).steps] == ["decided", "failed", "decided"]
    alone = life(5, decided())
    assert (alone.prefill_replica, alone.prefill_s) == (None, None)


def test_no_decision_keeps_a_whole_fleet():
    targets = [Target(f"r{number}", 0) for number in range(500)]
    layers = [CandidateLayer(REPLICA, targets, [(one, "full") for one in targets])]
    scores = [Score(one, 1.0) for one in targets]
    assert unlisted(layers, Choice(targets[0], "x", 0, scores), Prompt(1, ())) is None
    few = unlisted(layers, Choice(targets[0], "x", 0, scores[:SCORES_MAX]), Prompt(1, ()))
    assert few is not None and few.considered == 1000
    assert all(len(free) == len(busy) == 8 for _, free, busy in few.layers)


def test_an_answer_is_never_larger_than_a_message_may_be():
    ring, made = kept(), decided("x" * 9000)
    steps = (Step(1.0, made),) * (STEPS_MAX + 50)
    for _ in range(LIVES_MAX):
        ring.add(HELD._replace(decided=made, steps=steps, detail="y" * 9000))
    found = ring.find("r")
    assert max(len(one.steps) for one in found.requests) == STEPS_MAX
    data = encode_answer(found)
    assert len(data) <= ANSWER_BYTES_MAX
    answer = decode_answer(data)
    assert answer.left_out + len(answer.requests) == LIVES_MAX and answer.left_out > 0


@pytest.mark.parametrize(
    "wrong", [{"request": ""}, {"request": "x" * 129}, {"slowest": 51}, {"recent": 51}, {"v": 2}, 7]
)
def test_a_question_is_checked(wrong):
    with pytest.raises(WireError):
        decode_question(orjson.dumps(wrong))
    assert decode_question(b'{"slowest": 3, "new": 1}') == RequestQuestion(slowest=3)
