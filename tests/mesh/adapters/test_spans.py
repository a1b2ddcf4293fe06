"""The spans of one request, as the SDK is given them."""

from time import time_ns
from types import SimpleNamespace

import pytest
from opentelemetry.trace import SpanKind

from infra import trace_context, tracing
from mesh.adapters.spans import NS, IngressSpan, ingress_trace, request_trace
from mesh.adapters.tail_rule import KEPT_PER_S_MAX, SlowLimits, TailRule
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.model.served_names import kept_name, served_name
from mesh.session.answer import AnswerReceiver
from mesh.session.client_request import ClientRequest
from mesh.session.record import NO_TRACE, Ending, OpenRequest, Step, StepKind
from schemas.decision import Decision, Placement
from schemas.exchange import End, Head, Placed
from schemas.response_calls import RESPONSE, RESPONSE_CANCEL, ResponseCall
from schemas.response_ids import response_id
from tests.support.spans import SAMPLED, UNSAMPLED, described, traced

FORWARD = fx.Forward(1, 2, "eu")
LOCAL = fx.Dispatch(1, 1, "us-0", 1, None)
OK = Ending("ok", 200)
FAILED = Ending("failed", 502, "engine_failed", "no engine answers")
ROOT, HOLD, DECIDE = "chat tiny", "mesh.hold", "mesh.decide"
WORK = "publish mesh.{region}.replica.{replica}.work"
INGRESS = "publish mesh.{region}.ingress"
GATEWAY = "gateway.example:8443"
NEVER, NOW = 1e9, 110.0
ANSWERED = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "mesh",
    "gen_ai.request.model": "tiny",
    "gen_ai.request.stream": True,
    "gen_ai.usage.cache_read.input_tokens": 4,
    "gen_ai.usage.input_tokens": 9,
    "gen_ai.usage.output_tokens": 2,
    "http.request.method": "POST",
    "http.response.status_code": 200,
    "http.route": "/v1/chat/completions",
    "mesh.attempts_s": 0.5,
    "mesh.held_s": 1.0,
    "mesh.outcome": "ok",
    "mesh.peer_held_s": 2.0,
    "mesh.placement": "peer",
    "mesh.region": "eu",
    "mesh.replica": "eu-0",
    "mesh.request_id": "q-1",
    "mesh.ttft_s": 3.5,
    "server.address": "gateway.example",
    "server.port": 8443,
    "url.path": "/v1/chat/completions",
    "url.scheme": "http",
}


@pytest.fixture
def ended():
    with traced() as spans:
        yield spans


@pytest.fixture
def unsampled():
    with traced(0.0) as spans:
        yield spans


def request(**fields) -> Request:
    given = {"arrived_at": 100.0, "deadline": 200.0, "hops": 0, "origin": "us", "model": "tiny"}
    return Request(key=1, request_id="q-1", prompt=Prompt(1, ()), **(given | fields))


def decision(placement: Placement, **fields) -> Decision:
    return Decision(
        request="q-1", region="us", policy="p", placement=placement, reason="", **fields
    )


def note(record: OpenRequest, what: StepKind, outcome: str = "") -> None:
    """Its next step, a quarter of a second after the one before."""
    record.steps += (Step(101.0 + 0.25 * len(record.steps), what, outcome),)


def decided(record: OpenRequest, placement: Placement, **fields) -> None:
    record.decided = fx.Decided(1, decision(placement, **fields))
    note(record, record.decided)


def client(spans, **fields) -> ClientRequest:
    return ClientRequest(request=request(**fields), spans=spans)


def answered(record: ClientRequest, end: End, after_s: float, *, stream: bool = True) -> None:
    """us-0 of its region, or whoever was asked, has answered after that time."""
    answer = record.answer = AnswerReceiver(1, 1, "inbox")
    answer.head, answer.end = Head(200, "", "us", "us-0"), end
    answer.is_event_stream, answer.replica = stream, "eu-0"
    record.first_byte_at = record.request.arrived_at + after_s


