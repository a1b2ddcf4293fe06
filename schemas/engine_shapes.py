"""Requests and answers of the engines' routes that are not OpenAI's oldest three (`schemas.http`).

Only what the router reads is named; every other field passes to the engine untouched.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """Messages, as Anthropic defines them. Every other field passes to the engine untouched."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: tuple[dict[str, Any], ...]
    system: Any = None
    stream: bool | None = None
    cache_salt: Any = None
    """The mesh lets prompts share prefixes only with those of the same salt; vLLM reads none on
    this path, and its cache does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """OpenAI's Responses. `conversation` and `background` are refused. Every other field passes to
    the engine untouched."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    input: str | tuple[dict[str, Any], ...]
    instructions: Any = None
    stream: bool | None = None
    user: Any = None
    """Names the session where the header `x-mesh-session` does not."""
    cache_salt: Any = None
    """vLLM's: prompts share prefixes only with those of the same salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """Work on texts or tokens that generates nothing. The fields are the engine's; the router
    reads the model, and the texts to estimate their tokens."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioForm:
    """A recording. Every other field passes to the engine untouched; the router reads the model."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """The engine's answer, byte for byte; errors of the router have the route's own form."""

    __pydantic_config__ = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicErrorDetail:
    """What went wrong and what to do about it."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicError:
    """An error in Anthropic's shape, so that Anthropic's clients raise the right exception."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
