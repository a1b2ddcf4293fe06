"""The simulated tokenizer: a token is four bytes of UTF-8.

A piece of text is cut into groups of four bytes from its start, the last one padded with NUL;
a token's id is its bytes as a little-endian integer. So a text of n bytes has ⌈n / 4⌉ tokens
(close to what real tokenizers make of English), equal text prefixes have equal token prefixes,
and tokenizing is a copy. Tokens travel as one `bytes`, four for each.

In a chat every message is its own piece between two markers whose first byte, 0xFF, no UTF-8
text contains: no text can forge a marker. An answer is made of whole tokens, so when it comes
back in the next turn's history it is cut where the engine cut it, and hits the KV of it.

Rejected: a real byte-pair vocabulary. It would cost megabytes and milliseconds and change
nothing that a router can see.
"""

from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4
TOKEN_ID_MAX = 2**32 - 1

_END = b"\xffend"
_ASSISTANT = b"\xffast"
_ROLES = {
    "system": b"\xffsys",
    "developer": b"\xffdev",
    "user": b"\xffusr",
    "assistant": _ASSISTANT,
    "tool": b"\xfftol",
    "function": b"\xfffun",
}
ROLES = tuple(_ROLES)


def text_tokens(text: str) -> bytes:
    """The tokens of one piece of text. Lone surrogates (legal in JSON) count as '?'."""
    data = text.encode("utf-8", "replace")
    return data + b"\0" * (-len(data) % TOKEN_BYTES)


def id_tokens(ids: Sequence[int]) -> bytes:
    """The tokens with these ids. Raises OverflowError for an id outside 0 … TOKEN_ID_MAX."""
    return b"".join(token_id.to_bytes(TOKEN_BYTES, "little") for token_id in ids)


def chat_tokens(messages: Iterable[tuple[str, str]]) -> bytes:
    """The prompt of a chat, (role, text) each, up to where the assistant's answer begins.

    Raises KeyError for a role that is not in ROLES.
    """
    parts: list[bytes] = []
    for role, text in messages:
        parts += (_ROLES[role], text_tokens(text), _END)
    parts.append(_ASSISTANT)
    return b"".join(parts)


def count(tokens: bytes) -> int:
    """How many tokens these are."""
    return len(tokens) // TOKEN_BYTES
