"""Spans as OTLP: the same messages as the SDK's encoder makes, and the exporter uses ours."""

import gzip
import itertools
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from infra import otlp, span_conventions, tracing
from infra.trace_context import TraceContext
from tests.support.spans import SdkSpans

CONTEXT = TraceContext(2**128 - 1, 1, True)
PARENTS = (
    None,
    TraceContext(2**128 - 1, 2**64 - 1, True),
    TraceContext(2**128 - 1, 7, True, "a=1,b=2", True),
)
ATTRIBUTES = {
    "text": "x", "empty": "", "long": "y" * 5000, "not ASCII": "München \U0001f600", "yes": True,
    "no": False, "zero": 0, "one": 1, "less": -(2**63), "more": 2**63 - 1, "real": 0.1,
    "whole": 1.0, "inf": float("inf"), "error.type": "502",
}  # fmt: skip


RESOURCE = {"service.name": "test", "service.version": "1"}


class Kept:
    """Ended spans, in order: the SDK's processor without a thread."""

    def __init__(self):
        self.spans = []
        self.on_end = self.spans.append

    def shutdown(self):
        """Nothing is sent."""


def send(tracer):
    for kind, parent, error in itertools.product(SpanKind, PARENTS, ("", "it broke")):
        about = ATTRIBUTES if error else {}
        times = {"began_ns": 2**60, "ended_ns": 2**60 + len(error)}
        context = CONTEXT if parent is None else CONTEXT._replace(state=parent.state)
        given = {"kind": kind, "attributes": about, "error": error}
        tracer.send(f"a {kind.name}", context, parent, **times, **given)


def always(trace_id, parent):
    return True


def spans():
    kept = Kept()
    send(tracing.Tracer(otlp.OtlpSpans(kept), always))
    return kept.spans


def sdk_spans():
    exporter = InMemorySpanExporter()
    send(tracing.Tracer(SdkSpans(exporter, **RESOURCE), always))
    return exporter.get_finished_spans()


def test_messages_are_those_of_the_sdk():
    expected = sdk_encode_spans(sdk_spans())
    for _ in range(2):  # the second time attributes are kept ones
        made = spans()
        assert len(made) == 30
        assert read_back(made) == expected


def test_the_sdks_processor_takes_them():
    received = []

    class Exporter(InMemorySpanExporter):
        def export(self, spans):
            received.extend(spans)
            return super().export(spans)

    sink = otlp.OtlpSpans(BatchSpanProcessor(Exporter()))
    send(tracing.Tracer(sink, always))
    sink.shut_down()
    assert sorted(received) == sorted(spans())


def read_back(made):
    """The spans as a receiver has them."""
    request = otlp.RequestEncoder(**RESOURCE)(made)
    return ExportTraceServiceRequest.FromString(request.SerializePartialToString())


def test_one_and_true_are_not_mixed_up():
    made = spans()[-1:]
    [resource] = read_back(made).resource_spans
    kinds = {
        a.key: a.value.WhichOneof("value") for a in resource.scope_spans[0].spans[0].attributes
    }
    assert (kinds["one"], kinds["yes"], kinds["whole"]) == (
        "int_value",
        "bool_value",
        "double_value",
    )


TRACED = """
import infra.otlp as otlp
from infra import tracing
from infra.trace_context import TraceContext
from tests.support.spans import SdkSpans
encoded, ours = [], otlp.RequestEncoder.__call__
otlp.RequestEncoder.__call__ = lambda self, spans: encoded.extend(spans) or ours(self, spans)
tracing.set_up("test", "one")
tracing.active.send("a", TraceContext(1, 2, True), None, began_ns=1, ended_ns=2, attributes={})
tracing.shut_down()
print(len(encoded))
"""


def test_the_sdks_exporter_uses_them():
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            is_packed = self.headers.get("content-encoding") == "gzip"
            received.append(gzip.decompress(data) if is_packed else data)
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            done = subprocess.run(
                [sys.executable, "-c", TRACED],
                env={"OTEL_EXPORTER_OTLP_ENDPOINT": url},
                capture_output=True,
                text=True,
                timeout=50,
                check=True,
            )
        finally:
            server.shutdown()
            thread.join()
    assert done.stdout.split() == ["1"], done.stderr
    [resource] = ExportTraceServiceRequest.FromString(received[0]).resource_spans
    assert resource.scope_spans[0].spans[0].name == "a"


@pytest.mark.parametrize("bad", ["\udce9", 2**63, -(2**63) - 1, object()])
def test_what_can_not_be_encoded_costs_no_other_span(bad):
    kept = Kept()
    tracer = tracing.Tracer(otlp.OtlpSpans(kept), always)
    for about, error in (
        ({"bad": bad, "good": 1}, ""),
        ({"error.type": "x"}, "\udce9 broke"),
        ({"good": 2}, ""),
    ):
        times = {"began_ns": 1, "ended_ns": 2}
        tracer.send(
            "one", CONTEXT, None, **times, kind=SpanKind.SERVER, attributes=about, error=error
        )
    request = read_back(kept.spans)
    spans = request.resource_spans[0].scope_spans[0].spans
    assert [[one.key for one in span.attributes] for span in spans] == [
        ["good"],
        ["error.type"],
        ["good"],
    ]
    assert spans[1].status.message == "? broke"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("a:99999999999999999999", {"server.address": "a:99999999999999999999"}),
        ("a:8101", {"server.address": "a", "server.port": 8101}),
        ("\udce9:1", {}),
        ("", {}),
    ],
)
def test_a_host_header_may_hold_anything(host, expected):
    assert span_conventions.server(host) == expected
