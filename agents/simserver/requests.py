"""From a request body to what the engine must do, or a 400 that says what to change.

Sampling parameters are accepted and have no effect: the simulated model has one answer. What
would change the shape of the response (n, logprobs, echo) is refused, not ignored. One field is the
simulated engine's own: `"stamp": true` (see `responses.stamp`).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from agents.sim import text as tokens
from agents.sim.text import LengthOptions, Role, SimulatedAnswer, answer
from schemas.problems import problem_of
from schemas.settings import Advice

_COMPLETION_MAX_TOKENS: Final = 16  # what OpenAI's and vLLM's completions do without a limit
_STOPS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class ApiError(Exception):
    """Ends one HTTP request as an OpenAI client expects; `param` names the field at fault.

    `code`: OpenAI's word for the error, where it has one.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        """OpenAI's `type` for the status."""
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request and the answer that the model will give to it."""

    chat: bool
    model: str
    prompt: bytes
    answer: SimulatedAnswer
    stream: bool
    include_usage: bool
    stamped: bool = False  # each token names its prompt, its attempt and its own index
    adapter: str = ""  # the model, if it is one

    @property
    def prompt_tokens(self) -> int:
        return tokens.count(self.prompt)

    def sequence(self) -> bytes:
        """Prompt and answer together, as the engine's KV will hold them."""
        return self.prompt + self.answer.text.encode().ljust(
            self.answer.tokens * tokens.TOKEN_BYTES, b"\0"
        )


def message_text(content: object) -> str:
    """The text of a message's content. Raises ValueError for what is none."""
    if isinstance(content, list):
        return "".join(map(_part_text, content))
    if content is None or isinstance(content, str):
        return content or ""
    raise ValueError("must be a string or a list of parts")


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError("every part must be text, as this model reads only that")


def _prompt_tokens(prompt: object) -> bytes:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokens.text_tokens(prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return id_prompt(prompt)
    raise ValueError("must be one string or one list of token ids, and not empty")


def id_prompt(ids: list[int]) -> bytes:
    """The tokens with these ids. Raises ValueError for an id that no token has."""
    try:
        return tokens.id_tokens(ids)
    except OverflowError:
        raise ValueError(f"token ids go from 0 to {tokens.TOKEN_ID_MAX}") from None


Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value or []),
    Field(max_length=_STOPS_MAX),
    Advice(f"must be a string or a list of at most {_STOPS_MAX} strings"),
]


