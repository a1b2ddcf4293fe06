"""Where each route of engines has its prompt, and how that is read.

Chats and completions are in `prompt`. The rest, which most requests are not, is here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mesh.core.model.prompt import (
    PIECES_MAX,
    SYSTEM_TURN,
    Asides,
    PromptInvalid,
    PromptText,
    StateUnknown,
    WrittenPrompt,
    bytes_of,
    prompt_text,
    write_parts,
)
from mesh.core.model.prompt_parts import part_kind
from schemas.engine_routes import PromptShape, engine_route
from schemas.prompt_writing import BILLING_HEADER
from schemas.response_ids import place_of

CALL_TEXT = PromptText(b"", is_certain=False, token_ids=1, is_prefix=False)  # there is none
NOT_KEPT = "no replica of this mesh keeps that response; send the whole conversation as input"
INPUT_SHAPE = (
    "input must be a string, or an array of strings, of token ids, or of arrays of token ids; "
    "none of them may be empty"
)


HOLD_PARTS = ("content", "output")  # fields of parts that may be arrays of parts

PAIRS = (
    ("text_1", "data_1", "queries", "query"),  # vLLM's names; the last also SGLang's
    ("text_2", "data_2", "documents", "items"),
)


def text_at(path: str, body: Mapping[str, Any], body_bytes: int = 0) -> PromptText:
    """The prompt of a request for that path; `body_bytes`: of all of its body, which is what counts
    where nothing else is known of it. Raises PromptInvalid."""
    shape = engine_route(path).prompt
    if (bytes_per_token := _BY_SIZE.get(shape)) is not None:
        tokens = max(1, body_bytes // bytes_per_token)
        return PromptText(b"", is_certain=False, token_ids=tokens, is_prefix=False)
    return _READERS[shape](body)


def inputs_text(body: Mapping[str, Any]) -> PromptText:
    """All inputs of an embeddings request together. Raises PromptInvalid for a misshapen `input`.

    It is no prefix: documents that are embedded hardly begin alike, and each is embedded once, so
    their blocks would only displace those of conversations from the index.
    """
    given = body.get("input")
    if isinstance(given, str) and given:
        return PromptText(bytes_of(given, "input"), is_prefix=False)
    if not isinstance(given, list) or not given:
        raise PromptInvalid(INPUT_SHAPE, "input")
    first = type(given[0])
    if first is int:  # one prompt
        return PromptText(b"", is_certain=False, token_ids=_ids(given), is_prefix=False)
    if len(given) > PIECES_MAX:
        raise PromptInvalid(f"input has more than {PIECES_MAX} items", "input")
    if first is list:
        ids = sum(map(_ids, given))
        return PromptText(b"", is_certain=False, token_ids=ids, is_prefix=False)
    if not all(isinstance(text, str) and text for text in given):
        raise PromptInvalid(INPUT_SHAPE, "input")
    return PromptText(b"".join(bytes_of(text, "input") for text in given), is_prefix=False)


def _ids(given: object) -> int:
    """How many token ids that is. Raises PromptInvalid for anything else, and for none."""
    if not isinstance(given, list) or not given or set(map(type, given)) != {int} or min(given) < 0:
        raise PromptInvalid(INPUT_SHAPE, "input")
    return len(given)


def messages_text(body: Mapping[str, Any]) -> PromptText:
    """The prompt of an Anthropic request: tools, system, messages. Raises PromptInvalid.

    Written as a chat of the same words is, so that both are one prefix.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptInvalid("messages must be a non-empty array", "messages")
    written = WrittenPrompt()
    if tools := body.get("tools"):
        written.add(b"\x00tools\x00" + bytes_of(tools, "tools"))
    turns = _Turns(written, "messages")
    billing, begin = "", written.length
    if (system := body.get("system")) is not None:
        billing, system = _without_billing(system)
        turns.add("system", system, "system")
        begin += len(SYSTEM_TURN)
    end, later = written.length, []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise PromptInvalid(f"messages[{number}] must be an object", "messages")
        role, start, parts = message.get("role"), written.length, len(written.parts)
        turns.add(role, message.get("content"), f"messages[{number}].content")
        if role == "system" and len(written.parts) == parts:
            later.append((start, written.length))
    asides = Asides((begin, end), billing, tuple(later)) if billing or later else None
    return PromptText(b"".join(written.pieces), tuple(written.parts), asides=asides)


