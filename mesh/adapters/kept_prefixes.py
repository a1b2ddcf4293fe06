"""The beginnings of clients' requests that a router keeps, to have them computed in advance.

What is kept is a request that a client made, cut after a number of bytes of its prompt and asking
for one token: the model, the messages or the text up to there, and whatever else shapes the prompt
(tools, a template's arguments, the tenant's `cache_salt`, so that the computed prefix is shared as
the original's is). Fields that shape only the answer, or name its user, are left out.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from infra import tracing
from mesh.adapters.spans import request_trace
from mesh.core.model.prompt import BLOCK_BYTES, PromptInvalid, prompt_text
from mesh.core.model.request import Request
from mesh.session.record import NO_TRACE, OpenRequest, Trace
from schemas.http import CHAT, COMPLETIONS

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 2 * 1024 * 1024
# vLLM doesn't look into its prefix cache for a request with `prompt_logprobs`.
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
    """A cut request, ready to be sent to `path`."""

    path: str
    body: bytes
    tenant: str | None


class KeptPrefixes:
    """A session's `PrefixStore`. How many bytes it may hold is the core's decision."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptPrefix] = {}

    def keep(self, prefix: int, record: OpenRequest, blocks: int) -> int | None:
        try:
            cut = cut_body(record.body, record.path, blocks * BLOCK_BYTES)
        except Exception:  # whatever is wrong with the copy, the client's request goes on
            log.exception("request %s can't be cut to be kept", record.request.request_id)
            return None
        if cut is None or len(cut) > BODY_BYTES_MAX:
            return None
        self._kept[prefix] = KeptPrefix(record.path, cut, record.tenant)
        return len(cut)

    def drop(self, prefix: int) -> None:
        self._kept.pop(prefix, None)

    def open_warm_up(self, request: Request, prefix: int) -> OpenRequest:
        kept = self._kept[prefix]
        spans: Trace = NO_TRACE
        if tracing.active is not None:
            spans = request_trace(tracing.active)
        return OpenRequest(
            request=request, path=kept.path, body=kept.body, tenant=kept.tenant, spans=spans
        )


def cut_body(body: bytes, path: str, text_bytes: int) -> bytes | None:
    """A request for one token after the first `text_bytes` of that prompt, as `prompt_text` counts.

    None where a prompt can't be cut: of other routes, token ids, several prompts, or no text at
    all; and where the rest of the request is nested too deep to be written again.
    """
    if not body:
        return None  # its client has a first byte already
    fields: dict[str, Any] = orjson.loads(body)
    if path == CHAT:
        text_bytes -= _tools_size(fields)  # they are kept whole, and come first
        messages = list(_cut_messages(fields["messages"], text_bytes))
        kept: dict[str, Any] = {"messages": messages}
    elif path == COMPLETIONS and isinstance(fields["prompt"], str):
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
