"""The table of routes that engines answer: what the mesh must know of each, for router and agent.

The router looks up how a prompt is read, whether tokens are generated and which form errors have;
the agent which paths it may call, how it finds out whether its engine has one, and where an answer
says its usage. A path that is not here is never called for a client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoute:
    """One path of engines, always POST with a JSON object that names a model."""

    path: str
    prompt: PromptShape
    smallest: Mapping[str, object] = field(default_factory=dict)
    """Beside the model, the fields of the smallest request: an agent's probe."""
    generates: bool = True
    """Whether it answers with tokens; else its work is to compute a prompt, priced as that."""
    is_optional: bool = True
    """Whether some engines lack it: an agent finds out, and its heartbeats name it."""
    takes_stream_options: bool = False
    """Whether a stream brings its usage only where `stream_options` ask for it."""
    has_early_usage: bool = True
    """Whether counts may be at an answer's beginning, too; they always may be at its end."""
    opening_events: frozenset[bytes] = frozenset()
    """Names of stream events that engines may send before they have computed anything."""
    errors: ErrorForm = ErrorForm.OPENAI


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
        errors=ErrorForm.ANTHROPIC,
    ),
    EngineRoute(
        path=COUNT_TOKENS,
        prompt=PromptShape.MESSAGES_ONCE,
        smallest={"messages": [{"role": "user", "content": "1"}]},
        generates=False,
        errors=ErrorForm.ANTHROPIC,
    ),
    EngineRoute(
        path=RESPONSES,
        prompt=PromptShape.RESPONSES,
        smallest={"max_output_tokens": 1, "input": "1", "store": False},
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
        path=TOKENIZE, prompt=PromptShape.TOKENIZE, smallest={"prompt": "1"}, generates=False
    ),
    EngineRoute(
        path=DETOKENIZE, prompt=PromptShape.TOKENS, smallest={"tokens": [1]}, generates=False
    ),
)

ENGINE_ROUTES: Mapping[str, EngineRoute] = MappingProxyType({row.path: row for row in _TABLE})
ENGINE_PATHS = frozenset(ENGINE_ROUTES)
# Other names of paths, as engines have them.
ALIASES: Mapping[str, str] = MappingProxyType({"/rerank": RERANK, "/score": SCORE})
# Paths that some engines answer and others don't.
OPTIONAL_PATHS = frozenset(row.path for row in _TABLE if row.is_optional)
PROMPT_ONLY_PATHS = frozenset(row.path for row in _TABLE if not row.generates)
STREAM_OPTIONS_PATHS = frozenset(row.path for row in _TABLE if row.takes_stream_options)
EARLY_USAGE_PATHS = frozenset(row.path for row in _TABLE if row.has_early_usage)
OPENING_EVENTS = {row.path: row.opening_events for row in _TABLE if row.opening_events}
_ERRORS = {row.path: row.errors for row in _TABLE}


def error_form(path: str) -> ErrorForm:
    """The shape of errors to a request for that path; OpenAI's for a path that is not here."""
    return _ERRORS.get(path, ErrorForm.OPENAI)
