"""W3C Trace Context as others write it."""

import pytest
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from infra import trace_context
from infra.trace_context import TraceContext

TRACE = f"00-{'1' * 32}-{'2' * 16}"
OTHERS = TraceContextTextMapPropagator()

GIVEN = [
    {},
    {"traceparent": f"{TRACE}-01"},
    {"traceparent": f"{TRACE}-00"},
    {"traceparent": f"{TRACE}-02", "tracestate": "a=b,c=d"},
    {"traceparent": f"{TRACE}-03", "tracestate": "a=b"},
    {"traceparent": "00-nonsense-00"},
    {"traceparent": f"{TRACE}-00-more"},
    {"traceparent": f"01{TRACE[2:]}-01-more"},
    {"traceparent": f"ff{TRACE[2:]}-01"},
    {"traceparent": f"00-{'0' * 32}-{'2' * 16}-01"},
    {"traceparent": f"00-{'1' * 32}-{'0' * 16}-01"},
    {"traceparent": f"{TRACE}-1"},
    {"traceparent": f"{TRACE.upper()}-01".replace("1", "A")},
    {"tracestate": "a=b"},
]


@pytest.mark.parametrize("carrier", GIVEN)
def test_it_is_read_as_opentelemetry_reads_it(carrier) -> None:
    theirs = get_current_span(OTHERS.extract(carrier)).get_span_context()
    ours = trace_context.read(carrier)
    assert (ours is not None) == theirs.is_valid
    if ours is not None:
        assert (ours.trace_id, ours.span_id) == (theirs.trace_id, theirs.span_id)
        assert ours.is_sampled == theirs.trace_flags.sampled
        assert ours.state == theirs.trace_state.to_header()
        assert trace_context.passed_on(carrier) == carrier


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("state", ["", "a=b,c=d"])
def test_what_is_written_is_read_again(is_sampled, state) -> None:
    written = TraceContext(0xAB, 0xCD, is_sampled, state)
    headers: dict[str, str] = {}
    written.write(headers)
    assert trace_context.read(headers) == written._replace(is_remote=True)
    theirs = get_current_span(OTHERS.extract(headers)).get_span_context()
    assert (theirs.trace_id, theirs.span_id) == (0xAB, 0xCD)


@pytest.mark.parametrize(
    ("state", "kept"),
    [("a=" + "x" * 510, True), ("a=" + "x" * 511, False), ("a=\udcff", False), ("a=\xe9", False)],
)
def test_a_trace_state_goes_on_if_it_is_short_and_plain(state, kept) -> None:
    carrier = {"traceparent": f"{TRACE}-01", "tracestate": state}
    context = trace_context.read(carrier)
    assert context is not None
    assert context.state == (state if kept else "")
    assert ("tracestate" in trace_context.passed_on(carrier)) is kept
