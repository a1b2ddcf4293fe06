"""A prompt as chained block hashes, which the prefix index works with.

The prompt's text is cut into blocks of BLOCK_BYTES; each block's hash covers everything before it
too, so one hash identifies the whole prefix up to its block's end. The model, the request's salt
and its tenant are hashed first, so prefixes of different models, salts or tenants never match. (In
the engine tenants would, as it does not know them.)

Hashes cross regions, so they are keyed BLAKE2b (RFC 7693), not a checksum: without the mesh's
secret they can't be turned back into text, nor can a guess be tested. With the secret, guesses of a
whole prefix can be, block by block; the hashes alone show how many prompts begin alike. One running
state makes all of a prompt's hashes: 53 us for 4,000 tokens, where seeded xxh3 takes 20 and hides
nothing.

Text instead of tokens, because tokenising would need every model's tokenizer and its CPU
(SkyWalker's tree is over characters for the same reason). Tokens are estimated from bytes with a
ratio learned from what engines report. Images and the like are no text: see `prompt_parts.py`.

Templates put tools before the messages, so they come first here. A response format comes last: few
engines put it into the prompt, and wherever they do, equal messages should match as far as they go.
"""

import hashlib
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from mesh.core.model.prompt_parts import (
    PARTS_MAX,
    STAND_IN_BYTES,
    Part,
    PartKind,
    PartTokens,
    part_kind,
    stand_in,
)
from mesh.core.model.served_names import work_name
from schemas.ids import ModelId
from schemas.prompt_writing import Billing, PromptWriting

BLOCK_BYTES = 256  # about 64 tokens of English: fine enough to distinguish chats, 8 bytes each
HASH_BYTES = 8
_blocks_of = struct.Struct(f"{BLOCK_BYTES}s").iter_unpack
BLOCKS_MAX = 8192  # 2 MiB of text; more is not needed to distinguish prompts
CHAINS_CACHED = 256  # models and tenants
PIECES_MAX = 65_536  # messages, and parts of them: millions would delay all answers
BYTES_PER_TOKEN_START = 4.0
BYTES_PER_TOKEN_WEIGHT = 0.05  # of a new observation in the running average
INFINITE = float("inf")
MODELS_MAX = 256  # whose estimates are kept; a mesh serves far fewer models


class PromptInvalid(ValueError):
    """The body has no prompt where its endpoint requires one; the message names the defect."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class StateUnknown(PromptInvalid):
    """The prompt continues one that only some engine would know."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as placement needs it. `hashes`: one per full block, each of its prefix."""

    tokens: int
    hashes: tuple[int, ...]
    # Of one block of text.
    block_tokens: float = BLOCK_BYTES / BYTES_PER_TOKEN_START
    # Where parts that are no text end, in leading blocks, and by how many tokens all parts up to
    # there differ from text of their length.
    parts: tuple[tuple[int, float], ...] = ()

    def held_tokens(self, blocks: int) -> int:
        """Tokens of so many leading blocks."""
        tokens = blocks * self.block_tokens
        if self.parts and (before := bisect_right(self.parts, (blocks, INFINITE))):
            tokens += self.parts[before - 1][1]
        return max(0, round(tokens))

    def uncached_tokens(self, matched_blocks: int) -> int:
        """Tokens to compute where that many leading blocks are held; the last one always is."""
        return max(1, self.tokens - self.held_tokens(matched_blocks))


class TextSize(NamedTuple):
    """What a prompt's tokens are estimated from, and learned.

    `text_bytes`: without the stand-ins of `parts`. `is_certain`: whether the engine has all of it
    in its prompt, for certain.
    """

    text_bytes: int
    parts: tuple[PartKind, ...] = ()
    is_certain: bool = True


NO_TEXT = TextSize(0)


class Asides(NamedTuple):
    """What engines write differently of a `/v1/messages` prompt (`schemas.prompt_writing`)."""

    system: tuple[int, int]  # where the text of the system prompt begins and ends in `data`
    billing: str = ""  # what stood before it, and is not in `data`
    turns: tuple[tuple[int, int], ...] = ()  # system turns among the messages, in `data`


class PromptText(NamedTuple):
    """A prompt's bytes, as they are hashed, and where parts that are no text lie in them."""

    data: bytes
    parts: tuple[Part, ...] = ()
    is_certain: bool = True
    token_ids: int = 0  # of what came as ids and is not in `data`
    is_prefix: bool = True  # later prompts may begin with it
    asides: Asides | None = None

    @property
    def size(self) -> TextSize:
        """Kept until the answer reports tokens."""
        kinds = tuple(part.kind for part in self.parts)
        text_bytes = len(self.data) - STAND_IN_BYTES * len(kinds)
        return TextSize(text_bytes, kinds, self.is_certain)


NO_PROMPT = PromptText(b"")
SYSTEM_TURN = b"\x00system\x00"
_HASH_OF_REQUEST = re.compile(r"cch=[^;]*")


