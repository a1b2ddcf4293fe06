"""What is counted of tracing, and how the measurement is told; `make bench-tracing` plays it."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.bench.results import Results
from tests.benchmarks import gate
from tests.benchmarks.tracing_cost import OFF, SAMPLED, TRACING, count_off, environment, report

OFF_SHARE_MAX = 0.02
UNSAMPLED_SHARE_MAX = 0.06


async def test_tracing_that_is_off_is_next_to_nothing():
    counted = await count_off()
    assert counted["a heartbeat"][0] == 0
    shares = {act: part / whole for act, (part, whole) in counted.items()}
    assert 0 < max(shares.values()) < OFF_SHARE_MAX


async def test_a_request_that_is_not_sampled_is_not_told(nats_server, monkeypatch):
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    monkeypatch.setattr("mesh.adapters.spans._TRACER", tracer)
    in_tracing = await gate.count_edge(nats_server.url, TRACING)
    in_all = await gate.count_edge(nats_server.url, (*gate.OURS, *TRACING))
    assert in_tracing["a plain request"] / in_all["a plain request"] < UNSAMPLED_SHARE_MAX


@pytest.mark.parametrize(("sampled", "endpoint"), [(None, ""), (0.01, "http://c:1")])
def test_a_mesh_without_tracing_has_no_endpoint(sampled, endpoint):
    variables = environment(sampled, "http://c:1")
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    assert variables["OTEL_TRACES_SAMPLER_ARG"] == str(sampled or 0)


def test_figures_stand_beside_those_of_the_same_round_without_tracing():
    found = Results()
    for off_us, noise in ((300.0, 1.0), (600.0, 2.0)):
        for setting in SAMPLED:
            figures = {"router_cpu_us": off_us, "agents_cpu_us": 100.0 * noise}
            if setting == "100 %":
                figures = {"router_cpu_us": 2 * off_us, "agents_cpu_us": 100.0 * noise}
                figures["mesh-router spans"] = 3.0
            found.add("plain", setting, figures)
    text = report(found, {"a plain request": (1.0, 100.0)})
    assert f"| plain: router | {OFF} | 450 (300–600) |  |  |" in text
    twice = "| plain: router | 100 % | 900 (600–1,200) | 2.00 (2.00–2.00) | 3.00 (3.00–3.00) |"
    assert twice in text
    assert "| plain: agent | 1 % | 150 (100–200) | 1.00 (1.00–1.00) | – |" in text
    assert "| a plain request | 1 | 100 | 1.00% |" in text