def sent(spans, effect) -> dict[str, str]:
    headers: dict[str, str] = {}
    spans.dispatched(effect, headers)
    return headers


def test_a_request_that_was_held_refused_and_answered(ended):
    parent = trace_context.read(SAMPLED)
    spans = request_trace(tracing.active, parent, None, GATEWAY)
    record = client(spans)
    decided(record, Placement.HOLD)
    decided(record, Placement.LOCAL, replica="us-0", held_s=1.0)
    first = sent(spans, LOCAL)
    note(record, ev.AttemptRefused(1, 1, "full", "us", "us-0", 1, 1))
    decided(record, Placement.PEER, peer="eu", held_s=1.0, attempt=2)
    note(record, Placed("eu", "eu-0", 2.0))
    second = sent(spans, FORWARD)
    answered(record, End("done", "", 9, 4, 2, 0.1), 3.5)
    record.answer.peer_held_s = 2.0
    spans.end(record, OK._replace(ended_at=NOW))
    names = [span.name for span in ended()]
    assert names == [DECIDE, HOLD, DECIDE, WORK, DECIDE, INGRESS, ROOT]
    *children, root = ended()
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    assert len({span.context.span_id for span in ended()}) == len(names)
    assert {span.context.trace_id for span in ended()} == {parent.trace_id}
    assert (root.parent.span_id, root.kind) == (parent.span_id, SpanKind.SERVER)
    assert root.attributes == ANSWERED
    assert described(root) == ("UNSET", None, None)
    refused, forwarded = (span for span in children if span.kind is SpanKind.PRODUCER)
    assert described(refused) == ("ERROR", "refused: full", "full")
    assert described(forwarded) == ("UNSET", None, None)
    assert refused.attributes["messaging.destination.name"] == "mesh.us.replica.us-0.work"
    assert forwarded.attributes | {"mesh.target": "", "mesh.attempt": 0} == {
        "messaging.system": "nats",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mesh.eu.ingress",
        "messaging.destination.template": "mesh.{region}.ingress",
        "mesh.target": "",
        "mesh.attempt": 0,
    }
    for headers, span in ((first, refused), (second, forwarded)):
        assert trace_context.read(headers).span_id == span.context.span_id
        assert trace_context.read(headers).is_sampled


def test_unknown_numbers_and_the_time_to_the_first_byte_of_a_plain_answer_are_left_out(ended):
    spans = request_trace(tracing.active)
    record = client(spans)
    decided(record, Placement.LOCAL, replica="us-0")
    sent(spans, LOCAL)
    answered(record, End("done", "", -1, -1, 5, 0.1), 3.5, stream=False)
    spans.end(record, OK._replace(ended_at=NOW))
    root = ended()[-1].attributes
    assert root["gen_ai.usage.output_tokens"] == 5
    absent = ("usage.input_tokens", "cache_read", "ttft", "first_chunk", "stream", "server.")
    assert [name for name in root if any(part in name for part in absent)] == []
    assert -1 not in root.values()


@pytest.mark.parametrize(
    ("ending", "status", "description"),
    [
        (Ending("failed", 504, "deadline_exceeded", "its time is up"), 504, "its time is up"),
        (Ending("shed", 429, "saturated", "all are full"), 429, "all are full"),
        (FAILED, 502, "no engine answers"),
        (Ending("client_gone", 499, "client_gone", "it hung up"), None, "it hung up"),
        (Ending("failed", 403, "", "no region may"), 403, None),
    ],
)
def test_the_status_says_what_went_wrong(ended, ending, status, description):
    spans = request_trace(tracing.active)
    record = client(spans)
    decided(record, Placement.HOLD)
    spans.end(record, ending._replace(ended_at=NOW))
    assert [span.name for span in ended()] == [DECIDE, HOLD, ROOT]
    root = ended()[-1]
    code = "ERROR" if ending.error_type else "UNSET"
    assert described(root) == (code, description, ending.error_type or None)
    assert root.attributes.get("http.response.status_code") == status
    assert root.attributes["mesh.outcome"] == ending.outcome


