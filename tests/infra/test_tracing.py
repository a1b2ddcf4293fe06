"""Tracing as a process has it: the SDK keeps its provider for the life of the process."""

import asyncio
import os
import socket
import sys
import time
from functools import partial

import pytest
from opentelemetry.sdk.trace import SpanProcessor

from infra import otlp, trace_context, tracing
from infra.trace_context import TraceContext
from tests.support.otlp_collector import otlp_collector
from tests.support.spans import described, traced
from tests.support.until import PATIENCE_S, until

ONE_SPAN = """
import logging, sys, time
from infra import otlp, tracing
logging.basicConfig()
tracing.FLUSH_S = float(sys.argv[1])
tracing.set_up("mesh-test", "us/t", **{"mesh.region": "us"})
context = tracing.active.begin(None)
now = time.time_ns()
tracing.active.send("last", context, None, began_ns=now, ended_ns=now, attributes={})
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
        async with asyncio.timeout(PATIENCE_S):
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
        [span] = collector.spans
    assert (span.name, span.service, span.region) == ("last", "mesh-test", "us")
    assert span.resource["service.instance.id"] == "us/t"
    assert span.resource["service.version"] == tracing.package_version()
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
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_it_is_on_where_an_endpoint_is_set(environment, is_on) -> None:
    assert tracing.enabled(environment) is is_on


TRACE = 0x1234 << 64  # its last 64 bits decide
LOW, HIGH = TRACE, TRACE + (1 << 64) - 1
SAMPLED, UNSAMPLED = TraceContext(TRACE, 1, True), TraceContext(TRACE, 1, False)


@pytest.mark.parametrize(
    ("name", "share", "sampled"),
    [
        ("", "", [True, True, True, False]),
        ("parentbased_always_on", "0", [True, True, True, False]),
        ("parentbased_traceidratio", "0.5", [True, False, True, False]),
        ("parentbased_traceidratio", "0", [False, False, True, False]),
        ("parentbased_always_off", "", [False, False, True, False]),
        ("always_on", "", [True, True, True, True]),
        ("always_off", "", [False, False, False, False]),
        ("traceidratio", "0.5", [True, False, True, True]),
        ("TraceIDRatio", "1", [True, True, True, True]),
    ],
)
def test_samplers_by_their_standard_names(name, share, sampled) -> None:
    """Without a parent, of a low and of a high trace id; under one that is sampled, or is not."""
    decide = tracing.sampler({tracing.SAMPLER: name, tracing.SHARE: share})
    asked = ((LOW, None), (HIGH, None), (LOW, SAMPLED), (LOW, UNSAMPLED))
    assert [decide(*each) for each in asked] == sampled


@pytest.mark.parametrize(
    ("name", "share"),
    [("jaeger_remote", ""), ("traceidratio", "1 %"), ("parentbased_traceidratio", "2")],
)
def test_a_sampler_that_is_unknown_samples_everything_and_is_logged(name, share, caplog) -> None:
    decide = tracing.sampler({tracing.SAMPLER: name, tracing.SHARE: share})
    assert decide(LOW, None) and decide(HIGH, None)
    assert "every trace is sampled" in caplog.text


def test_the_share_of_new_traces_is_the_one_asked_for() -> None:
    environment = {tracing.SAMPLER: "traceidratio", tracing.SHARE: "0.1"}
    tracer = tracing.Tracer(otlp.OtlpSpans(SpanProcessor()), tracing.sampler(environment))
    begun = [tracer.begin(None) for _ in range(5000)]
    assert 0.05 < sum(context.is_sampled for context in begun) / len(begun) < 0.2
    assert len({context.trace_id for context in begun}) == len(begun)


def test_a_span_without_a_kind_of_error_has_no_status() -> None:
    with traced() as ended:
        assert tracing.active is not None
        context = tracing.active.begin(None)
        times = {"began_ns": 20, "ended_ns": 10}  # the clock was set back
        tracing.active.send("a", context, None, attributes={}, error="unused", **times)
        tracing.active.send("b", context, None, attributes={"error.type": "x"}, error="y", **times)
        good, bad = ended()
    assert (good.start_time, good.end_time) == (20, 20)
    assert (described(good)[0], described(bad)) == ("UNSET", ("ERROR", "y", "x"))


class Sink:
    """Where a tracer's spans go: it only notes that the last ones were asked for."""

    def __init__(self, made: list[object]) -> None:
        self.shut_down = partial(made.append, "flushed")

    def send(self, *_: object) -> None:
        """No span is made here."""


