"""Did a stream end on an event boundary, and as its API promises, or was it cut?

A stream of events ends after a blank line; one that does not died in the middle of an event.

Where a body ends with its connection, or a proxy ends it properly after its own upstream broke
(nginx speaks HTTP/1.0 to that by default), framing does not tell. Each API promises an end: chats
and completions a `finish_reason` for every choice, and `[DONE]` where it is OpenAI's; Messages
`message_stop`; Responses the event with the response's last status.

Some servers never send one, so it is required only of an engine that ended a stream of that API so,
or whose kind does. Of the latter it is required no longer after MISSES_MAX streams in turn, until
one has it. Streams that are cut together count as one: a dying engine cuts all that it has.

Ollama ends a stream without any such end where its model goes round: after the same text REPEATS
times in turn (`llm/server.go` of 0.17.4). That is the whole answer, unless the engine's kind
promises an end.
"""

import json
import re

from agents.core.answer_stream import TAIL_BYTES, Tail
from schemas.engine_routes import LAST_EVENTS, STREAM_OPTIONS_PATHS
from schemas.http import DONE_LINES

MISSES_MAX = 3
REPEATS = 31
EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
_SAID = re.compile(
    rb'"(?:content|text|delta|reasoning(?:_content)?|thinking|arguments|partial_json)"\s*:\s*"((?:[^"\\]|\\.)*)"'
)
_EVENT_END = re.compile(rb"\n\n|\n\r\n|\r\r")
# A quote inside a JSON string is escaped, and no model writes a raw line end into one.
_NAMED = {
    path: re.compile(
        rb'(?:^|[\r\n])event: ?(?:%b)[\r\n]|"type"\s*:\s*"(?:%b)"'
        % ((b"|".join(map(re.escape, sorted(names))),) * 2)
    )
    for path, names in LAST_EVENTS.items()
}


def incomplete(tail: Tail, end: bytes) -> str | None:
    """Why a stream with these last bytes did not end whole, for people; None if it did."""
    if tail.total <= len(end) and b"data:" not in end:
        return "the stream ended without one event"
    if end.endswith(EVENT_ENDS) or has_done_event(end):
        return None
    return "the stream ended in the middle of an event"


def has_done_event(end: bytes) -> bool:
    """Whether the last event of an OpenAI stream has come: nothing that follows matters."""
    text = end.rstrip()
    if not text.endswith(DONE_LINES):
        return False
    begin = text.rfind(b"data:")  # a model may write the same, but no raw line end before it
    return begin == 0 or text[begin - 1] in b"\r\n"


class PromisedEnds:
    """Of one engine: the APIs whose streams it is known to end as promised."""

    def __init__(self, *, known: bool) -> None:
        """`known`: whether it does by its kind."""
        self._known = known
        paths = (*STREAM_OPTIONS_PATHS, *LAST_EVENTS) if known else ()
        # Streams without one, of APIs whose end its kind alone promises.
        self._misses = dict.fromkeys(paths, 0)
        self._missed_at: dict[str, float] = {}
        self._seen: set[str] = set()  # APIs of which it has sent one

    def restarted(self) -> None:
        """What comes back may be another version, or another engine."""
        self._seen.clear()

    def is_cut(self, path: str, end: bytes, began_at: float, now: float) -> bool:
        """Whether a stream with these last bytes, which ended between two events, is not whole.

        `began_at`: when its request was sent, in seconds of the clock of `now`.
        """
        if has_done_event(end) or has_promised_end(path, end):
            self._seen.add(path)
            return False
        if path in self._seen:
            return self._known or not _goes_round(end)
        if (misses := self._misses.get(path)) is None:
            return False
        if began_at > self._missed_at.get(path, float("-inf")):
            self._missed_at[path] = now
            misses = self._misses[path] = misses + 1
            if misses > MISSES_MAX:
                del self._misses[path]
                return False
        return True


def _goes_round(end: bytes) -> bool:
    """Whether each of the last events says the same, in text, thoughts and calls of tools."""
    events = _EVENT_END.split(end.rstrip())[-REPEATS:]
    said = [b"\0".join(map(bytes.strip, _SAID.findall(event))) for event in events]
    return len(said) == REPEATS and len(set(said)) == 1 and said[0].strip(b"\0") != b""


def has_last_event(path: str, end: bytes) -> bool:
    """Whether the last event of a stream has come to its own end: nothing that follows matters."""
    if has_done_event(end):
        return True
    return path in _NAMED and end.endswith(EVENT_ENDS) and has_promised_end(path, end)


def has_promised_end(path: str, end: bytes) -> bool:
    """Whether these last bytes, TAIL_BYTES or the whole stream, hold the end that the API of the
    path promises, `[DONE]` aside. True of a path that promises none."""
    if (named := _NAMED.get(path)) is not None:
        # An event with a whole response may be longer than what is kept.
        return named.search(end) is not None or (
            len(end) >= TAIL_BYTES and _EVENT_END.search(end.rstrip()) is None
        )
    return path not in STREAM_OPTIONS_PATHS or _all_finished(end)


def _all_finished(end: bytes) -> bool:
    """Whether each choice that is seen has its reason to finish. An engine that computes several
    answers in turns shows those that are not finished in the last bytes."""
    seen, finished = set[str](), set[str]()
    for event in _EVENT_END.split(end):
        for choice in _choices(event):
            index = str(choice.get("index"))
            seen.add(index)
            if choice.get("finish_reason"):
                finished.add(index)
    return bool(finished) and seen == finished


def _choices(event: bytes) -> list[dict[str, object]]:
    data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        choices = json.loads(data)["choices"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return []
    return [each for each in choices if isinstance(each, dict)] if type(choices) is list else []


def is_cut_json(end: bytes, total_bytes: int, *, parses: bool) -> bool:
    """Whether a JSON object or array with these last bytes is not whole. `parses`: look closer, if
    this is all of it; its last byte shows the most."""
    if end.rstrip()[-1:] not in (b"}", b"]"):
        return True
    if not parses or len(end) < total_bytes:
        return False
    try:
        json.loads(end)
    except (ValueError, RecursionError) as problem:
        return not isinstance(problem, RecursionError)
    return False
