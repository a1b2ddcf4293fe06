"""What a client was sent of a stream of chat or completion chunks, and how another answer goes on.

Of a stream that flows only its bytes are kept. They are read once it has broken, or when many are
kept: its text, its tokens, and what else shows how it may go on. The next engine's events are then
rewritten (`Splice`), so that the client reads one stream: one `id`, one role, each token once, and
one usage.

Tokens are counted by the engine's `usage` where an event has one, else by the events that bring
text: engines send each token by itself, unless they are told to send several at once.

White space at the end of a chat's text is not sent to the next engine, as many templates cut it
off there. The engine writes it again, and it is taken out where it comes again.
"""

import re
from typing import Any

import orjson

EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
DONE = b"[DONE]"
# Of the first event of an answer, what all of them repeat.
ONE_NAME = ("id", "created", "model", "system_fingerprint")
NAME_CHARS_MAX = 256  # of a value of them that is kept
SILENT_KEYS = frozenset({"role", "content"})
THOUGHTS = re.compile("</?think")  # in the text: templates rewrite it


class Said:
    """What was said of one stream. `chunks`: whole events, appended as they are given out."""

    __slots__ = (
        *("body", "is_chat", "chunks", "look_at_bytes", "sent_bytes", "head", "text", "tokens"),
        *("text_tokens", "is_mixed", "prompt_tokens", "role", "finished", "why_not"),
    )

    def __init__(self, body: bytes, *, is_chat: bool) -> None:
        """`body`: of the request, as the first engine got it."""
        self.body, self.is_chat = body, is_chat
        self.chunks: list[bytes] = []
        self.look_at_bytes = 0  # of the answer under way: then its size is looked at
        self.sent_bytes = 0  # of answers that broke
        self.head: dict[str, Any] = {}  # the fields of ONE_NAME
        self.text = ""
        self.tokens = 0  # of the text, so far
        self.text_tokens = 0  # up to the last event whose text is more than white space
        self.is_mixed = False  # whether that one ended in white space
        self.prompt_tokens: int | None = None  # of the request, if a usage said it
        self.role = False  # whether the role was sent
        self.finished = ""  # the reason to finish, once it was sent
        self.why_not = ""  # what was said that no other engine could go on from

    def read(self) -> None:
        """Read what was kept, and keep it no longer."""
        data = b"".join(self.chunks)
        self.chunks.clear()
        events = EVENT_END.split(data) if b"\r" in data else data.split(b"\n\n")
        if events.pop().strip():
            self.why_not = "an event was sent in part"
        found = (one for one in map(event_object, events) if one is not None)
        self.text = "".join((self.text, *map(self._read, found)))
        if THOUGHTS.search(self.text):
            self.why_not = "thoughts are in its text"

    def give_up(self, why: str) -> None:
        """It is not to go on: forget it."""
        self.why_not, self.body, self.text = why, b"", ""
        self.chunks.clear()

    def _read(self, event: dict[str, Any]) -> str:
        """The text of one event."""
        if not self.head:
            self.head = {name: event[name] for name in ONE_NAME if _is_name(event.get(name))}
        text = self._text_of(event.get("choices"))
        usage = event.get("usage")
        completion = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(usage, dict) and type(completion) is int:
            self.tokens = max(completion, self.tokens)
            if type(prompt := usage.get("prompt_tokens")) is int:
                self.prompt_tokens = prompt
        elif text:
            self.tokens += 1
        if text and not text.isspace():
            self.text_tokens, self.is_mixed = self.tokens, text[-1].isspace()
        return text

    def _text_of(self, choices: object) -> str:
        if not isinstance(choices, list) or not choices:
            return ""
        choice = choices[0]
        if len(choices) > 1 or not isinstance(choice, dict) or choice.get("index") not in (0, None):
            self.why_not = "it has several choices"
            return ""
        if choice.get("logprobs"):
            self.why_not = "its events have log probabilities"
        self.finished = choice.get("finish_reason") or self.finished
        part = choice.get("delta") if self.is_chat else choice
        if not isinstance(part, dict):
            return ""
        if self.is_chat:
            self.role = self.role or bool(part.get("role"))
            if other := [name for name, value in part.items() if value and name not in SILENT_KEYS]:
                self.why_not = f"its events have {other[0][:40]}"
        text = part.get("content" if self.is_chat else "text")
        return text if isinstance(text, str) else ""


