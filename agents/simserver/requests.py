"""From a request body to what the engine must do, or a 400 that says what to change.

Sampling parameters are accepted and have no effect: the simulated model has one answer. What
would change the shape of the response (n, logprobs, echo) is refused, not ignored. One field is the
simulated engine's own: `"stamp": true` (see `responses.stamp`).
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import orjson

from agents.sim import text as tokens
from agents.sim.text import LengthOptions, SimulatedAnswer, answer


@dataclass(frozen=True, slots=True)
class ApiError(Exception):
    """Ends one HTTP request as an OpenAI client expects; `param` names the field at fault."""

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
        """The JSON body."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code or self.status,
                }
            }
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param, code)


_COMPLETION_MAX_TOKENS: Final = 16  # what OpenAI's and vLLM's completions do when not told
_STOPS_MAX: Final = 16

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request and the answer that the model will give to it."""

    chat: bool
    model: str
    prompt: bytes
    answer: SimulatedAnswer
    stream: bool
    include_usage: bool
    stamped: bool = False  # each token says of which prompt and attempt it is, and which one it is

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return tokens.count(self.prompt)

    def sequence(self) -> bytes:
        """Prompt and answer together, as the engine's KV will hold them."""
        return self.prompt + self.answer.text.encode()


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Reads requests for one server: its names, its context length in tokens, its seed."""

    models: tuple[str, ...]
    max_model_len: int
    seed: int

    def chat(self, raw: bytes) -> GenerationRequest:
        """A /v1/chat/completions body. Raises ApiError."""
        body = _json_object(raw)
        prompt = _tools(body) + _chat_prompt(body)
        limit = _positive(body, "max_completion_tokens") or _positive(body, "max_tokens")
        return self._request(body, prompt, limit, chat=True)

    def completion(self, raw: bytes) -> GenerationRequest:
        """A /v1/completions body. Raises ApiError."""
        body = _json_object(raw)
        if body.get("echo"):
            raise invalid("echo is not simulated: leave it out", "echo")
        prompt = _completion_prompt(body)
        limit = _positive(body, "max_tokens")
        if limit is None and not _flag(body, "ignore_eos"):
            limit = _COMPLETION_MAX_TOKENS
        return self._request(body, prompt, limit, chat=False)

    def _request(
        self, body: Body, prompt: bytes, limit: int | None, *, chat: bool
    ) -> GenerationRequest:
        model = self._model(body)
        _refuse_unsimulated(body)
        room = self._room(tokens.count(prompt), limit)
        length = LengthOptions(
            room=room,
            max_tokens=limit,
            min_tokens=_min_tokens(body, room if limit is None else limit),
            ignore_eos=_flag(body, "ignore_eos"),
            stop=_stops(body),
        )
        stream = _flag(body, "stream")
        stamped = _flag(body, "stamp")
        if stamped and length.stop:
            raise invalid("stamps are not words: leave out stop or stamp", "stamp")
        return GenerationRequest(
            chat=chat,
            model=model,
            prompt=prompt,
            answer=answer(prompt, length, self.seed),
            stream=stream,
            include_usage=stream and _include_usage(body),
            stamped=stamped,
        )

    def _model(self, body: Body) -> str:
        model = body.get("model", self.models[0])
        if model not in self.models:
            raise ApiError(
                404,
                f"the model {model!r} does not exist here; this engine serves: "
                + ", ".join(self.models),
                "model",
                "model_not_found",
            )
        return cast(str, model)

    def _room(self, prompt_tokens: int, limit: int | None) -> int:
        if prompt_tokens + (limit or 1) > self.max_model_len:
            raise invalid(
                f"the prompt has {prompt_tokens} tokens and {limit or 1} more were asked for; "
                f"this engine's context is {self.max_model_len} tokens: shorten the prompt or "
                "lower max_tokens",
                "messages",
                "context_length_exceeded",
            )
        return self.max_model_len - prompt_tokens


def _json_object(raw: bytes) -> Body:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def _refuse_unsimulated(body: Body) -> None:
    if body.get("n") not in (None, 1):
        raise invalid("only n = 1 is simulated: ask again for each further choice", "n")
    if body.get("best_of") not in (None, 1):
        raise invalid("only best_of = 1 is simulated", "best_of")
    if body.get("logprobs") not in (None, False):
        raise invalid("logprobs are not simulated: leave them out", "logprobs")


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false", name)
    return value


def _whole(body: Body, name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid(f"{name} must be a whole number, {least} or more", name)
    return value


def _positive(body: Body, name: str) -> int | None:
    return _whole(body, name, 1)


def _min_tokens(body: Body, most: int) -> int:
    least = _whole(body, "min_tokens", 0) or 0
    if least > most:
        raise invalid(f"min_tokens must not exceed the {most} tokens allowed", "min_tokens")
    return least


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop must be a string or a list of strings", "stop")
    if len(stops) > _STOPS_MAX or "" in stops:
        raise invalid(f"stop takes at most {_STOPS_MAX} strings, none of them empty", "stop")
    return tuple(stops)


def _include_usage(body: Body) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    return _flag(options, "include_usage")


def _completion_prompt(body: Body) -> bytes:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokens.text_tokens(prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        try:
            return tokens.id_tokens(prompt)
        except OverflowError:
            raise invalid(f"token ids go from 0 to {tokens.TOKEN_ID_MAX}", "prompt") from None
    raise invalid("prompt must be one string or one list of token ids, and not empty", "prompt")


def _chat_prompt(body: Body) -> bytes:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list with at least one message", "messages")
    return tokens.chat_tokens(
        [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    )


def _message(message: object, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role not in tokens.ROLES:
        raise invalid(f"{where}.role must be one of: " + ", ".join(tokens.ROLES), where)
    text = _content(message.get("content"), where)
    if message.get("tool_calls"):
        text += orjson.dumps(message["tool_calls"]).decode()
    return role, text


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    raise invalid(f"{where}.content must be a string or a list of parts", where)


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return cast(str, part["text"])
    raise invalid(f"{where}.content: every part must be text, as this model reads only that", where)


def _tools(body: Body) -> bytes:
    # Engines render the tools into the prompt, before the messages.
    return tokens.text_tokens(orjson.dumps(body["tools"]).decode()) if body.get("tools") else b""
