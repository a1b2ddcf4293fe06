"""The body that has another engine go on with a stream that broke, and when there is none.

A chat goes on from an assistant's turn at its end: vLLM and SGLang take `continue_final_message`,
and vLLM refuses it beside the `add_generation_prompt` that is true by default; llama.cpp goes on
from such a turn anyhow. A completion's text is appended to its prompt, which any engine takes. What
the rest of an answer depends on beside the prompt's text can't be handed over, and such a request
is refused: a grammar's state, counts of the tokens that were generated, a random generator's.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from mesh.session.said import Said, Splice
from schemas.engine_routes import TOKEN_LIMITS
from schemas.http import CHAT

# Fields that an answer's rest depends on, or its form, unless they have one of these values.
NOTHING: tuple[object, ...] = (None, False, [], {}, "")
MUST_BE = {
    "response_format": (*NOTHING, {"type": "text"}),
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        NOTHING,
    ),
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf", "structural_tag"), NOTHING),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "n_probs"), (*NOTHING, 0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0, 0.0)),
    **dict.fromkeys(("echo", "store", "use_beam_search", "return_token_ids", "suffix"), NOTHING),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds", "audio", "background"), NOTHING),
    # They decide whether the rest is thought or said.
    **dict.fromkeys(("chat_template_kwargs", "reasoning_effort", "thinking"), NOTHING),
    **dict.fromkeys(("kv_transfer_params", "mirostat", "session_params"), (*NOTHING, 0)),
    "n_predict": (None, -1),  # llama.cpp's own limit, which it prefers and others ignore
    # Whether an engine hides its thoughts, or does not tell them from what it says.
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (None, True)),
    "modalities": (*NOTHING, ["text"]),
    "tool_choice": (*NOTHING, "none", "auto"),
    "function_call": (*NOTHING, "none", "auto"),
}


class CantContinue(ValueError):
    """No other engine could go on with it; the message says what of it prevents that."""


def continuation(said: Said, *, may_be_seeded: bool = False) -> tuple[dict[str, Any], Splice]:
    """What the next engine is asked, and how its answer is joined to what was `said`.

    `said` is read. Raises CantContinue.
    """
    said.read()
    if said.why_not:
        raise CantContinue(said.why_not)
    fields = orjson.loads(said.body)
    _check(fields, may_be_seeded=may_be_seeded)
    sent = said.text.rstrip() if said.is_chat else said.text
    # The last token that is sent may have had white space at its end, which costs a token again.
    again = int(said.is_chat and said.is_mixed)
    sent_tokens = said.text_tokens if said.is_chat else said.tokens
    limit = _limit(fields)
    if limit is None and not said.is_chat:
        raise CantContinue("the request has no max_tokens")  # engines have defaults of their own
    is_closing = bool(said.finished) or (limit is not None and said.tokens >= limit)
    more = sent_tokens - again
    if sent:
        _append(fields, sent, is_chat=said.is_chat)
    if is_closing:
        fields["max_tokens"], fields["min_tokens"] = 1, 0
        fields.pop("max_completion_tokens", None)
    else:
        _lower_limits(fields, more)
    return fields, Splice(said, sent, sent_tokens, is_closing=is_closing, more=more)


def _check(fields: Mapping[str, Any], *, may_be_seeded: bool) -> None:
    for name, harmless in MUST_BE.items():
        if name in fields and fields[name] not in harmless:
            raise CantContinue(f"the request has {name}")
    is_greedy = fields.get("temperature") == 0
    if fields.get("seed") is not None and not (is_greedy or may_be_seeded):
        raise CantContinue("the request samples with a seed")


def _limit(fields: Mapping[str, Any]) -> int | None:
    """Most tokens of the whole answer, as far as the request says.

    None also for llama.cpp's -1, which is no limit. Raises CantContinue.
    """
    names = TOKEN_LIMITS[CHAT]
    given = [(name, limit) for name in names if (limit := fields.get(name)) is not None]
    for name, limit in given:
        if type(limit) is not int:
            raise CantContinue(f"its {name} is no whole number")
    return given[0][1] if given and given[0][1] > 0 else None


def _lower_limits(fields: dict[str, Any], said_tokens: int) -> None:
    for name, least in (*((name, 1) for name in TOKEN_LIMITS[CHAT]), ("min_tokens", 0)):
        if type(limit := fields.get(name)) is int and limit > 0:
            fields[name] = max(least, limit - said_tokens)


def _append(fields: dict[str, Any], text: str, *, is_chat: bool) -> None:
    if not is_chat:
        fields["prompt"] = _prompt(fields.get("prompt")) + text
        return
    if not (messages := list(fields["messages"])):
        raise CantContinue("it has no messages")
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        if fields.get("continue_final_message") is not True:
            raise CantContinue("its last message is the assistant's")
        if not isinstance(last.get("content"), str):
            raise CantContinue("its last message is no text")
        messages[-1] = {**last, "content": last["content"] + text}
    elif fields.get("add_generation_prompt") is False:
        raise CantContinue("the request has add_generation_prompt")
    else:
        messages.append({"role": "assistant", "content": text})
    fields["messages"] = messages
    fields["continue_final_message"], fields["add_generation_prompt"] = True, False


def _prompt(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise CantContinue("its prompt is no text")
    return prompt
