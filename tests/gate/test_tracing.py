"""Tracing that is off costs nothing, an unsampled request next to nothing, in bytecodes."""

from opentelemetry.sdk.trace import SpanProcessor

from infra import otlp, tracing
from tests.gate import bytecodes
from tests.programs.live.tracing_cost import TRACING, count_off

UNSAMPLED_SHARE_MAX = 0.02


async def test_tracing_that_is_off_costs_nothing():
    counted = await count_off()
    assert {act: part for act, (part, _) in counted.items() if part} == {}
    assert min(whole for _, whole in counted.values()) > 0


async def test_a_request_that_is_not_sampled_costs_little(nats_server, monkeypatch):
    tracer = tracing.Tracer(otlp.OtlpSpans(SpanProcessor()), lambda trace_id, parent: False)
    monkeypatch.setattr(tracing, "active", tracer)
    in_tracing = await bytecodes.count_edge(nats_server.url, TRACING)
    in_all = await bytecodes.count_edge(nats_server.url, (*bytecodes.OURS, *TRACING))
    assert in_tracing["a plain request"] / in_all["a plain request"] < UNSAMPLED_SHARE_MAX
