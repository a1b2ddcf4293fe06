"""W3C Trace Context (https://www.w3.org/TR/trace-context/), in HTTP headers and in NATS headers."""

import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

PARENT, STATE = "traceparent", "tracestate"
STATE_CHARS_MAX = 512  # what the recommendation requires to pass on; a longer one is dropped
_PARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VERSION, _NO_VERSION = "00", "ff"
_PLAIN = re.compile("[\t -~]*")


class TraceContext(NamedTuple):
    """A span, as others name it: the trace, the span in it, and whether the trace is sampled."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    is_sampled: bool
    state: str = ""  # `tracestate`, of other vendors
    is_remote: bool = False  # came with a request

    @property
    def trace(self) -> str:
        """The trace's id, in hexadecimal."""
        return self.trace_id.to_bytes(16, "big").hex()  # twice as fast as the format `032x`

    @property
    def parent(self) -> str:
        """Its `traceparent`."""
        flags = "01" if self.is_sampled else "00"
        return f"00-{self.trace}-{self.span_id.to_bytes(8, 'big').hex()}-{flags}"

    def write(self, carrier: MutableMapping[str, str]) -> None:
        """Add its headers."""
        carrier[PARENT] = self.parent
        if self.state:
            carrier[STATE] = self.state


def read(carrier: Mapping[str, str]) -> TraceContext | None:
    """The sender's span; None where the headers name none."""
    found = _PARENT.fullmatch(carrier.get(PARENT, ""))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == _NO_VERSION or (version == _VERSION and more) or not (trace_id and span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), _state(carrier), True)


def passed_on(carrier: Mapping[str, str]) -> dict[str, str]:
    """The trace headers, which `read` understood, for a process that adds no span of its own."""
    state = _state(carrier)
    return {PARENT: carrier[PARENT], STATE: state} if state else {PARENT: carrier[PARENT]}


def _state(carrier: Mapping[str, str]) -> str:
    """Other vendors' state, unless it is too long or no plain text for a bus header."""
    state = carrier.get(STATE, "")
    return state if len(state) <= STATE_CHARS_MAX and _PLAIN.fullmatch(state) else ""