def test_a_stream_that_broke_has_the_status_that_was_sent(ended):
    spans = request_trace(tracing.active)
    record = client(spans)
    decided(record, Placement.LOCAL, replica="us-0")
    sent(spans, LOCAL)
    answered(record, None, 0.5)
    spans.end(record, FAILED._replace(ended_at=NOW))
    *_, attempt, root = ended()
    assert root.attributes["http.response.status_code"] == 200
    assert described(root) == ("ERROR", "no engine answers", "engine_failed")
    assert described(attempt) == ("UNSET", None, None), "it had brought a first byte"


def test_an_attempt_that_was_given_up_says_so(ended):
    spans = request_trace(tracing.active)
    record = client(spans)
    for attempt in (1, 2, 3, 4):
        decided(record, Placement.LOCAL, replica="us-0", attempt=attempt)
        sent(spans, fx.Dispatch(1, attempt, "us-0", attempt, None))
        if attempt == 1:
            note(record, ev.AttemptFailed(1, 1, "reset"), "engine_lost")
        elif attempt == 2:
            note(record, ev.AttemptFailed(1, 1, "made up"), "nonsense")
        elif attempt == 3:
            note(record, ev.AttemptFailed(1, 1, "an error", 500))
    decided(record, Placement.SHED)
    spans.end(record, FAILED._replace(ended_at=NOW))
    attempts = [described(span) for span in ended() if span.kind is SpanKind.PRODUCER]
    assert attempts == [
        ("ERROR", "reset", "engine_lost"),
        ("ERROR", "made up", "lost"),
        ("ERROR", "an error", "500"),
        ("ERROR", "the router gave it up", "given_up"),
    ]


def test_a_request_under_a_label_says_so_of_its_destination(ended):
    spans = request_trace(tracing.active)
    record = client(spans, residency=("eu-only",))
    decided(record, Placement.PEER, peer="eu", attempt=2)
    sent(spans, FORWARD)
    spans.end(record, FAILED._replace(ended_at=NOW))
    [attempt] = [span for span in ended() if span.kind is SpanKind.PRODUCER]
    assert attempt.name == "publish mesh.{region}.ingress.{label}"
    assert "messaging.destination.name" not in attempt.attributes


def test_a_wait_after_a_refusal_is_a_hold(ended):
    spans = request_trace(tracing.active)
    record = client(spans)
    decided(record, Placement.LOCAL, replica="us-0")
    sent(spans, LOCAL)
    note(record, ev.AttemptRefused(1, 1, "full", "us", "us-0", 1, 1))
    decided(record, Placement.LOCAL, replica="us-0", attempt=2, held_s=0.25)
    sent(spans, fx.Dispatch(1, 2, "us-0", 2, None))
    spans.end(record, OK._replace(ended_at=NOW))
    names = [span.name for span in ended()]
    assert names == [DECIDE, WORK, HOLD, DECIDE, WORK, ROOT]
    hold = ended()[2]
    assert hold.end_time - hold.start_time == NS // 4


# Requests that are not sampled.


@pytest.mark.parametrize("parent", [None, UNSAMPLED])
def test_a_request_that_is_not_sampled_makes_no_spans_and_says_so_to_others(unsampled, parent):
    context = parent and trace_context.read(parent)
    spans = request_trace(tracing.active, context, TailRule(SlowLimits(NEVER, NEVER)))
    record = client(spans)
    decided(record, Placement.LOCAL, replica="us-0")
    headers = sent(spans, LOCAL)
    answered(record, End("done", "", 9, 4, 2, 0.1), 3.5)
    spans.end(record, OK._replace(ended_at=NOW))
    assert not spans.is_recording
    assert unsampled() == ()
    told = trace_context.read(headers)
    assert not told.is_sampled
    at_peer = ingress_trace(headers, "us", "mesh.eu.ingress")
    assert sent(at_peer, LOCAL) == {}, "the request's own headers go on"
    assert (at_peer.is_recording, at_peer.trace_id) == (False, told.trace)
    if parent is not None:
        assert (told.trace_id, told.state) == (context.trace_id, "vendor=1")