def _without_billing(system: object) -> tuple[str, object]:
    """The text of Claude Code's blocks that name its billing, and the system prompt without them,
    as vLLM has it (`schemas.prompt_writing`)."""
    if not isinstance(system, list):
        return "", system
    billing = "".join(part["text"] for part in system if _is_billing(part))
    return billing, [part for part in system if not _is_billing(part)] if billing else system


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def messages_once_text(body: Mapping[str, Any]) -> PromptText:
    """The same, of a request that leaves nothing in an engine's cache."""
    return messages_text(body)._replace(is_prefix=False, asides=None)


def responses_text(body: Mapping[str, Any]) -> PromptText:
    """The prompt of OpenAI's Responses: tools, instructions, input. Raises PromptInvalid, and
    StateUnknown where the input continues what an engine would have kept."""
    is_whole = _check_state(body)
    given = body.get("input")
    if not isinstance(given, str | list) or not given:
        raise PromptInvalid("input must be a string or a non-empty array of items", "input")
    written = WrittenPrompt()
    if tools := body.get("tools"):
        written.add(b"\x00tools\x00" + bytes_of(tools, "tools"))
    turns = _Turns(written, "input")
    if (instructions := body.get("instructions")) is not None:
        turns.add("system", instructions, "instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise PromptInvalid(f"input[{number}] must be an object", "input")
        if item.get("type") == "item_reference":
            message = "items are not kept by this mesh; send them instead of references"
            raise StateUnknown(message, f"input[{number}]")
        if "role" in item:
            turns.add(item["role"], item.get("content"), f"input[{number}].content")
        else:  # a call of a tool, its output, reasoning and the like
            turns.add(item.get("type"), [item], f"input[{number}]")
    response_format = body.get("text")
    if response_format is not None:
        written.add(b"\x00response_format\x00" + bytes_of(response_format, "text"))
    data = b"".join(written.pieces)
    is_certain = response_format is None and is_whole
    return PromptText(data, tuple(written.parts), is_certain, is_prefix=is_whole)


def _check_state(body: Mapping[str, Any]) -> bool:
    """Whether the input is the whole prompt; else a replica has the rest."""
    previous = body.get("previous_response_id")
    is_whole = previous is None
    if not is_whole and not (isinstance(previous, str) and place_of(previous)):
        raise StateUnknown(NOT_KEPT, "previous_response_id")
    own_id = body.get("request_id")
    if isinstance(own_id, str) and place_of(own_id):
        raise PromptInvalid(
            "request_id has the form of this mesh's own ids; leave it out", "request_id"
        )
    if body.get("conversation") is not None:
        message = "conversations are not kept by this mesh; send the whole conversation as input"
        raise StateUnknown(message, "conversation")
    if body.get("background"):
        message = "responses are not made in the background here; leave out background"
        raise PromptInvalid(message, "background")
    return is_whole


def rerank_text(body: Mapping[str, Any]) -> PromptText:
    """A query and documents. Raises PromptInvalid."""
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str | dict) or not query:
        raise PromptInvalid("query must be a text", "query")
    if not isinstance(documents, list) or not documents:
        raise PromptInvalid("documents must be a non-empty array of texts", "documents")
    return PromptText(
        bytes_of(query, "query") + _joined(documents, "documents"),
        is_certain=False,
        is_prefix=False,
    )


def pairs_text(body: Mapping[str, Any]) -> PromptText:
    """What is scored against each other, by any of the names that engines give it. Raises
    PromptInvalid."""
    written = []
    for names in PAIRS:
        param = next((name for name in names if body.get(name)), None)
        if param is None:
            raise PromptInvalid(f"{names[0]} must be a text or an array of texts", names[0])
        given = body[param]
        if not isinstance(given, str | list | dict):
            raise PromptInvalid(f"{param} must be a text or an array of texts", param)
        written.append(_joined(given if isinstance(given, list) else [given], param))
    return PromptText(b"".join(written), is_certain=False, is_prefix=False)


