"""The tokens of a request's prompt, by the engine's own `/tokenize`.

The engine applies the model's template and tokenizer exactly as it does for the request itself, so
the agent needs neither. A prompt whose KV depends on more than its tokens (images, a salt) is left
alone, and so is one with options of the template that `/tokenize` doesn't take.
"""

from typing import Any

import orjson

from agents.adapters.engine_call import call_engine
from agents.adapters.http_client import HttpBroken, HttpClient
from schemas.http import TOKENIZE
from schemas.http_statuses import OK

TOKENIZE_S = 10.0
BODY_BYTES_MAX = 4 * 1024 * 1024
TOKENS_MAX = 1024 * 1024
# What the engine makes the prompt of, by path.
_PARTS = {
    "/v1/chat/completions": (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template", "chat_template_kwargs"),
    ),
    "/v1/completions": ("model", "prompt", "add_special_tokens"),
}
_OTHERWISE = ("cache_salt", "extra_key", "documents", "reasoning_effort", "prompt_embeds", "suffix",
              "truncate_prompt_tokens", "mm_processor_kwargs", "functions")  # fmt: skip


def may_have_tokens(path: str, body: bytes) -> bool:
    """Whether `tokenize_request` may have something to ask for such a request."""
    return path in _PARTS and len(body) <= BODY_BYTES_MAX


def tokenize_request(path: str, body: bytes) -> dict[str, Any] | list[int] | None:
    """What to ask for, or the tokens themselves where the request has them; None: left alone."""
    if not may_have_tokens(path, body):
        return None
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(given, dict) or any(given.get(name) for name in _OTHERWISE):
        return None
    prompt = given.get("prompt")
    if path == "/v1/completions":
        if _are_tokens(prompt):
            return prompt
        if not isinstance(prompt, str):
            return None
    elif not _is_text(given.get("messages")):
        return None
    return {name: given[name] for name in _PARTS[path] if given.get(name) is not None}


def _is_text(messages: object) -> bool:
    """Whether the messages are text alone."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return False
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and len(given) <= TOKENS_MAX and all(
        type(token) is int and 0 <= token < 2**32 for token in given
    )  # fmt: skip


async def prompt_tokens(api: HttpClient, asked: dict[str, Any]) -> list[int] | None:
    """The engine's answer; None if it has none, or not in time."""
    try:
        body = orjson.dumps(asked)  # a TypeError where it is nested deeper than 254 levels
        status, page = await call_engine(api, "POST", TOKENIZE, TOKENIZE_S, body)
        tokens = orjson.loads(page).get("tokens") if status == OK else None
    except (OSError, HttpBroken, TypeError, ValueError, AttributeError):  # a timeout is an OSError
        return None
    return tokens if _are_tokens(tokens) else None