def as_written(text: PromptText, writing: PromptWriting) -> PromptText:
    """The prompt as such engines write it."""
    if (asides := text.asides) is None:
        return text
    data, (begin, end) = text.data, asides.system
    billing, turns = asides.billing, () if writing.system_first is False else asides.turns
    if writing.billing is Billing.LEFT_OUT:
        billing = ""
    elif writing.billing is Billing.MASKED:
        billing = _HASH_OF_REQUEST.sub("cch=", billing)
    if not (billing or turns):
        return text
    moved = b"".join(data[start + len(SYSTEM_TURN) : stop] for start, stop in turns)
    if writing.system_first is None and turns:  # alike in place, and the same turns are moved
        moved, turns = hashlib.blake2b(moved, digest_size=HASH_BYTES).digest(), ()
    system = billing.encode("utf-8", "surrogatepass") + data[begin:end] + moved
    if not data.endswith(SYSTEM_TURN, 0, begin):
        system = SYSTEM_TURN + system
    pieces, at = [data[:begin], system], end
    for start, stop in turns:
        pieces.append(data[at:start])
        at = stop
    more = len(system) - (end - begin)
    parts = [
        part._replace(end=part.end + more - sum(b - a for a, b in turns if b <= part.end))
        if part.end > end
        else part
        for part in text.parts
    ]
    return text._replace(data=b"".join((*pieces, data[at:])), parts=tuple(parts), asides=None)