def tokenize_text(body: Mapping[str, Any]) -> PromptText:
    """A text or a chat whose tokens are requested. Raises PromptInvalid."""
    if "messages" in body:
        text = prompt_text(body, chat=True)
    else:
        param = "content" if "content" in body else "prompt"  # the first is llama.cpp's
        given = body.get(param)
        if not isinstance(given, str):
            raise PromptInvalid(f"{param} must be a string", param)
        text = PromptText(bytes_of(given, param))
    return text._replace(is_certain=False, is_prefix=False)


def tokens_text(body: Mapping[str, Any]) -> PromptText:
    """Token ids whose text is requested. Raises PromptInvalid."""
    given = body.get("tokens")
    if not isinstance(given, list) or set(map(type, given)) != {int} or min(given) < 0:
        raise PromptInvalid("tokens must be a non-empty array of token ids", "tokens")
    return PromptText(b"", is_certain=False, token_ids=len(given), is_prefix=False)


def _joined(given: list[Any], param: str) -> bytes:
    if len(given) > PIECES_MAX:
        raise PromptInvalid(f"{param} has more than {PIECES_MAX} items", param)
    return b"".join(bytes_of(each, param) for each in given)


class _Turns:
    """Writes turns of a conversation whose parts may hold parts themselves."""

    def __init__(self, written: WrittenPrompt, param: str) -> None:
        self._written, self._param = written, param
        self._pieces = 0

    def add(self, role: object, content: object, where: str) -> None:
        """One turn. Raises PromptInvalid for content that is neither text nor parts."""
        self._count(1)
        self._written.add(b"\x00" + bytes_of(role, self._param) + b"\x00")
        if isinstance(content, str):
            self._written.add(bytes_of(content, self._param))
        elif isinstance(content, list):
            self._add_parts(content)
        else:
            raise PromptInvalid(f"{where} must be a string or an array of parts", self._param)

    def _add_parts(self, content: list[Any]) -> None:
        self._count(len(content))
        for part in content:
            if not isinstance(part, dict) or part_kind(part) is not None:
                write_parts([part], self._written)
                continue
            inner = next((name for name in HOLD_PARTS if isinstance(part.get(name), list)), None)
            if inner is None:
                write_parts([part], self._written)
                continue
            # A tool's result: its images count as images, not by the length of their base64.
            bare = {name: value for name, value in part.items() if name != inner}
            self._written.add(bytes_of(bare, self._param))
            self._count(len(part[inner]))
            write_parts(part[inner], self._written)

    def _count(self, pieces: int) -> None:
        self._pieces += pieces
        if self._pieces > PIECES_MAX:
            raise PromptInvalid(f"{self._param} has more than {PIECES_MAX} parts", self._param)


_READERS: Mapping[PromptShape, Callable[[Mapping[str, Any]], PromptText]] = {
    PromptShape.CHAT: partial(prompt_text, chat=True),
    PromptShape.COMPLETION: partial(prompt_text, chat=False),
    PromptShape.INPUTS: inputs_text,
    PromptShape.MESSAGES: messages_text,
    PromptShape.MESSAGES_ONCE: messages_once_text,
    PromptShape.RESPONSES: responses_text,
    PromptShape.RERANK: rerank_text,
    PromptShape.PAIRS: pairs_text,
    PromptShape.TOKENIZE: tokenize_text,
    PromptShape.TOKENS: tokens_text,
}
# Bodies whose work is estimated by their size alone, in bytes per token. Of audio: Whisper computes
# a position of each 20 ms (arXiv:2212.04356, 2.2), 640 bytes at 16 kHz and 16 bits; compressed
# recordings have more in them, and what such work takes is learned by itself.
_BY_SIZE = {PromptShape.BODY: 4, PromptShape.AUDIO: 640}
