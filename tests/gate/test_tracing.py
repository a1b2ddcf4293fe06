"""Tracing that is off, or doesn't sample a request, costs next to nothing, in bytecodes."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.gate import bytecodes
from tests.programs.live.tracing_cost import TRACING, count_off

OFF_SHARE_MAX = 0.02
UNSAMPLED_SHARE_MAX = 0.06


async def test_tracing_that_is_off_is_next_to_nothing():
    counted = await count_off()
    assert counted["a heartbeat"][0] == 0
    shares = {act: part / whole for act, (part, whole) in counted.items()}
    assert 0 < max(shares.values()) < OFF_SHARE_MAX


async def test_a_request_that_is_not_sampled_costs_little(nats_server, monkeypatch):
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    monkeypatch.setattr("mesh.adapters.spans._TRACER", tracer)
    in_tracing = await bytecodes.count_edge(nats_server.url, TRACING)
    in_all = await bytecodes.count_edge(nats_server.url, (*bytecodes.OURS, *TRACING))
    assert in_tracing["a plain request"] / in_all["a plain request"] < UNSAMPLED_SHARE_MAX
