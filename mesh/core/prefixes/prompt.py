"""A prompt as chained block hashes: what the prefix index knows of it.

The prompt's text is cut into blocks of BLOCK_BYTES; each block's hash covers everything before it
too, so one hash stands for the whole prefix up to its block's end, and equal hashes mean equal
prefixes. The model, the request's salt and its tenant are hashed first: prefixes of different
models, salts or tenants never meet. In the engine they don't either, but for tenants, which it does
not know.

Hashes cross regions, so they are keyed BLAKE2b (RFC 7693), not a checksum: without the mesh's
secret nobody can turn them back into text, nor even test a guess. Whoever has the secret can
test guesses of a whole prefix, block by block; the hashes alone tell how many prompts begin
alike. One running state makes all of a prompt's hashes: 53 us for 4,000 tokens, where seeded xxh3
takes 20 and hides nothing. Rejected: xxh3 inside and a keyed hash of it on the wire, which costs
the same and needs a second name for every block.

Text instead of tokens, because a router that tokenised would need every model's tokenizer and
its CPU (SkyWalker's tree is over characters for the same reason). Tokens are estimated from
bytes with a ratio learned from what engines report.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from schemas.ids import ModelId

BLOCK_BYTES = 256  # about 64 tokens of English: fine enough to tell chats apart, 8 bytes each
HASH_BYTES = 8
BLOCKS_MAX = 8192  # 2 MiB of text; what lies beyond is not needed to tell prompts apart
CHAINS_CACHED = 256  # models and tenants whose chain need not be begun anew
PIECES_MAX = 65_536  # messages, and parts of them: millions would hold up everybody's answers
BYTES_PER_TOKEN_START = 4.0
BYTES_PER_TOKEN_WEIGHT = 0.05  # of a new observation in the running average


class PromptInvalid(ValueError):
    """The body has no prompt where its endpoint wants one; the message says what is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Prompt:
    """What placement needs to know of a prompt. `hashes`: one a full block, each of its prefix."""

    tokens: int
    hashes: tuple[int, ...]
    block_tokens: float = BLOCK_BYTES / BYTES_PER_TOKEN_START  # tokens that one block stands for

    def uncached_tokens(self, matched_blocks: int) -> int:
        """Tokens to compute where that many leading blocks are held; the last one always is."""
        return max(1, self.tokens - round(matched_blocks * self.block_tokens))


class TokenRatio:
    """Bytes per prompt token of one model, learned from engines' `usage`."""

    def __init__(self) -> None:
        self._bytes_per_token = BYTES_PER_TOKEN_START

    def tokens(self, text_bytes: int) -> int:
        """The estimate for a text of that many bytes."""
        return max(1, round(text_bytes / self._bytes_per_token))

    @property
    def block_tokens(self) -> float:
        """Tokens that a block of text stands for."""
        return BLOCK_BYTES / self._bytes_per_token

    def observe(self, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request. Counts of 0 or less teach nothing."""
        if prompt_tokens > 0 and text_bytes > 0:
            sample = min(64.0, max(0.25, text_bytes / prompt_tokens))
            self._bytes_per_token += BYTES_PER_TOKEN_WEIGHT * (sample - self._bytes_per_token)


def prompt_text(body: Mapping[str, Any], *, chat: bool) -> bytes:
    """The bytes of a request's prompt, in the order the engine will see them.

    Raises PromptInvalid when `messages` (chat) or `prompt` (completions) is missing or misshapen.
    """
    pieces = _chat_pieces(body) if chat else _completion_pieces(body)
    return b"".join(pieces)


def block_hashes(
    text: bytes, *, key: str, model: ModelId, salt: str = "", tenant: str = ""
) -> tuple[int, ...]:
    """The chained hashes of the full blocks of `text`; at most BLOCKS_MAX.

    `salt`: the request's own word. `tenant`: whose it is, which no request can say itself.
    """
    end = min(len(text) // BLOCK_BYTES, BLOCKS_MAX) * BLOCK_BYTES
    if not end:
        return ()
    chained = _chain(key, model, salt, tenant).copy()
    update, digest = chained.update, chained.digest
    digests = []
    for start in range(0, end, BLOCK_BYTES):
        update(text[start : start + BLOCK_BYTES])
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


def _chat_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptInvalid("messages must be a non-empty array", "messages")
    pieces = 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise PromptInvalid(f"messages[{number}] must be an object", "messages")
        content = message.get("content")
        pieces += 1 + (len(content) if isinstance(content, list) else 0)
        if pieces > PIECES_MAX:
            raise PromptInvalid(f"messages have more than {PIECES_MAX} parts", "messages")
        yield b"\x00" + _bytes_of(message.get("role"), "messages") + b"\x00"
        yield from _content_pieces(content, f"messages[{number}].content")


def _content_pieces(content: Any, where: str) -> Iterator[bytes]:
    if content is None:  # an assistant turn that only called tools
        return
    if isinstance(content, str):
        yield _bytes_of(content, "messages")
    elif isinstance(content, list):
        for part in content:
            # Images and other parts count by their whole text: equal parts, equal prefix.
            text = part.get("text") if isinstance(part, dict) else None
            yield _bytes_of(text if isinstance(text, str) else part, "messages")
    else:
        raise PromptInvalid(f"{where} must be a string or an array of parts", "messages")


def _completion_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    prompt = body.get("prompt")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
        raise PromptInvalid("prompt must be a string or a non-empty array", "prompt")
    # Several prompts, or one as token ids, are written in one go: there may be millions of ids.
    yield _bytes_of(prompt, "prompt")


def _bytes_of(value: Any, param: str) -> bytes:
    """A text as it is, anything else as JSON: equal values, equal bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise PromptInvalid(f"{param} is nested too deeply", param) from error
