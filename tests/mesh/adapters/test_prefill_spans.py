"""The spans of prefill stages, as the SDK is given them."""

from dataclasses import replace
from itertools import count
from time import time_ns

import orjson
import pytest

from infra import trace_context, tracing
from mesh.adapters.spans import PassedOn, ingress_trace, request_trace
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.record import OpenRequest
from schemas.decision import Placement
from schemas.exchange import H_PATH, H_REQUEST, H_STAGE, End
from tests.mesh.adapters.test_spans import LOCAL, NOW, OK, WORK, answered, client, decided, sent
from tests.mesh.core.build import foreign
from tests.mesh.session.test_prefill_stages import FIRST, HEAD, PARAMS, SECOND
from tests.mesh.session.test_prefill_stages import answered as stage_answered
from tests.mesh.session.test_session import END, Router
from tests.support.spans import SAMPLED, described, traced

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
        decode = sent(spans, LOCAL)
        answered(record, End("done", "", 9, 4, 2, 0.1), 3.5)
        spans.end(record, OK, NOW)
        whole, stage = [span for span in ended() if span.name == WORK]
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


def both_stages(router: Router) -> list[str | None]:
    """The trace contexts of the stages' work messages, the prefill stage's first."""
    router.session._secret = map(str, count()).__next__
    stage_answered(router, router.sent[0][4], HEAD, orjson.dumps(PARAMS), END)
    work = [sent[5] for sent in router.sent if sent[0] == "send_work"]
    assert [headers[H_STAGE] for headers in work] == ["prefill", "decode"]
    return [headers.get(trace_context.PARENT) for headers in work]


def test_a_client_s_trace_goes_on_to_both_stages_where_the_router_has_no_tracing():
    assert tracing.active is None
    parent = trace_context.read(SAMPLED)
    router = Router(RequestArrived=[FIRST], PrefillEnded=[SECOND])
    router.admitted(spans=PassedOn(trace_context.passed_on(SAMPLED), parent))
    assert both_stages(router) == [SAMPLED[trace_context.PARENT]] * 2


def test_both_stages_of_a_peers_request_are_below_the_span_of_the_router_that_placed_it():
    second = replace(SECOND, answer_inbox="_INBOX.eu.r1.x")
    router = Router(RequestArrived=[FIRST], PrefillEnded=[second])
    received = {H_REQUEST: "r", H_PATH: "/v1/chat/completions", **SAMPLED}
    with traced():
        spans = ingress_trace(received, "eu", "mesh.us.ingress")
        record = OpenRequest(request=foreign(1), body=b"{}", received=received, spans=spans)
        router.session.admit_forwarded(record)
        found = both_stages(router)
    ours = [trace_context.read({trace_context.PARENT: one}).span_id for one in found]
    assert ours == [spans._context.span_id] * 2
    assert ours[0] != trace_context.read(SAMPLED).span_id
