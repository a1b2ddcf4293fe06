"""Spans as OTLP's protobuf bytes, at a quarter of what the SDK's encoder and protobuf cost.

The SDK makes three messages anew for every attribute, which was most of what a sampled request cost
its router; and protobuf takes as long again to write them. So a span's bytes are written here
(https://protobuf.dev/programming-guides/encoding, the messages are those of
opentelemetry/proto/trace/v1/trace.proto), and attributes, most of which say the same of most
requests, are kept as bytes. Read back they equal what the SDK's encoder makes for the same span.

A span is encoded when it ends: what waits to be sent is then one piece of bytes, not some sixty
objects, and the thread that sends does not take turns with the event loop to encode.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, Protocol

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

from infra.span_conventions import ERROR_TYPE
from infra.trace_context import TraceContext

log = logging.getLogger(__name__)

ENCODER = "encode_spans"
SCOPE = "mesh"
# A request's spans have some ten of their own, the rest is on most requests' spans. A receipt's
# candidates are the longest, some kilobytes: 2 MB at most are kept.
ATTRIBUTES_KEPT = 512
NAMES_KEPT = 256
STATUSES_KEPT = 64
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK

# Tags: the number of a field, and how its value is written.
_RESOURCE_SPANS = b"\x0a"
_SCOPE_SPANS = b"\x12"
_SPAN = b"\x12"
_TRACE_ID, _SPAN_ID, _PARENT_SPAN_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # with their lengths
_TRACE_STATE, _NAME, _ATTRIBUTE, _STATUS = b"\x1a", b"\x2a", b"\x4a", b"\x7a"
_KEY, _VALUE = b"\x0a", b"\x12"
_TEXT, _YES, _NO, _WHOLE, _REAL = b"\x0a", b"\x10\x01", b"\x10\x00", b"\x18", Struct("<cd").pack
_REAL_TAG = b"\x21"
_KIND_TIMES_FLAGS = Struct("<BBBQBQHI").pack
_KIND, _BEGAN, _ENDED, _FLAGS = 0x30, 0x39, 0x41, 0x0185
_INT_MIN, _INT_END, _INT_MASK = -(1 << 63), 1 << 63, (1 << 64) - 1

# All of a processor's look at a span: it is sampled.
_OF_A_SAMPLED_SPAN = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class EncodedSpan(NamedTuple):
    """A span that has ended. `context` is not its own."""

    data: bytes
    context: SpanContext = _OF_A_SAMPLED_SPAN


class Processor(Protocol):
    """Takes spans that have ended: the SDK's SpanProcessor."""

    def on_end(self, span: Any, /) -> None:
        """Keep it to be sent; never waits."""

    def shutdown(self) -> None:
        """Send what is left."""


class OtlpSpans:
    """Encodes spans when they end, and has them sent: an `infra.tracing.SpanSink`."""

    def __init__(self, processor: Processor) -> None:
        self._on_end, self.shut_down = processor.on_end, processor.shutdown

    def send(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        kind: SpanKind,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, Any],
        error: str,
    ) -> None:
        """`error` says what went wrong; it is an error where `attributes` have `error.type`."""
        flags = _REMOTE if parent is not None and parent.is_remote else _LOCAL
        # OTLP's kind 0 is: not specified.
        times = _KIND, kind.value + 1, _BEGAN, began_ns, _ENDED, ended_ns, _FLAGS, flags
        failed = ERROR_TYPE in attributes
        parts = [
            _TRACE_ID,
            context.trace_id.to_bytes(16, "big"),
            _SPAN_ID,
            context.span_id.to_bytes(8, "big"),
            _name(name),
            _KIND_TIMES_FLAGS(*times),
            _status(StatusCode.ERROR.value, error) if failed else _UNSET,
        ]
        if context.state:
            parts.append(_text(_TRACE_STATE, _state(context.state)))
        if parent is not None:
            parts += (_PARENT_SPAN_ID, parent.span_id.to_bytes(8, "big"))
        parts += _encodable(attributes)
        self._on_end(EncodedSpan(_field(_SPAN, b"".join(parts))))


