"""How the cost of tracing is measured and reported; `make bench-tracing` plays it."""

import pytest

from tests.programs.bench.results import Results
from tests.programs.live.tracing_cost import COMPARED_TO, OFF, SETTINGS, environment, report


@pytest.mark.parametrize(("sampled", "endpoint"), [(None, ""), (0.01, "http://c:1")])
def test_a_mesh_without_tracing_has_no_endpoint(sampled, endpoint):
    variables = environment(sampled, "http://c:1")
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    assert variables["OTEL_TRACES_SAMPLER_ARG"] == str(sampled or 0)


def test_figures_are_compared_with_the_same_round_without_tracing():
    found = Results()
    for off_us, noise in ((300.0, 1.0), (600.0, 2.0), (400.0, 1.0)):
        for setting in SETTINGS:
            figures = {"router_cpu_us": off_us, "agents_cpu_us": 100.0 * noise}
            if setting == "100 %":
                figures = {"router_cpu_us": 2 * off_us, "agents_cpu_us": 100.0 * noise}
                figures["mesh-router spans"] = 3.0
            if setting == COMPARED_TO[OFF]:
                figures["router_cpu_us"] = off_us / 4
            found.add("plain", setting, figures)
    text = report(found, {"a plain request": (1.0, 100.0)})
    assert "| plain: router | off, no log | 100 (87.5–125) |  |  |  |" in text
    assert "| plain: router | off | 400 (350–500) | 4.00 (4.00–4.00) | off, no log |  |" in text
    twice = (
        "| plain: router | 100 % | 800 (700–1,000) | 2.00 (2.00–2.00) | off | 3.00 (3.00–3.00) |"
    )
    assert twice in text
    assert "| plain: agent | 1 % | 100 (100–150) | 1.00 (1.00–1.00) | off |  |" in text
    assert "| a plain request | 1 | 100 | 1.00% |" in text