class Part(BaseModel):
    """A JSON object of a body, or all of one."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """The body in these bytes. Raises ApiError."""
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise invalid(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise invalid(problem_of(error), str(error.errors()[0]["loc"][0])) from None


class _StreamOptions(Part):
    include_usage: Flag = False


class _Message(Part):
    role: Role
    content: Annotated[str, BeforeValidator(message_text)] = ""
    tool_calls: Any = None

    @property
    def text(self) -> str:
        return self.content + (orjson.dumps(self.tool_calls).decode() if self.tool_calls else "")


class _Body(Part):
    """What both paths read; null means an absent field."""

    model: Any = None
    n: Annotated[
        Literal[1] | None, Advice("only n = 1 is simulated: send a request for each choice")
    ] = None
    best_of: Annotated[Literal[1] | None, Advice("only best_of = 1 is simulated")] = None
    logprobs: Annotated[
        Literal[False] | None, Advice("logprobs are not simulated: leave them out")
    ] = None
    max_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: Flag = False
    stop: Stops = []
    stream: Flag = False
    stream_options: _StreamOptions | None = None
    stamp: Flag = False


class _Chat(_Body):
    messages: Annotated[
        list[_Message], Field(min_length=1), Advice("must be a list with at least one message")
    ]
    max_completion_tokens: PositiveInt | None = None
    tools: Any = None
    add_generation_prompt: Annotated[bool, BeforeValidator(lambda value: value is not False)] = True
    continue_final_message: Flag = False

    @property
    def prompt(self) -> bytes:
        """Engines render the tools into the prompt, before the messages."""
        tools = tokens.text_tokens(orjson.dumps(self.tools).decode()) if self.tools else b""
        return tools + tokens.chat_tokens((each.role, each.text) for each in self.messages)


class _Completion(_Body):
    prompt: Annotated[bytes, BeforeValidator(_prompt_tokens)]
    echo: Annotated[Literal[False] | None, Advice("echo is not simulated: leave it out")] = None


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Reads requests for one server: its names, its context length in tokens, its seed, and the
    adapters that it has at that moment."""

    models: tuple[str, ...]
    max_model_len: int
    seed: int
    adapters: Collection[str] = ()

    def chat(self, raw: bytes) -> GenerationRequest:
        """A /v1/chat/completions body. Raises ApiError."""
        body = _Chat.read(raw)
        limit = body.max_completion_tokens or body.max_tokens
        if not body.continue_final_message:
            return self._request(body, limit)
        if body.add_generation_prompt:
            problem = (
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            )
            raise invalid(problem, "continue_final_message")
        return self._continued(body, limit)

    def _continued(self, body: _Chat, limit: int | None) -> GenerationRequest:
        """The rest of the answer of which the last message is the beginning. Where it is the
        beginning of none, the model has nothing to add."""
        *before, last = body.messages
        said, text = last.content, last.content.encode("utf-8", "replace")
        if last.role != "assistant" or not before or body.stamp:
            problem = "only an assistant's message without stamps can be gone on with"
            raise invalid(problem, "messages")
        told = len(text) // tokens.TOKEN_BYTES
        longer = body.model_copy(
            update={"messages": before, "min_tokens": told + (body.min_tokens or 0)}
        )
        whole = self._request(longer, None if limit is None else told + limit)
        rest = whole.answer.after(said)
        if rest is None:
            rest = SimulatedAnswer(" ", 1, 0, "stop")
        return replace(whole, prompt=whole.prompt + tokens.text_tokens(said), answer=rest)

    def completion(self, raw: bytes) -> GenerationRequest:
        """A /v1/completions body. Raises ApiError."""
        body = _Completion.read(raw)
        limit = None if body.ignore_eos else _COMPLETION_MAX_TOKENS
        return self._request(body, body.max_tokens or limit)

    def _request(self, body: _Chat | _Completion, limit: int | None) -> GenerationRequest:
        model, prompt = self.model(body.model), body.prompt
        adapter = "" if model in self.models else model
        room = self._room(tokens.count(prompt), limit)
        most, least = room if limit is None else limit, body.min_tokens or 0
        if least > most:
            raise invalid(f"min_tokens must not exceed the {most} tokens allowed", "min_tokens")
        if body.stamp and body.stop:
            raise invalid("stamps are not words: leave out stop or stamp", "stamp")
        length = LengthOptions(room, limit, least, body.ignore_eos, body.stop)
        options = body.stream_options
        return GenerationRequest(
            chat=isinstance(body, _Chat),
            model=model,
            prompt=prompt,
            answer=answer(prompt, length, self.seed, adapter),
            stream=body.stream,
            include_usage=body.stream and options is not None and options.include_usage,
            stamped=body.stamp,
            adapter=adapter,
        )

    def model(self, model: object) -> str:
        """The model that is asked for. Raises ApiError for an unknown one."""
        if model is None:
            return self.models[0]
        if model in self.models or model in self.adapters:
            return str(model)
        served = ", ".join((*self.models, *self.adapters))
        problem = f"the model {model!r} does not exist here; this engine serves: {served}"
        raise ApiError(404, problem, "model", "model_not_found")

    def _room(self, prompt_tokens: int, limit: int | None) -> int:
        if prompt_tokens + (limit or 1) > self.max_model_len:
            raise invalid(
                f"the prompt has {prompt_tokens} tokens and {limit or 1} more are requested; "
                f"this engine's context is {self.max_model_len} tokens: shorten the prompt or "
                "lower max_tokens",
                "messages",
                "context_length_exceeded",
            )
        return self.max_model_len - prompt_tokens