class EncodedRequest:
    """An ExportTraceServiceRequest that is bytes already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializePartialToString(self) -> bytes:  # noqa: N802 - protobuf's name, for the exporter
        return self._data

    SerializeToString = SerializePartialToString


class RequestEncoder:
    """Makes one request of spans of this process."""

    def __init__(self, **resource: str) -> None:
        """`resource`: what is said of the process."""
        scope = InstrumentationScope(SCOPE, resource.get("service.version"))
        made = ReadableSpan(
            "",
            _OF_A_SAMPLED_SPAN,
            resource=Resource.create(resource),
            instrumentation_scope=scope,
            start_time=0,
            end_time=0,
        )
        [about] = trace_encoder.encode_spans([made]).resource_spans
        [of_scope] = about.scope_spans
        del of_scope.spans[:], about.scope_spans[:]
        self._resource, self._scope = about.SerializeToString(), of_scope.SerializeToString()

    def __call__(self, spans: Sequence[EncodedSpan]) -> EncodedRequest:
        of_scope = self._scope + b"".join([span.data for span in spans])
        of_resource = self._resource + _field(_SCOPE_SPANS, of_scope)
        return EncodedRequest(_field(_RESOURCE_SPANS, of_resource))


def use(encoder: RequestEncoder) -> None:
    """Have the SDK's exporter encode so. It looks its encoder up by this name: one that does not
    can't send spans that are encoded already."""
    if not hasattr(trace_exporter, ENCODER):
        log.warning("no spans are sent: this version of OpenTelemetry's exporter is not known")
    setattr(trace_exporter, ENCODER, encoder)


@lru_cache(STATUSES_KEPT)
def _state(header: str) -> str:
    """Other vendors' state as the SDK reads it: without members that are not well-formed."""
    return ",".join(f"{name}={value}" for name, value in TraceState.from_header([header]).items())


def _encodable(attributes: Mapping[str, Any]) -> list[bytes]:
    try:
        return list(map(_kept, attributes, attributes.values()))
    except (ValueError, TypeError):
        return _without_others(attributes)


def _without_others(attributes: Mapping[str, Any]) -> list[bytes]:
    """Without those that OTLP has no form for, such as text that is not Unicode: they must not
    cost the batch its other spans."""
    found = []
    for name, value in attributes.items():
        with suppress(ValueError, TypeError):
            found.append(_encoded(name, value))
    return found


def _encoded(name: str, value: Any) -> bytes:
    """A span's bytes that has this attribute alone: such bytes one after another are those of a
    span that has them all."""
    if isinstance(value, str):
        value_bytes = _text(_TEXT, value)
    elif isinstance(value, float):
        value_bytes = _REAL(_REAL_TAG, value)
    elif isinstance(value, bool):
        value_bytes = _YES if value else _NO
    elif isinstance(value, int) and _INT_MIN <= value < _INT_END:
        value_bytes = _WHOLE + _varint(value & _INT_MASK)
    else:
        raise TypeError
    return _field(_ATTRIBUTE, _key(name) + _field(_VALUE, value_bytes))


_kept = lru_cache(ATTRIBUTES_KEPT, typed=True)(_encoded)  # typed: 1, 1.0 and True are equal


@lru_cache(NAMES_KEPT)
def _key(name: str) -> bytes:
    return _text(_KEY, name)


@lru_cache(NAMES_KEPT)
def _name(name: str) -> bytes:
    return _field(_NAME, name.encode("utf-8", "replace"))


@lru_cache(STATUSES_KEPT)
def _status(code: Any, message: str) -> bytes:
    text = message.encode("utf-8", "replace").decode()
    return _field(_STATUS, Status(code=code, message=text).SerializeToString())


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode())


def _field(tag: bytes, data: bytes) -> bytes:
    """A field whose value has a length."""
    return tag + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit of all but the last is set."""
    if number < len(_SHORT):
        return _SHORT[number]
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SHORT = [bytes((number,)) for number in range(0x80)]
_SHORT += [bytes((number & 0x7F | 0x80, number >> 7)) for number in range(0x80, 0x1000)]
_UNSET = _field(_STATUS, b"")
