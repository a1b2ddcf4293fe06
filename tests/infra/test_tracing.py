"""Tracing as a process has it: the SDK keeps its provider for the life of the process."""

import asyncio
import os
import socket
import sys
import time

import pytest
from opentelemetry import trace

from infra import tracing
from tests.support.otlp_collector import otlp_collector

PARENT = f"00-{'1' * 32}-{'2' * 16}-00"
TRACE = f"00-{'1' * 32}-{'2' * 16}"

ONE_SPAN = """
import logging, sys, time
from infra import tracing
logging.basicConfig()
tracing.FLUSH_S = float(sys.argv[1])
tracing.set_up("mesh-test", **{"mesh.region": "us"})
with tracing.tracer("t").start_as_current_span("last"):
    pass
before = time.monotonic()
tracing.shut_down()
print(before, time.monotonic())
"""


async def ended(endpoint: str, flush_s: float) -> tuple[float, float, str]:
    """Seconds in `shut_down`, seconds from there to the end, and what the process logged.

    All processes of a machine share the clock.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ONE_SPAN, str(flush_s)),
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(40):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    before, after = map(float, out.split())
    return after - before, time.monotonic() - after, err.decode()


async def test_the_last_spans_are_flushed_at_the_end() -> None:
    async with otlp_collector() as collector:
        _, _, said = await ended(collector.url, flush_s=30.0)  # this process is slow, perhaps
        assert [(span.name, span.service) for span in collector.spans] == [("last", "mesh-test")]
    assert "lost" not in said


async def test_an_endpoint_that_never_answers_does_not_keep_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        shutting_s, ending_s, said = await ended(endpoint, tracing.FLUSH_S)
    # The SDK would wait for 10 s, and then try again.
    assert tracing.FLUSH_S - 0.1 < shutting_s < 6.0
    assert ending_s < 6.0  # the interpreter's end does not wait for it either
    assert "the last spans are lost" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("carrier", "passed_on"),
    [
        ({}, {}),
        ({"traceparent": f"{TRACE}-01"}, {}),
        ({"traceparent": f"{TRACE}-03", "tracestate": "a=b"}, {}),
        ({"traceparent": f"{TRACE}-00"}, {"traceparent": f"{TRACE}-00"}),
        ({"traceparent": f"{TRACE}-02", "x": "y"}, {"traceparent": f"{TRACE}-02"}),
        (
            {"traceparent": f"{TRACE}-00", "tracestate": "a=b"},
            {"traceparent": f"{TRACE}-00", "tracestate": "a=b"},
        ),
        ({"traceparent": "00-nonsense-00"}, {}),
        ({"traceparent": f"{TRACE}-00-more"}, {}),
        ({"tracestate": "a=b"}, {}),
    ],
)
def test_only_what_is_surely_not_sampled_is_passed_on_as_it_is(carrier, passed_on) -> None:
    assert tracing.unsampled(carrier) == passed_on


def test_a_span_that_records_nothing_injects_what_the_propagator_would() -> None:
    came = {"traceparent": f"{TRACE}-02", "tracestate": "a=b,c=d"}
    span = trace.get_current_span(tracing.extract(came))
    injected: dict[str, str] = {}
    tracing.inject_unrecorded(injected, span)
    assert injected == came
    tracing.inject_unrecorded(nothing := {}, trace.INVALID_SPAN)
    assert nothing == {}


@pytest.mark.parametrize(
    ("state", "kept"),
    [("a=" + "x" * 510, True), ("a=" + "x" * 511, False), ("a=\udcff", False), ("a=\xe9", False)],
)
def test_a_trace_state_goes_on_if_it_is_short_and_plain(state, kept):
    carrier = {"traceparent": PARENT, "tracestate": state}
    assert ("tracestate" in tracing.unsampled(carrier)) is kept
    of = trace.get_current_span(tracing.extract(carrier)).get_span_context()
    assert of.is_valid
    if not kept:
        assert not of.trace_state
