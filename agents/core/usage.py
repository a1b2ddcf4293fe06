"""Token counts of answers: read out of their bytes, requested for streams whose client asked for
none, and the event with these taken out again.

OpenAI's API streams `usage` only on request (`stream_options.include_usage`), as one more event at
the end whose `choices` are empty. The agent makes that request for every stream whose client did
not, and takes the event out again, so the client gets the bytes that it would have got. A client's
own `stream_options` come before the agent's in the body: of two fields of one name engines take the
last, as readers of JSON do.

An event may come in several chunks. Only the beginning of one that may still turn out to be the
event is held back, and a router passes on whole events only: no client waits longer.
"""

import json
import re

from agents.core.events import NO_USAGE, TokenUsage
from agents.core.stream_errors import EVENT_BYTES_MAX
from schemas.exchange import TOKENS_MAX

_USAGE_KEY = b'"usage"'
_TIMINGS_KEY = b'"timings"'  # llama.cpp's
_USAGE_TRIES_MAX = 8
# In how many brackets an engine's own counts are: of an answer's object, or of what an event holds
# (`response`, `message`). What an answer repeats of its request (tools, metadata), and the input
# that a model writes for a tool, is deeper, and may have a `usage` of its own.
_PLAIN_DEPTH, _EVENT_DEPTH = 1, 2
_NEITHER = bytes(set(range(256)) - set(b'"{}[]'))  # quotes nor brackets
_DECODER = json.JSONDecoder()
REQUESTED = b',"stream_options":{"include_usage":true}}'
_DATA = b"data:"
_EVENT_END = re.compile(rb"\n\n|\n\r\n|\r\r")
_SEAM_BYTES = 2  # of an event's end that may lie in the chunk before: less than the longest end
# A quote inside a JSON string is escaped: these match keys, never text that a model wrote.
_has_no_choice = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_has_a_choice = re.compile(rb'"choices"\s*:\s*\[\s*[^\s\]]').search


def with_usage_requested(body: bytes) -> bytes:
    """The body of a request, a JSON object with fields, with these `stream_options` in place of its
    own; any other body as it is."""
    return _with_last(body, REQUESTED)


def with_response_id(body: bytes, response_id: str) -> bytes:
    """The body of a request for `/v1/responses`, a JSON object with fields, that gives its answer
    this id; one that the client gives comes later and holds."""
    return _with_field(body, b'{"request_id":"%b",' % response_id.encode())


def with_own_field(body: bytes, name: str, value: str | int) -> bytes:
    """The body of a request, a JSON object with fields, with one that holds whatever the client
    gives for it; any other body as it is."""
    return _with_last(body, b",%b:%b}" % (json.dumps(name).encode(), json.dumps(value).encode()))


def _with_last(body: bytes, field: bytes) -> bytes:
    """`field`: from the comma before it to the end of the object."""
    text = body.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return body
    return b"".join((memoryview(text)[:-1], field))  # up to 32 MiB: copied once


def _with_field(body: bytes, field: bytes) -> bytes:
    begin = body.find(b"{")
    return body if begin < 0 else b"%b%b%b" % (body[:begin], field, body[begin + 1 :])


class UsageEventRemoval:
    """Takes the event of one stream out of its bytes. At the end, `rest` is what it still holds."""

    __slots__ = ("_held", "_is_removed", "_passed")

    def __init__(self) -> None:
        self._held = b""  # the beginning of an event that may be the one
        self._passed = b""  # the last bytes of an event that is not, and not whole; else empty
        self._is_removed = False

    def without_event(self, chunk: bytes) -> bytes:
        """What of the stream may go on, now that this chunk has come; empty if nothing."""
        if self._held or self._passed or not chunk.endswith(b"\n\n") or _has_no_choice(chunk):
            return chunk if self._is_removed else self._searched(chunk)
        return chunk  # whole events, none of them the one

    def rest(self) -> bytes:
        """What was held back of a stream that ended inside an event."""
        held, self._held = self._held, b""
        return held

    def _searched(self, chunk: bytes) -> bytes:
        seam = self._passed
        data, at = self._held + chunk, 0
        self._held = self._passed = b""
        if seam:
            found = _EVENT_END.search(seam + data)
            if found is None:
                self._passed = (seam + data)[-_SEAM_BYTES:]
                return data
            at = max(0, found.end() - len(seam))
        while (found := _EVENT_END.search(data, at)) is not None:
            if _is_usage_event(data[at : found.end()]):
                self._is_removed = True
                return data[:at] + data[found.end() :]
            at = found.end()
        last = data[at:]
        if _may_be_usage_event(last):
            self._held = last
            return data[:at]
        self._passed = last[-_SEAM_BYTES:]
        return data


def _may_be_usage_event(begin: bytes) -> bool:
    """Whether an event that begins so may be the one; true of an event that has not begun."""
    if len(begin) > EVENT_BYTES_MAX or _has_a_choice(begin):
        return False
    return begin.startswith(_DATA) or _DATA.startswith(begin)


