"""The spans of prefill stages, as the SDK is given them."""

from time import time_ns

import pytest

from infra import trace_context, tracing
from mesh.adapters.spans import PassedOn, ingress_trace, request_trace
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.record import Ending, OpenRequest
from schemas.decision import Placement
from schemas.exchange import End
from tests.mesh.adapters.test_spans import (
    LOCAL,
    NOW,
    OK,
    SAMPLED,
    WORK,
    answered,
    client,
    decided,
    note,
    request,
    sent,
)
from tests.support.spans import described, traced

PREFILL = fx.Dispatch(1, 1, "p", 1, None)
STAGE_ENDS = [
    (ev.PrefillEnded(1, 1), ("UNSET", None, None)),
    (ev.AttemptRefused(1, 1, "full", "us", "p", 1, 1, prefill=True),
     ("ERROR", "refused: full", "full")),
    (ev.AttemptFailed(1, 1, "reset", prefill=True), ("ERROR", "reset", "lost")),
    (None, ("ERROR", "the router gave it up", "given_up")),
]  # fmt: skip


@pytest.mark.parametrize(("event", "told"), STAGE_ENDS)
def test_a_prefill_stage_has_a_span_of_its_own_whose_context_its_agent_gets(event, told):
    headers: dict[str, str] = {}
    with traced() as ended:
        spans = request_trace(tracing.active)
        record = client(spans)
        decided(record, Placement.LOCAL, replica="us-0")
        spans.prefill_dispatched(PREFILL, headers)
        before_ns = time_ns()
        spans.prefill_ended(1, event)
        after_ns = time_ns()
        if isinstance(event, ev.PrefillEnded):
            note(record, event)
        decode = sent(spans, LOCAL)
        answered(record, End("done", "", 9, 4, 2, 0.1), 3.5)
        spans.end(record, OK._replace(ended_at=NOW))
        whole, stage = [span for span in ended() if span.name == WORK]
    assert described(whole) == ("UNSET", None, None), "the attempt goes on after its prefill stage"
    assert trace_context.read(decode).span_id == whole.context.span_id
    assert trace_context.read(headers).span_id == stage.context.span_id != whole.context.span_id
    assert stage.attributes["messaging.destination.name"] == "mesh.us.replica.p.work"
    assert (stage.attributes["mesh.stage"], "mesh.stage" in whole.attributes) == ("prefill", False)
    assert before_ns <= stage.end_time <= after_ns and described(stage) == told


def test_a_prefill_stage_of_a_request_that_is_not_sampled_says_so():
    headers: dict[str, str] = {}
    with traced(0.0):
        request_trace(tracing.active).prefill_dispatched(PREFILL, headers)
    assert not trace_context.read(headers).is_sampled


def test_both_agents_of_a_pair_get_a_client_s_trace_where_this_router_adds_no_spans():
    span, headers = PassedOn(trace_context.passed_on(SAMPLED), trace_context.read(SAMPLED)), {}
    span.prefill_dispatched(PREFILL, headers)
    assert headers == sent(span, LOCAL) and trace_context.read(headers).trace == "a" * 32


def test_the_prefill_agent_of_a_peer_s_request_gets_the_context_of_its_span():
    headers: dict[str, str] = {}
    with traced() as ended:
        span = ingress_trace(SAMPLED, "us", "mesh.eu.ingress")
        span.prefill_dispatched(PREFILL, headers)
        record = OpenRequest(request=request(), spans=span)
        decided(record, Placement.LOCAL, replica="eu-0", prefill="eu-1")
        span.end(record, Ending("placed", 200)._replace(ended_at=NOW))
        whole = ended()[-1]
    assert trace_context.read(headers).span_id == whole.context.span_id
