"""The table of routes that engines answer: what the mesh must know of each, for router and agent.

The router looks up how a prompt is read, whether tokens are generated and which form errors have;
the agent which paths it may call, how it finds out whether its engine has one, and where an answer
says its usage. Other paths are called for clients only where an operator lists them; what is known
of these is in `engine_route`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

from schemas.http import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    ErrorForm,
)
from schemas.request_headers import ANTHROPIC_HEADERS


class PromptShape(Enum):
    """Where in a body the prompt is; `mesh.core.model.prompt_shapes` reads each."""

    CHAT = "chat"
    COMPLETION = "completion"
    INPUTS = "inputs"
    MESSAGES = "messages"
    MESSAGES_ONCE = "messages_once"
    RESPONSES = "responses"
    RERANK = "rerank"
    PAIRS = "pairs"
    TOKENIZE = "tokenize"
    TOKENS = "tokens"
    BODY = "body"  # all of it, whatever it means
    AUDIO = "audio"  # a form with a recording


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoute:
    """One path of engines, always POST with a JSON object, or a form, that names a model."""

    path: str
    prompt: PromptShape
    smallest: Mapping[str, object] = field(default_factory=dict)
    """Beside the model, the fields of the smallest request: an agent's probe. In a form, bytes are
    a file."""
    takes_json: bool = True
    takes_form: bool = False
    generates: bool = True
    """Whether it answers with tokens; else its work is to compute a prompt, priced as that."""
    computes: bool = True
    """False: an HTTP server may answer it while the engine behind it hangs."""
    is_optional: bool = True
    """Whether some engines lack it: an agent finds out, and its heartbeats name it."""
    takes_stream_options: bool = False
    """Whether a stream brings its usage only where `stream_options` ask for it."""
    has_early_usage: bool = True
    """Whether counts may be at an answer's beginning, too; they always may be at its end."""
    opening_events: frozenset[bytes] = frozenset()
    """Names of stream events that engines may send before they have computed anything."""
    last_events: frozenset[bytes] = frozenset()
    """Names of stream events of which one ends every stream."""
    errors: ErrorForm = ErrorForm.OPENAI
    headers: tuple[str, ...] = ()
    """Of the client's request, in lower case, those that reach the engine beside its content-type:
    see `schemas.request_headers`."""


TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def _silence() -> bytes:
    """A tenth of a second of it, as WAV: PCM, one channel, 16 kHz, 16 bits."""
    samples = bytes(3200)
    head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVEfmt ", 16, 1, 1,
                       16_000, 32_000, 2, 16, b"data", len(samples))  # fmt: skip
    return head + samples


