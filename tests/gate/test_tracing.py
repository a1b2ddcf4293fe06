"""Tracing that is off costs nothing, an unsampled request next to nothing, in bytecodes."""

import json

from opentelemetry.sdk.trace import SpanProcessor

from infra import otlp, tracing
from tests.gate import bytecodes
from tests.programs.live.tracing_cost import TRACING

UNSAMPLED_SHARE_MAX = 0.02


async def test_tracing_that_is_off_costs_nothing(nats_server):
    counted = await bytecodes.count_edge(nats_server.url, TRACING)
    assert set(counted.values()) == {0.0}


async def test_a_request_that_is_not_sampled_costs_little(nats_server, monkeypatch):
    tracer = tracing.Tracer(otlp.OtlpSpans(SpanProcessor()), lambda trace_id, parent: False)
    monkeypatch.setattr(tracing, "active", tracer)
    in_tracing = await bytecodes.count_edge(nats_server.url, TRACING)
    in_all = json.loads(bytecodes.FIGURES.read_text())["figures"]
    assert 0 < in_tracing["a plain request"] / in_all["a plain request"] < UNSAMPLED_SHARE_MAX
