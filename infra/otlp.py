"""Spans as OTLP's protobuf bytes, at a quarter of what the SDK's encoder and protobuf cost.

The SDK makes three messages anew for every attribute, which was most of what a sampled request cost
its router; and protobuf takes as long again to write them. So a span's bytes are written here
(https://protobuf.dev/programming-guides/encoding, the messages are those of
opentelemetry/proto/trace/v1/trace.proto), and most attributes, which say the same of most requests,
are kept as bytes. Read back they equal what the SDK's encoder makes for spans of one
`infra.tracing.Tracer`: of one resource and scope, without events and links.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

ENCODER = "encode_spans"
TEXTS_KEPT = 256  # of each attribute, which are some dozens
KEPT_CHARS_MAX = 64
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

_texts: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
_sdk_encode_spans = trace_encoder.encode_spans


def use() -> None:
    """Have the SDK's exporter encode so. It looks its encoder up by this name; a version that does
    not will use its own, which is slower."""
    setattr(trace_exporter, ENCODER, encode_spans)


class EncodedRequest:
    """An ExportTraceServiceRequest that is bytes already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializePartialToString(self) -> bytes:  # noqa: N802 - protobuf's name, for the exporter
        return self._data

    SerializeToString = SerializePartialToString


def encode_spans(spans: Sequence[ReadableSpan]) -> EncodedRequest:
    """One request of all these."""
    [resource] = _sdk_encode_spans(spans[:1]).resource_spans
    [scope] = resource.scope_spans
    del scope.spans[:], resource.scope_spans[:]
    of_scope = scope.SerializeToString() + b"".join([_field(_SPAN, _span(one)) for one in spans])
    of_resource = resource.SerializeToString() + _field(_SCOPE_SPANS, of_scope)
    return EncodedRequest(_field(_RESOURCE_SPANS, of_resource))


def _span(span: ReadableSpan) -> bytes:
    context, parent, status = span.context, span.parent, span.status
    assert context is not None and span.start_time is not None and span.end_time is not None
    flags = _REMOTE if parent is not None and parent.is_remote else _LOCAL
    kind = span.kind.value + 1  # OTLP's 0 is: not specified
    times = _KIND, kind, _BEGAN, span.start_time, _ENDED, span.end_time, _FLAGS, flags
    parts = [
        _TRACE_ID,
        context.trace_id.to_bytes(16, "big"),
        _SPAN_ID,
        context.span_id.to_bytes(8, "big"),
        _text(_NAME, span.name),
        _KIND_TIMES_FLAGS(*times),
        _status(status.status_code.value, status.description),
    ]
    if context.trace_state:
        parts.append(_text(_TRACE_STATE, _state(context)))
    if parent is not None:
        parts += (_PARENT_SPAN_ID, parent.span_id.to_bytes(8, "big"))
    if span.attributes:
        parts += _encodable(span.attributes)
    return b"".join(parts)


def _state(context: SpanContext) -> str:
    return ",".join(f"{name}={value}" for name, value in context.trace_state.items())


def _encodable(attributes: Mapping[str, Any]) -> list[bytes]:
    """Without those that OTLP has no form for, such as text that is not Unicode: they must not
    cost the batch its other spans."""
    found = []
    for name, value in attributes.items():
        try:
            kept = _texts[name]
            encoded = kept.get(value) if type(value) is str else None  # 1, 1.0 and True are equal
            if encoded is None:
                encoded = _encoded(name, value)
                if type(value) is str and len(value) <= KEPT_CHARS_MAX:
                    if len(kept) == TEXTS_KEPT:
                        kept.clear()
                    kept[value] = encoded
        except (ValueError, TypeError):
            continue
        found.append(encoded)
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


@lru_cache(NAMES_KEPT)
def _key(name: str) -> bytes:
    return _text(_KEY, name)


@lru_cache(STATUSES_KEPT)
def _status(code: Any, message: str | None) -> bytes:
    text = (message or "").encode("utf-8", "replace").decode()
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