_TABLE = (
    EngineRoute(
        path=CHAT,
        prompt=PromptShape.CHAT,
        smallest={"max_tokens": 1, "messages": [{"role": "user", "content": "1"}]},
        is_optional=False,
        takes_stream_options=True,
        has_early_usage=False,
    ),
    EngineRoute(
        path=COMPLETIONS,
        prompt=PromptShape.COMPLETION,
        smallest={"max_tokens": 1, "prompt": "1"},
        is_optional=False,
        takes_stream_options=True,
        has_early_usage=False,
    ),
    EngineRoute(
        path=EMBEDDINGS,
        prompt=PromptShape.INPUTS,
        smallest={"input": "1"},
        generates=False,
    ),
    EngineRoute(
        path=MESSAGES,
        prompt=PromptShape.MESSAGES,
        smallest={"max_tokens": 1, "messages": [{"role": "user", "content": "1"}]},
        opening_events=frozenset({b"message_start", b"content_block_start", b"ping"}),
        last_events=frozenset({b"message_stop"}),
        errors=ErrorForm.ANTHROPIC,
        headers=ANTHROPIC_HEADERS,
    ),
    EngineRoute(
        path=COUNT_TOKENS,
        prompt=PromptShape.MESSAGES_ONCE,
        smallest={"messages": [{"role": "user", "content": "1"}]},
        generates=False,
        computes=False,
        errors=ErrorForm.ANTHROPIC,
        headers=ANTHROPIC_HEADERS,
    ),
    EngineRoute(
        path=RESPONSES,
        prompt=PromptShape.RESPONSES,
        smallest={"max_output_tokens": 4, "input": "1", "store": False},  # SGLang: 3 at least
        has_early_usage=False,
        opening_events=frozenset(
            {
                b"response.created",
                b"response.queued",
                b"response.in_progress",
                b"response.output_item.added",
                b"response.content_part.added",
            }
        ),
        last_events=frozenset(
            {
                b"response.completed",
                b"response.failed",
                b"response.incomplete",
                b"response.cancelled",
            }
        ),
        errors=ErrorForm.RESPONSES,
    ),
    EngineRoute(
        path=RERANK,
        prompt=PromptShape.RERANK,
        smallest={"query": "1", "documents": ["1"]},
        generates=False,
    ),
    EngineRoute(
        path=SCORE,
        prompt=PromptShape.PAIRS,
        smallest={"text_1": "1", "text_2": "1"},
        generates=False,
    ),
    EngineRoute(path=CLASSIFY, prompt=PromptShape.INPUTS, smallest={"input": "1"}, generates=False),
    EngineRoute(path=POOLING, prompt=PromptShape.INPUTS, smallest={"input": "1"}, generates=False),
    EngineRoute(
        path=TOKENIZE,
        prompt=PromptShape.TOKENIZE,
        smallest={"prompt": "1"},
        generates=False,
        computes=False,
    ),
    EngineRoute(
        path=DETOKENIZE,
        prompt=PromptShape.TOKENS,
        smallest={"tokens": [1]},
        generates=False,
        computes=False,
    ),
    *(
        EngineRoute(
            path=path,
            prompt=PromptShape.AUDIO,
            smallest={"file": _silence()},
            generates=False,  # the recording takes most of the time, the text is short
            takes_json=False,
            takes_form=True,
        )
        for path in (TRANSCRIPTIONS, TRANSLATIONS)
    ),
)

ENGINE_ROUTES: Mapping[str, EngineRoute] = MappingProxyType({row.path: row for row in _TABLE})
ENGINE_PATHS = frozenset(ENGINE_ROUTES)
# Those whose answers show that the engine computes, and those whose don't: no listed ones.
COMPUTED_PATHS = frozenset(row.path for row in _TABLE if row.computes)
SERVER_PATHS = ENGINE_PATHS - COMPUTED_PATHS
# Other names of paths, as engines have them.
ALIASES: Mapping[str, str] = MappingProxyType({"/rerank": RERANK, "/score": SCORE})
# Paths that some engines answer and others don't, as listed ones are.
OPTIONAL_PATHS = frozenset(row.path for row in _TABLE if row.is_optional)
# Those of every engine, and those whose answers are generated tokens: no listed ones.
PLAIN_PATHS = ENGINE_PATHS - OPTIONAL_PATHS
GENERATING_PATHS = frozenset(row.path for row in _TABLE if row.generates)
STREAM_OPTIONS_PATHS = frozenset(row.path for row in _TABLE if row.takes_stream_options)
EARLY_USAGE_PATHS = frozenset(row.path for row in _TABLE if row.has_early_usage)
LAST_EVENTS = {row.path: row.last_events for row in _TABLE if row.last_events}
OPENING_EVENTS = {row.path: row.opening_events for row in _TABLE if row.opening_events}
# Fields that limit an answer's tokens, by path; engines prefer the first.
TOKEN_LIMITS: Mapping[str, tuple[str, ...]] = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    MESSAGES: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
}
ANY_TOKEN_LIMIT = tuple(dict.fromkeys(name for names in TOKEN_LIMITS.values() for name in names))
# Kinds of engines that go on with an assistant's message at a chat's end, as they are asked.
CONTINUING_KINDS = ("llamacpp", "sglang", "vllm")
PATHS_KEPT = 256
_ERRORS = {row.path: row.errors for row in _TABLE}


@lru_cache(PATHS_KEPT)  # asked several times for each request
def engine_route(path: str) -> EngineRoute:
    """What is known of a path: of one that only an operator lists, nothing but the path."""
    return ENGINE_ROUTES.get(path) or EngineRoute(
        path=path, prompt=PromptShape.BODY, generates=False, takes_form=True
    )


def error_form(path: str) -> ErrorForm:
    """The shape of errors to a request for that path; OpenAI's for a path that is not here."""
    return _ERRORS.get(path, ErrorForm.OPENAI)