def _is_usage_event(event: bytes) -> bool:
    if not event.startswith(_DATA) or not _has_no_choice(event):
        return False
    try:
        found = json.loads(event[len(_DATA) :])
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or found.get("error"):
        return False
    return found.get("choices") == [] and isinstance(found.get("usage"), dict)


def read_usage(tail: bytes, *, streamed: bool = False) -> TokenUsage:
    """The token counts in the last bytes of a response; -1 for every count that is not there.

    One search serves JSON and event streams alike: inside a JSON string a quote is always escaped,
    so the bytes `"usage"` can only be a key, never text that a model wrote. The last such key that
    holds an object counts (streams carry `"usage": null` in earlier events), where it is the
    answer's or an event's own.
    llama.cpp streams its `timings` without being asked: the same counts under other names.
    """
    found = _last_object(tail, _USAGE_KEY, streamed)
    if found is None:
        timings = _last_object(tail, _TIMINGS_KEY, streamed)
        return NO_USAGE if timings is None else _timed_usage(timings)
    return _counted(found)


def read_early_usage(head: bytes, *, streamed: bool = False) -> TokenUsage:
    """The same in the first bytes of a response: of the first such key that holds an object."""
    if streamed:
        head = head.replace(b"\r", b"\n")
    depth, before, at = 0, 0, head.find(_USAGE_KEY)
    while at >= 0:
        if streamed and (start := head.rfind(b"\n", before, at)) >= 0:
            depth, before = 0, start
        depth += _opened(head[before:at])
        if depth <= (_EVENT_DEPTH if streamed else _PLAIN_DEPTH):
            found = _object_after(head[at + len(_USAGE_KEY) :])
            return NO_USAGE if found is None else _counted(found)
        before, at = at, head.find(_USAGE_KEY, at + 1)
    return NO_USAGE


def _counted(found: dict[str, object]) -> TokenUsage:
    usage = _named_usage(found)
    # Each prompt has a token: who says that there were none has not counted, as Ollama of an answer
    # that it ended because it went round.
    return NO_USAGE if usage.prompt_tokens == 0 and usage.completion_tokens <= 0 else usage


def _named_usage(found: dict[str, object]) -> TokenUsage:
    if "input_tokens" in found or "output_tokens" in found:
        return _other_usage(found)
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        # Answers to work on prompts alone may have a total and nothing else.
        prompt_tokens=_count(found.get("prompt_tokens", _total(found))),
        cached_tokens=_count(cached),
        completion_tokens=_count(found.get("completion_tokens")),
    )


def _total(found: dict[str, object]) -> object:
    return None if "completion_tokens" in found else found.get("total_tokens")


def _other_usage(found: dict[str, object]) -> TokenUsage:
    """As Anthropic's API and OpenAI's Responses name them. Anthropic's `input_tokens` leave out
    those that were read from the cache or written to it."""
    prompt = _count(found.get("input_tokens"))
    details = found.get("input_tokens_details")
    if isinstance(details, dict):
        cached = _count(details.get("cached_tokens"))
    else:
        cached = _count(found.get("cache_read_input_tokens"))
        if prompt >= 0:
            prompt += max(0, cached) + max(0, _count(found.get("cache_creation_input_tokens")))
    return TokenUsage(prompt, cached, _count(found.get("output_tokens")))


def _timed_usage(timings: dict[str, object]) -> TokenUsage:
    """By llama.cpp's `timings`: its `prompt_n` leaves out the tokens that were cached."""
    computed, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    return TokenUsage(
        prompt_tokens=computed + cached if computed >= 0 and cached >= 0 else -1,
        cached_tokens=cached,
        completion_tokens=_count(timings.get("predicted_n")),
    )


def _last_object(tail: bytes, key: bytes, streamed: bool) -> dict[str, object] | None:
    """The object under the last such key that holds one and is not too deep."""
    if streamed:  # an event is a line
        tail = tail.replace(b"\r", b"\n")
        end = tail.rfind(b"\n") + 1
        if not tail.startswith(_DATA, end) or _opened(tail[end:]):  # cut
            tail = tail[:end]
    depth, tries, end = 0, 0, len(tail)
    while tries < _USAGE_TRIES_MAX and (at := tail.rfind(key, 0, end)) >= 0:
        after = tail[at:end]
        if streamed and (stop := after.find(b"\n")) >= 0:
            depth, after = 0, after[:stop]
        depth -= _opened(after)
        end = at
        if depth > (_EVENT_DEPTH if streamed else _PLAIN_DEPTH):
            continue
        if (found := _object_after(tail[at + len(key) :])) is not None:
            return found
        tries += 1
    return None


def _opened(text: bytes) -> int:
    """How many more brackets it opens than it closes, of JSON from outside a string to outside."""
    quotes_only = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NEITHER)
    between = b"".join(quotes_only.split(b'"')[::2])
    opened, closed = between.count(b"{") + between.count(b"["), between.count(b"}")
    return opened - closed - between.count(b"]")


def _object_after(text: bytes) -> dict[str, object] | None:
    value = text.lstrip().removeprefix(b":").lstrip()
    if not value.startswith(b"{"):
        return None
    try:
        found, _ = _DECODER.raw_decode(value.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else -1