@pytest.mark.parametrize(
    ("ending", "ttft_s", "stream", "reason"),
    [
        (OK, 1.9, True, None),
        (OK, 2.0, True, "slow"),
        (OK, 2.0, False, None),
        (FAILED, None, True, "error"),
        (Ending("shed", 429, "saturated", "all are full"), None, True, "error"),
        (Ending("client_gone", 499, "client_gone", "it hung up"), None, True, None),
        (Ending("client_gone", 499, "client_gone", "it hung up"), 2.5, True, "slow"),
        (Ending("failed", 403, "", "no region may"), None, True, None),
    ],
)
def test_a_request_that_failed_or_was_slow_is_traced_nevertheless(
    unsampled, ending, ttft_s, stream, reason
):
    spans = request_trace(tracing.active, None, TailRule(SlowLimits(2.0, NEVER)))
    record = client(spans)
    decided(record, Placement.HOLD)
    decided(record, Placement.LOCAL, replica="us-0")
    headers = sent(spans, LOCAL)
    if ttft_s is not None:
        answered(record, End("done", "", 9, 4, 2, 0.1), ttft_s, stream=stream)
    spans.end(record, ending._replace(ended_at=NOW))
    names = [DECIDE, HOLD, DECIDE, WORK, ROOT]
    assert [span.name for span in unsampled()] == ([] if reason is None else names)
    if reason is not None:
        *children, root = unsampled()
        told = trace_context.read(headers)
        assert (root.context.trace_id, root.context.span_id) == (told.trace_id, told.span_id)
        assert root.attributes["mesh.kept_because"] == reason
        assert root.attributes["mesh.region"] == "us"
        assert {span.parent.span_id for span in children} == {told.span_id}
        assert len({span.context.span_id for span in unsampled()}) == len(names)


def test_a_long_request_is_slow():
    rule = TailRule(SlowLimits(NEVER, 60.0))
    assert rule.keeps(OK, None, 59.0) is None
    assert rule.keeps(OK, 0.1, 60.0) == "slow"


def test_an_outage_is_traced_by_the_first_of_every_second(caplog):
    clock = SimpleNamespace(now=7.2)
    rule = TailRule(SlowLimits(1.0, NEVER), lambda: clock.now)
    kept = [rule.keeps(FAILED, None, 0.1) for _ in range(3 * KEPT_PER_S_MAX)]
    assert kept == ["error"] * KEPT_PER_S_MAX + [None] * (2 * KEPT_PER_S_MAX)
    assert rule.keeps(OK, 5.0, 5.0) == "slow", "the other reason has its own limit"
    assert caplog.text.count("no trace of a request (error)") == 1
    clock.now = 8.0
    assert rule.keeps(FAILED, None, 0.1) == "error"


def test_embeddings_name_the_model_as_its_engine_does(ended):
    spans = request_trace(tracing.active)
    path = "/v1/embeddings"
    asked = request(model=served_name("tiny", path))
    spans.end(ClientRequest(request=asked, path=path, spans=spans), OK._replace(ended_at=NOW))
    [root] = ended()
    assert root.name == "embeddings tiny"
    assert root.attributes["gen_ai.request.model"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("DELETE", RESPONSE, "responses kept response"),
        ("POST", RESPONSE_CANCEL, "cancel kept response"),
    ],
)
def test_a_call_about_a_response_has_its_method_and_not_its_id(ended, method, path, name):
    spans = request_trace(tracing.active)
    kept = response_id("us", "us-0", bytes(16))
    record = ClientRequest(
        request=request(model=kept_name("us", "us-0")),
        path=path,
        call=ResponseCall(method, path, kept),
        spans=spans,
    )
    spans.end(record, OK._replace(ended_at=NOW))
    [root] = ended()
    assert (root.name, root.attributes["http.request.method"]) == (name, method)
    assert root.attributes["http.route"] == path
    assert kept not in repr(root.attributes)


