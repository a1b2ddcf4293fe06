"""What a request cost in tokens: by its engine's counts, else by estimate, and nothing twice."""

from dataclasses import replace

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.session.cost import NOTHING, Cost
from mesh.session.record import Failure, Step
from mesh.session.said import Said, Splice
from schemas import exchange, wire
from schemas.decision import Candidate, CandidateKind, Decision, Placement
from schemas.exchange import Frame, FrameView, Outcome
from schemas.http import Fault
from schemas.response_calls import ResponseCall
from tests.mesh.adapters.build import JSON, Feeder, client_request
from tests.mesh.session.test_session import Router

PROMPT_TOKENS, MATCHED = 300, 128


def sent(**fields) -> fx.Decided:
    replica = Candidate(
        name="g1", kind=CandidateKind.REPLICA, available=True, matched_tokens=MATCHED
    )
    return fx.Decided(
        1,
        Decision(
            request="q-1", region="us", policy="mesh", placement=Placement.LOCAL, replica="g1",
            reason="", candidates=(replica,), **fields,
        ),
    )  # fmt: skip


def asked(**fields):
    record = client_request()
    prompt = Prompt(PROMPT_TOKENS, ())
    record.request = replace(record.request, prompt=prompt, answer_tokens=None, **fields)
    record.decided = sent()
    record.steps = (Step(1.0, record.decided),)
    return record


def event(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode()


def ended(feeder: Feeder, prompt: int = -1, cached: int = -1, output: int = -1) -> Cost:
    end = exchange.End(Outcome.DONE, "", prompt, cached, output, 0.1)
    feeder.answer.feed(FrameView(Frame.END, feeder._number, wire.encode(end)), 0.0)
    return feeder.client_request.ending_at(3.0, "ok", 200).cost


def streaming(record, tokens: int = 40) -> Feeder:
    """As many tokens as a client has got of a stream."""
    feeder = Feeder(record)
    record.first_byte_at = 2.0
    feeder.data(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n' + event("tok"))
    feeder.answer.take()
    for _ in range(tokens - 1):
        feeder.data(event("abc"))
        feeder.answer.take()
    return feeder


@pytest.mark.parametrize(
    ("counts", "cost"),
    [
        ((90, 40, 7), Cost(50, 40, 7)),
        ((90, -1, 7), Cost(90, 0, 7)),  # it says nothing of cached tokens
        ((90, 400, 7), Cost(0, 90, 7)),  # more than there were
        ((90, 0, 0), Cost(90, 0, 0)),
    ],
)
def test_what_an_engine_counts_is_taken_as_it_is(counts, cost):
    record = asked()
    record.first_byte_at = 2.0
    assert ended(Feeder(record, JSON), *counts) == cost
    assert not (cost.is_prompt_estimated or cost.is_output_estimated)
    assert cost.prompt == counts[0]


def test_a_client_that_leaves_inside_its_stream_has_cost_what_came_of_it():
    record = asked()
    streaming(record, 40)
    cost = record.ending_at(3.0, "client_gone", 499).cost
    assert cost == Cost(PROMPT_TOKENS - MATCHED, MATCHED, 40, True, True)
    assert cost.is_prompt_estimated or cost.is_output_estimated


def test_the_core_is_told_what_a_client_that_left_has_cost():
    router, record = Router(), asked()
    streaming(record, 40)
    router.session.admit(record)
    router.session.end(record, "client_gone", 499)
    request = record.request
    [told] = [one for one in router.events if isinstance(one, ev.CostEstimated)]
    assert told == ev.CostEstimated(request.key, request.model, PROMPT_TOKENS - MATCHED, 40)


def test_a_stream_whose_engine_counts_nothing_is_estimated():
    assert ended(streaming(asked(), 25)) == Cost(PROMPT_TOKENS - MATCHED, MATCHED, 25, True, True)


def test_of_a_count_that_came_in_part_the_rest_is_estimated():
    assert ended(streaming(asked(), 25), prompt=90, cached=10) == Cost(80, 10, 25, False, True)


def test_a_whole_answer_without_counts_is_estimated_by_its_bytes():
    record = asked()
    record.first_byte_at = 2.0
    feeder = Feeder(record, JSON)
    feeder.data(b"x" * 800)
    feeder.answer.take()
    assert ended(feeder).output == 100


@pytest.mark.parametrize(
    ("failure", "is_its"),
    [
        (None, True),  # the client hung up
        (Failure(Fault.DEADLINE, "late"), True),
        (Failure(Fault.ENGINE_FAILED, "lost"), False),
        (Failure(Fault.SATURATED, "shed"), False),
    ],
)
def test_a_prompt_is_its_clients_where_the_client_gave_up(failure, is_its):
    record = asked()
    feeder = Feeder(record)
    feeder.answer.head = None
    feeder.answer.replica = "g1"
    record.failure = failure
    cost = record.ending_at(3.0, "any").cost
    assert cost == (Cost(PROMPT_TOKENS - MATCHED, MATCHED, 0, True, True) if is_its else NOTHING)


def test_a_client_that_leaves_the_hold_queue_has_cost_nothing():
    record = asked()
    assert record.ending_at(3.0, "client_gone").cost == NOTHING
    Feeder(record).answer.head = None
    record.steps += (Step(2.0, ev.AttemptFailed(1, 1, "lost")),)
    assert record.ending_at(3.0, "client_gone").cost == NOTHING


def test_what_an_engine_refuses_costs_nothing():
    record = asked()
    record.first_byte_at = 2.0
    assert ended(Feeder(record, JSON, 400)) == NOTHING


def test_a_stream_that_went_on_elsewhere_is_one_answer_whose_prompt_counts_once():
    """The second engine has read the prompt and what was said, and counts both as its prompt."""
    record = asked()
    record.said = said = Said(b"{}", is_chat=True)
    said.tokens = said.text_tokens = 30
    record.splice = Splice(said, "said", 30, is_closing=False, more=30)
    feeder = streaming(record, 3)
    cost = ended(feeder, prompt=PROMPT_TOKENS + 30, cached=64, output=12)
    assert cost == Cost(PROMPT_TOKENS - 64, 64, 42, True, True)


def test_embeddings_generate_nothing():
    record = asked()
    record.request = replace(record.request, answer_tokens=0)
    record.first_byte_at = 2.0
    assert ended(Feeder(record, JSON), prompt=90) == Cost(90, 0, 0)


def test_what_is_asked_about_a_response_costs_nothing():
    record = asked()
    record.call = ResponseCall("GET", "/v1/responses/{id}", "resp_1")
    record.first_byte_at = 2.0
    feeder = Feeder(record, JSON)
    feeder.data(b"x" * 800)
    assert ended(feeder) == NOTHING
