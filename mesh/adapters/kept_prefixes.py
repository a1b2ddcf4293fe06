"""The beginnings of clients' requests that a router keeps, to have them computed again unasked.

What is kept is a request that a client made, cut after a number of bytes of its prompt and asking
for one token: the model, the messages or the text up to there, and whatever else shapes the prompt
(tools, a template's arguments, the tenant's `cache_salt`, so that what is computed is shared with
whom the original was shared). What shapes the answer alone, or names its user, is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from mesh.core.model.prompt import PromptInvalid, prompt_text
from schemas.http import CHAT

BODY_BYTES_MAX = 2 * 1024 * 1024
# vLLM doesn't look into its prefix cache for a request that wants `prompt_logprobs`.
ABOUT_THE_ANSWER = frozenset(
    (
        "best_of",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "metadata",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "response_format",
        "seed",
        "stop",
        "store",
        "stream_options",
        "suffix",
        "top_logprobs",
        "user",
    )
)


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """One of them, ready to be sent to `path`."""

    path: str
    body: bytes
    tenant: str | None = None  # whose request it was


class KeptPrefixes:
    """By the core's names for them. How many bytes there may be is the core's to say."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptPrefix] = {}

    def keep(
        self, name: int, path: str, body: bytes, text_bytes: int, tenant: str | None = None
    ) -> int | None:
        """Keep a request up to so many bytes of its prompt; its size, or None if it can't be."""
        cut = cut_body(body, path, text_bytes)
        if cut is None or len(cut) > BODY_BYTES_MAX:
            return None
        self._kept[name] = KeptPrefix(path, cut, tenant)
        return len(cut)

    def drop(self, name: int) -> None:
        """It is not needed any more."""
        self._kept.pop(name, None)

    def get(self, name: int) -> KeptPrefix | None:
        """What is kept under that name."""
        return self._kept.get(name)


def cut_body(body: bytes, path: str, text_bytes: int) -> bytes | None:
    """A request for one token after the first `text_bytes` of that prompt, as `prompt_text` counts.

    None where a prompt can't be cut: token ids, several prompts, or what is no text at all; and
    where the rest of the request is nested too deep to be written again.
    """
    if not body:
        return None  # its client has a first byte already
    fields: dict[str, Any] = orjson.loads(body)
    if path == CHAT:
        text_bytes -= _tools_size(fields)  # they are kept whole, and come first
        messages = list(_cut_messages(fields["messages"], text_bytes))
        kept: dict[str, Any] = {"messages": messages}
    elif isinstance(fields["prompt"], str):
        kept = {"prompt": _cut_text(fields["prompt"], text_bytes)}
    else:
        return None
    about_the_prompt = {name: fields[name] for name in fields if name not in ABOUT_THE_ANSWER}
    whole = about_the_prompt | kept | {"stream": False, "max_tokens": 1}
    try:
        has_text = bool(prompt_text(whole, chat=path == CHAT).data)
        return orjson.dumps(whole) if has_text else None
    except (PromptInvalid, orjson.JSONEncodeError):  # orjson reads deeper than it writes
        return None


def _cut_messages(messages: list[dict[str, Any]], left: int) -> Iterator[dict[str, Any]]:
    for message in messages:
        bare = _size({**message, "content": None})
        if left <= bare:
            return
        size = _size(message)
        if size <= left:
            yield message
            left -= size
            continue
        content = message["content"]
        if isinstance(content, str):
            yield {**message, "content": _cut_text(content, left - bare)}
        elif isinstance(content, list) and (parts := list(_cut_parts(content, left - bare))):
            yield {**message, "content": parts}
        return


def _cut_parts(parts: list[Any], left: int) -> Iterator[Any]:
    for part in parts:
        size = _size({"role": "", "content": [part]}) - _size({"role": "", "content": None})
        if size <= left:
            yield part
            left -= size
            continue
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and left:
            yield {**part, "text": _cut_text(text, left)}
        return


def _tools_size(fields: dict[str, Any]) -> int:
    tools: dict[str, Any] = {"tools": fields.get("tools"), "messages": [{}]}
    return len(prompt_text(tools, chat=True).data) - _size({})


def _size(message: dict[str, Any]) -> int:
    return len(prompt_text({"messages": [message]}, chat=True).data)


def _cut_text(text: str, text_bytes: int) -> str:
    """Its first bytes, without half a character."""
    return text.encode()[:text_bytes].decode(errors="ignore")