class TokenRatio:
    """Bytes per prompt token of one model, learned from engines' `usage`."""

    def __init__(self) -> None:
        self._bytes_per_token = BYTES_PER_TOKEN_START

    def tokens(self, text_bytes: int) -> int:
        return max(1, round(text_bytes / self._bytes_per_token))

    @property
    def block_tokens(self) -> float:
        return BLOCK_BYTES / self._bytes_per_token

    def observe(self, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request. Counts of 0 or less teach nothing."""
        if prompt_tokens > 0 and text_bytes > 0:
            sample = min(64.0, max(0.25, text_bytes / prompt_tokens))
            self._bytes_per_token += BYTES_PER_TOKEN_WEIGHT * (sample - self._bytes_per_token)


class TokenEstimate:
    """Tokens of one model's prompts, text and other parts, learned from engines' `usage`."""

    def __init__(self) -> None:
        self._ratio = TokenRatio()
        self._parts = PartTokens()

    def prompt(self, text: PromptText, hashes: tuple[int, ...]) -> Prompt:
        """The prompt of that text."""
        block_tokens = self._ratio.block_tokens
        if text.token_ids:
            return Prompt(text.token_ids, hashes, block_tokens)
        if not text.parts:
            return Prompt(self._ratio.tokens(len(text.data)), hashes, block_tokens)
        more, ends = 0.0, []
        for kind, end in text.parts:
            more += self._parts.tokens(kind) - STAND_IN_BYTES / BLOCK_BYTES * block_tokens
            ends.append((end // BLOCK_BYTES, more))
        tokens = max(1, round(len(text.data) / BLOCK_BYTES * block_tokens + more))
        return Prompt(tokens, hashes, block_tokens, tuple(ends))

    def observe(self, size: TextSize, prompt_tokens: int) -> None:
        """Learn from one finished request. Counts of 0 or less teach nothing."""
        if not size.is_certain or prompt_tokens <= 0:
            return
        if size.parts:
            text_tokens = self._ratio.tokens(size.text_bytes) if size.text_bytes else 0
            self._parts.observe(size.parts, prompt_tokens - text_tokens, text_tokens)
        else:
            self._ratio.observe(size.text_bytes, prompt_tokens)


class PromptReader:
    """Hashes prompts and estimates their tokens, as learned per model."""

    def __init__(
        self, hash_key: str, writing_of: Callable[[ModelId], PromptWriting] | None = None
    ) -> None:
        """`writing_of`: how engines write the prompts of what requests ask for; as vLLM without."""
        self._hash_key, self._writing_of = hash_key, writing_of
        self._estimates: dict[ModelId, TokenEstimate] = {}

    def read(self, model: ModelId, text: PromptText, salt: str = "", tenant: str = "") -> Prompt:
        """The prompt of that text; shared only with prompts of the same `salt` and `tenant`."""
        if text.asides is not None and self._writing_of is not None:
            text = as_written(text, self._writing_of(model))
        model = work_name(model)
        data = text.data if text.is_prefix else b""
        hashes = block_hashes(data, key=self._hash_key, model=model, salt=salt, tenant=tenant)
        estimate = self._estimates.get(model) or self._estimate(model)
        return estimate.prompt(text, hashes)

    def learn(self, model: ModelId, size: TextSize, prompt_tokens: int) -> None:
        """What an engine counted for a text of that size."""
        self._estimate(work_name(model)).observe(size, prompt_tokens)

    def _estimate(self, model: ModelId) -> TokenEstimate:
        estimate = self._estimates.get(model)
        if estimate is None:
            if len(self._estimates) >= MODELS_MAX:
                self._estimates.pop(next(iter(self._estimates)))
            estimate = self._estimates[model] = TokenEstimate()
        return estimate


def prompt_text(body: Mapping[str, Any], *, chat: bool) -> PromptText:
    """A request's prompt, in the order the engine will see it.

    Raises PromptInvalid when `messages` (chat) or `prompt` (completions) is missing or misshapen.
    """
    written = WrittenPrompt()
    if chat:
        _write_chat(body, written)
    else:
        _write_completion(body, written)
    response_format = body.get("response_format")
    if response_format is not None:
        written.add(b"\x00response_format\x00" + bytes_of(response_format, "response_format"))
    return PromptText(b"".join(written.pieces), tuple(written.parts), response_format is None)


def block_hashes(
    text: bytes, *, key: str, model: ModelId, salt: str = "", tenant: str = ""
) -> tuple[int, ...]:
    """The chained hashes of the full blocks of `text`; at most BLOCKS_MAX.

    `salt`: named by the request. `tenant`: determined by its API key.
    """
    end = min(len(text) // BLOCK_BYTES, BLOCKS_MAX) * BLOCK_BYTES
    if not end:
        return ()
    chained = _chain(key, model, salt, tenant).copy()
    update, digest = chained.update, chained.digest
    digests = []
    for (block,) in _blocks_of(text[:end]):
        update(block)
        digests.append(digest())
    return struct.unpack(f">{len(digests)}Q", b"".join(digests))


@lru_cache(CHAINS_CACHED)
def _chain(key: str, model: ModelId, salt: str, tenant: str) -> "hashlib.blake2b":
    """The state before the first block. Copy it: it is shared."""
    secret = hashlib.sha256(key.encode()).digest()  # of any length, where BLAKE2b takes 64 bytes
    whose = b"\x00".join((model.encode(), salt.encode("utf-8", "surrogatepass"), b""))
    # A parameter of its own, because a salt may hold any bytes: none is taken for a tenant.
    person = hashlib.sha256(tenant.encode()).digest()[: hashlib.blake2b.PERSON_SIZE]
    return hashlib.blake2b(
        whose, key=secret, digest_size=HASH_BYTES, person=person if tenant else b""
    )


class WrittenPrompt:
    """A prompt's bytes, while they are put together."""

    __slots__ = ("length", "parts", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.parts: list[Part] = []
        self.length = 0

    def add(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.length += len(piece)

    def add_part(self, kind: PartKind, part: Mapping[str, Any]) -> None:
        if len(self.parts) >= PARTS_MAX:
            what = "images and other parts that are no text"
            raise PromptInvalid(f"messages have more than {PARTS_MAX} {what}", "messages")
        try:
            self.add(stand_in(part))
        except orjson.JSONEncodeError as error:
            raise PromptInvalid("messages is nested too deeply", "messages") from error
        self.parts.append(Part(kind, self.length))


def _write_chat(body: Mapping[str, Any], written: WrittenPrompt) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptInvalid("messages must be a non-empty array", "messages")
    if tools := body.get("tools"):
        written.add(b"\x00tools\x00" + bytes_of(tools, "tools"))
    pieces = 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise PromptInvalid(f"messages[{number}] must be an object", "messages")
        content = message.get("content")
        pieces += 1 + (len(content) if isinstance(content, list) else 0)
        if pieces > PIECES_MAX:
            raise PromptInvalid(f"messages have more than {PIECES_MAX} parts", "messages")
        written.add(b"\x00" + bytes_of(message.get("role"), "messages") + b"\x00")
        if calls := message.get("tool_calls"):  # before the content, which alone can be cut
            written.add(bytes_of(calls, "messages") + b"\x00")
        if isinstance(content, str):
            written.add(bytes_of(content, "messages"))
        elif isinstance(content, list):
            write_parts(content, written)
        elif content is not None:  # as of an assistant's turn that only calls tools
            where = f"messages[{number}].content"
            raise PromptInvalid(f"{where} must be a string or an array of parts", "messages")


def write_parts(content: list[Any], written: WrittenPrompt) -> None:
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            written.add(bytes_of(text, "messages"))
        elif isinstance(part, dict) and (kind := part_kind(part)) is not None:
            written.add_part(kind, part)
        else:  # unknown, and counts by all of its text: equal parts, equal prefix
            written.add(bytes_of(part, "messages"))


def _write_completion(body: Mapping[str, Any], written: WrittenPrompt) -> None:
    prompt = body.get("prompt")
    if prompt is None and (embeds := body.get("prompt_embeds")) is not None:
        written.add(bytes_of(embeds, "prompt_embeds"))  # vLLM: the engine judges them
        return
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
        raise PromptInvalid("prompt must be a string or a non-empty array", "prompt")
    # Several prompts, or one as token ids, are written in one go: there may be millions of ids.
    written.add(bytes_of(prompt, "prompt"))


def bytes_of(value: Any, param: str) -> bytes:
    """A text as it is, anything else as JSON: equal values, equal bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise PromptInvalid(f"{param} is nested too deeply", param) from error