def test_an_attempt_begins_when_it_is_sent_whatever_the_loop_s_clock_says(ended):
    """That clock stands still within a turn; what a peer measures must not seem to be earlier."""
    spans = request_trace(tracing.active)
    record = client(spans)
    decided(record, Placement.PEER, peer="eu", attempt=FORWARD.attempt)
    before_ns = time_ns()
    sent(spans, FORWARD)
    after_ns = time_ns()
    spans.end(record, OK._replace(ended_at=NOW + 5.0))
    [attempt] = [span for span in ended() if span.name == INGRESS]
    assert before_ns <= attempt.start_time <= after_ns


# Peers' requests.


def test_a_peer_s_decision_is_not_before_its_message(ended):
    span = ingress_trace(SAMPLED, "us", "mesh.eu.ingress")
    record = OpenRequest(request=request(), spans=span)
    decided(record, Placement.LOCAL, replica="eu-0")
    stale_s = 0.002  # since this turn of the loop began
    span.end(record, Ending("placed", 200)._replace(ended_at=record.steps[-1].at + stale_s))
    decision, whole = ended()
    assert decision.start_time == decision.end_time == whole.start_time


def test_a_peer_s_request_that_was_held_has_a_span_of_its_wait(ended):
    span = ingress_trace(SAMPLED, "us", "mesh.eu.ingress")
    record = OpenRequest(request=request(), spans=span)
    decided(record, Placement.LOCAL, replica="eu-0", held_s=7.75)
    span.end(record, Ending("placed", 200)._replace(ended_at=NOW))
    hold, *others = ended()
    assert [one.name for one in (hold, *others)] == [
        HOLD,
        DECIDE,
        "process mesh.{region}.ingress",
    ]
    assert hold.end_time - hold.start_time == round(7.75 * NS)


@pytest.mark.parametrize(("refused", "told"), [("", None), ("no_replica", "refused: no_replica")])
def test_a_peer_s_request_is_under_the_span_of_the_asking_router(ended, refused, told):
    span = ingress_trace(SAMPLED, "us", "mesh.eu.ingress.gdpr")
    assert isinstance(span, IngressSpan)
    record = OpenRequest(request=request(), spans=span)
    headers: dict[str, str] = {}
    if not refused:
        decided(record, Placement.LOCAL, replica="eu-0")
        headers = sent(span, LOCAL)
    span.end(
        record, Ending("refused" if refused else "placed", 200, refused)._replace(ended_at=NOW)
    )
    ingress = ended()[-1]
    assert ingress.parent.span_id == trace_context.read(SAMPLED).span_id
    assert ingress.name == "process mesh.{region}.ingress.{label}"
    assert ingress.kind is SpanKind.CONSUMER
    assert ingress.attributes["messaging.destination.name"] == "mesh.eu.ingress.gdpr"
    assert ingress.attributes["messaging.operation.type"] == "process"
    assert described(ingress) == ("ERROR" if refused else "UNSET", told, refused or None)
    if not refused:
        assert trace_context.read(headers).span_id == ingress.context.span_id


def test_a_peer_without_tracing_adds_nothing_and_knows_the_trace():
    assert tracing.active is None
    assert ingress_trace({}, "us", "mesh.eu.ingress") is NO_TRACE
    span = ingress_trace(SAMPLED, "us", "mesh.eu.ingress")
    assert sent(span, LOCAL) == {}
    assert (span.is_recording, span.trace_id) == (False, "a" * 32)
