"""The spans of one request, as a real OpenTelemetry SDK records them."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision as Sampled
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import StatusCode, get_current_span

from infra import tracing
from mesh.adapters.spans import IngressSpan, RequestSpans
from mesh.core.model import effects as fx
from schemas.decision import Decision, Placement

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00", "tracestate": "vendor=1"}


class Drawn(Sampler):
    """Samples nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def should_sample(self, parent_context, trace_id, name, *_, **others) -> SamplingResult:
        self.asked.append(name)
        state = get_current_span(parent_context).get_span_context().trace_state
        return SamplingResult(Sampled.DROP, trace_state=state)

    def get_description(self) -> str:
        return "none"


@pytest.fixture
def ended(monkeypatch):
    """The spans that have ended, in order."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("mesh.adapters.spans._TRACER", provider.get_tracer("test"))
    return exporter.get_finished_spans


def decision(placement: Placement, **fields) -> Decision:
    return Decision(
        request="q-1", region="us", policy="p", placement=placement, reason="", **fields
    )


def test_a_request_that_was_held_refused_and_answered(ended):
    spans = RequestSpans("q-1", "tiny", tracing.extract(PARENT))
    spans.decided(fx.Decided(1, decision(Placement.HOLD)))
    spans.decided(fx.Decided(1, decision(Placement.LOCAL, replica="us-0")))
    first: dict[str, str] = {}
    spans.dispatched("us-0", 1, first)
    spans.decided(fx.Decided(1, decision(Placement.PEER, peer="eu")))
    second: dict[str, str] = {}
    spans.dispatched("eu", 2, second)
    waited = {"held_s": 1.0, "peer_held_s": 2.0, "attempts_s": 0.5, "ttft_s": 3.5}
    spans.first_byte(decision(Placement.PEER, peer="eu", replica="eu-0", **waited))
    spans.end(200)
    names = [span.name for span in ended()]
    assert names == [
        "mesh.decide",
        "mesh.hold",
        "mesh.decide",
        "mesh.decide",
        "mesh.dispatch",
        "mesh.dispatch",
        "mesh.request",
    ]
    *children, root = ended()
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    assert f"{root.parent.span_id:016x}" == PARENT["traceparent"].split("-")[2]
    assert root.attributes["http.response.status_code"] == 200
    assert {f"mesh.{name}": value for name, value in waited.items()}.items() <= (
        root.attributes.items()
    )
    assert (root.attributes["mesh.region"], root.attributes["mesh.replica"]) == ("eu", "eu-0")
    assert root.status.status_code is StatusCode.UNSET
    again, answered = [span for span in ended() if span.name == "mesh.dispatch"]
    assert again.status.description == "placed again"
    assert answered.status.status_code is StatusCode.UNSET
    for headers, span in ((first, again), (second, answered)):
        assert headers["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"


def test_a_request_that_failed_leaves_no_span_open(ended):
    spans = RequestSpans("q-1", "tiny", None)
    spans.decided(fx.Decided(1, decision(Placement.HOLD)))
    spans.end(503, "no replica")
    assert [span.name for span in ended()] == ["mesh.decide", "mesh.hold", "mesh.request"]
    assert ended()[-1].status.description == "no replica"


def test_a_peer_s_request_that_was_held_has_a_span_of_its_wait(ended):
    span = IngressSpan("q-1", "us", tracing.extract(PARENT))
    span.decided(fx.Decided(1, decision(Placement.LOCAL, replica="eu-0", held_s=7.75)))
    span.end(200, None)
    hold, *others = ended()
    assert [one.name for one in (hold, *others)] == ["mesh.hold", "mesh.decide", "mesh.ingress"]
    assert hold.end_time - hold.start_time == 7_750_000_000


@pytest.mark.parametrize(("refused", "told"), [(None, None), ("no_replica", "refused: no_replica")])
def test_a_peer_s_request_is_under_the_span_of_the_asking_router(ended, refused, told):
    span = IngressSpan("q-1", "us", tracing.extract(PARENT))
    headers: dict[str, str] = {}
    if refused is None:
        span.decided(fx.Decided(1, decision(Placement.LOCAL, replica="eu-0")))
        span.dispatched("eu-0", 1, headers)
    span.end(200, refused)
    ingress = ended()[-1]
    assert f"{ingress.parent.span_id:016x}" == PARENT["traceparent"].split("-")[2]
    assert ingress.status.description == told
    if refused is None:
        assert headers["traceparent"].split("-")[2] == f"{ingress.context.span_id:016x}"


@pytest.mark.parametrize("parent", [None, UNSAMPLED])
def test_a_request_that_is_not_sampled_makes_no_more_spans_and_says_so_to_others(
    monkeypatch, parent
):
    sampler = Drawn()
    provider = TracerProvider(sampler=sampler)
    monkeypatch.setattr("mesh.adapters.spans._TRACER", provider.get_tracer("test"))
    spans = RequestSpans("q-1", "tiny", None if parent is None else tracing.extract(parent))
    headers: dict[str, str] = {}
    spans.dispatched("us-0", 1, headers)
    ingress = IngressSpan("q-1", "us", tracing.extract(headers))
    to_agent: dict[str, str] = {}
    ingress.dispatched("eu-0", 1, to_agent)
    assert not spans.is_recording and not ingress.is_recording, "so nothing else is called"
    assert sampler.asked == ["mesh.request", "mesh.ingress"]
    for told in (headers, to_agent):
        assert tracing.unsampled(told) == told != {}
        assert told.get("tracestate") == (parent or {}).get("tracestate")
    traces = {told["traceparent"].split("-")[1] for told in (headers, to_agent)}
    assert len(traces) == 1
    if parent is not None:
        assert traces == {parent["traceparent"].split("-")[1]}