def late_tracer(monkeypatch, made: list[object], later_s: float) -> tracing.Tracer:
    monkeypatch.setattr(tracing, "LATER_S", later_s)
    return tracing.Tracer(Sink(made), tracing.sampler({}))


async def test_spans_are_made_together_in_short_turns_of_the_loop(monkeypatch) -> None:
    made: list[int] = []
    turn = 0

    async def turns() -> None:
        nonlocal turn
        while len(made) < 3 * tracing.LATER_TOGETHER:
            turn += 1
            await asyncio.sleep(0)

    tracer = late_tracer(monkeypatch, [], 0.0)
    for _ in range(3 * tracing.LATER_TOGETHER):
        tracer.later(lambda: made.append(turn))
    assert made == []
    async with asyncio.timeout(PATIENCE_S):
        await turns()
    assert max(map(made.count, made)) <= tracing.LATER_TOGETHER
    tracer.later(lambda: made.append(-1))
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: -1 in made)


async def test_few_requests_wait_for_their_spans(monkeypatch) -> None:
    made: list[object] = []
    tracer, number = late_tracer(monkeypatch, made, 3600.0), 3 * tracing.LATER_MAX
    for each in range(number):
        tracer.later(partial(made.append, each))
        assert each + 1 - len(made) <= tracing.LATER_MAX
    assert made == list(range(len(made)))
    tracer.shut_down()
    assert made == [*range(number), "flushed"]


async def test_spans_that_can_not_be_made_cost_no_others(monkeypatch, caplog) -> None:
    made: list[object] = []
    tracer = late_tracer(monkeypatch, made, 0.0)
    tracer.later(partial(made.append, 1))
    tracer.later([].pop)
    tracer.later(partial(made.append, 2))
    await until(lambda: made == [1, 2])
    assert caplog.messages == ["no span made: IndexError('pop from empty list')"]


async def test_nor_do_they_at_the_end(monkeypatch) -> None:
    made: list[object] = []
    tracer = late_tracer(monkeypatch, made, 3600.0)
    for make in (partial(made.append, 1), [].pop, partial(made.append, 2)):
        tracer.later(make)
    tracer.shut_down()
    assert made == [1, 2, "flushed"]


def test_without_a_loop_spans_are_made_at_once(monkeypatch) -> None:
    made: list[object] = []
    late_tracer(monkeypatch, made, 3600.0).later(partial(made.append, 1))
    assert made == [1]


@pytest.mark.parametrize("parent", [None, SAMPLED, UNSAMPLED])
def test_what_a_request_begins_with_says_the_same_sampled_or_not(parent) -> None:
    environment = {tracing.SAMPLER: "parentbased_traceidratio", tracing.SHARE: "0.5"}
    tracer = tracing.Tracer(Sink([]), tracing.sampler(environment))
    begun = [tracer.begin_request(parent) for _ in range(1000)]
    contexts = [trace_context.read({trace_context.PARENT: one}) if isinstance(one, str) else one
                for one in begun]  # fmt: skip
    sampled = [not isinstance(one, str) for one in begun]
    assert [context.is_sampled for context in contexts] == sampled
    assert len({context.span_id for context in contexts}) == 1000
    if parent is None:
        assert len({context.trace_id for context in contexts}) == 1000
        assert 300 < sum(sampled) < 700
    else:
        assert {context.trace_id for context in contexts} == {TRACE}
        assert set(sampled) == {parent.is_sampled}