class Splice:
    """Makes the events of another engine's answer go on where the ones before it broke off."""

    __slots__ = ("_again", "_is_closing", "_more", "_said", "_said_tokens", "_sent_tokens")

    def __init__(
        self, said: Said, sent: str, sent_tokens: int, *, is_closing: bool, more: int
    ) -> None:
        """`said`: as it was at the break. `sent`: the text that the engine goes on from, of so many
        tokens. `is_closing`: nothing is left to be said; only how
        it ended, and the usage, are missing. `more`: tokens of the answer that were said before."""
        self._said, self._again = said, said.text[len(sent) :]
        self._is_closing, self._more = is_closing, more
        self._sent_tokens, self._said_tokens = sent_tokens, said.tokens

    @property
    def is_turn(self) -> bool:
        """Whether the next engine is asked to go on with an assistant's message."""
        return self._said.is_chat and bool(self._sent_tokens)

    def whole(self, prompt: int, new: int) -> tuple[int, int]:
        """Tokens of the prompt and of the whole answer, by the counts of the part that goes on."""
        said = self._said
        if said.prompt_tokens is None:
            prompt = max(0, prompt - self._sent_tokens)
        else:
            prompt = said.prompt_tokens
        return prompt, self._said_tokens if self._is_closing else max(0, new + self._more)

    def joined(self, data: bytes) -> bytes:
        """These events as the client is to read them. `data`: whole events, or the stream's end."""
        joined = []
        at = 0
        while (end := EVENT_END.search(data, at)) is not None:
            joined.append(self._event(data[at : end.end()]))
            at = end.end()
        if at < len(data):
            joined.append(self._event(data[at:]))
        return b"".join(joined)

    def _event(self, event: bytes) -> bytes:
        found = event_object(event)
        if found is None or "error" in found:
            return event
        found.update(self._said.head)
        choices, usage = found.get("choices"), found.get("usage")
        is_empty = not choices
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            is_empty = not self._choice(choices[0])
        if isinstance(usage, dict):
            self._add(usage)
        elif is_empty:
            return b""
        return b"data: " + orjson.dumps(found) + b"\n\n"

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Whether the choice of an event says anything new; it is rewritten."""
        said = self._said
        name = "content" if said.is_chat else "text"
        part = choice.setdefault("delta", {}) if said.is_chat else choice
        if not isinstance(part, dict):
            return True
        if said.role:
            part.pop("role", None)
        text = part.get(name)
        if isinstance(text, str) and (text := self._new(text)) != part[name]:
            part[name] = text
        if self._is_closing and choice.get("finish_reason"):
            choice["finish_reason"] = None if said.finished else "length"
        others = (value for key, value in part.items() if key not in ("index", "finish_reason"))
        return bool(choice.get("finish_reason")) or any(others)

    def _new(self, text: str) -> str:
        """Of a text what the client does not have yet."""
        if self._is_closing:
            return ""
        if not self._again or not text:
            return text
        same = 0
        for ours, theirs in zip(self._again, text, strict=False):
            if ours != theirs:
                break
            same += 1
        self._again = self._again[same:] if same == len(text) else ""
        return text[same:]

    def _add(self, usage: dict[str, Any]) -> None:
        """What was said before is no part of the prompt, but of the answer."""
        prompt, new = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is not int or type(new) is not int:
            return
        prompt, answer = self.whole(prompt, new)
        usage.update(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and type(cached := details.get("cached_tokens")) is int:
            details["cached_tokens"] = min(cached, prompt)


def _is_name(value: object) -> bool:
    """Whether it may be a name or a time: an engine may write anything."""
    return type(value) is int or (isinstance(value, str) and len(value) <= NAME_CHARS_MAX)


def event_object(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None for comments, `[DONE]` and what is none."""
    if event.startswith(b"data:"):  # nearly always one line
        data = event[5:].strip()
        if b"\n" in data or b"\r" in data:
            data = _data_of(event)
    else:
        data = _data_of(event)
    if not data or data == DONE:
        return None
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _data_of(event: bytes) -> bytes:
    lines = event.splitlines()
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
