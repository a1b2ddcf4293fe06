"""The simulated tokenizer, and what the simulated model answers.

A token is four bytes of UTF-8: a piece of text is cut into groups of four bytes from its start, the
last one padded with NUL; a token's id is its bytes as a little-endian integer. So a text of n bytes
has ⌈n / 4⌉ tokens (close to what real tokenizers make of English), equal text prefixes have equal
token prefixes, and tokenizing is a copy. Tokens travel as one `bytes`, four for each.

In a chat every message is its own piece between two markers whose first byte, 0xFF, no UTF-8 text
contains, so no text can forge one. An answer is made of whole tokens, so when it comes back in the
next turn's history it is cut where the engine cut it, and hits the KV of it.

The same prompt gets the same answer: words without meaning, four letters and one token each. Where
the client leaves the length to the model, it is drawn by a hash of the prompt from a log-normal
with the median and spread of the 19,366 chat answers in the Azure LLM inference trace of 2023
(median 129 tokens, standard deviation of the logarithm 0.86).
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

TOKEN_BYTES = 4
TOKEN_ID_MAX = 2**32 - 1

_END = b"\xffend"
_ASSISTANT = b"\xffast"
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_ROLES: dict[Role, bytes] = {
    "system": b"\xffsys",
    "developer": b"\xffdev",
    "user": b"\xffusr",
    "assistant": _ASSISTANT,
    "tool": b"\xfftol",
    "function": b"\xfffun",
}


def text_tokens(text: str) -> bytes:
    """The tokens of one piece of text. Lone surrogates (legal in JSON) count as '?'."""
    data = text.encode("utf-8", "replace")
    return data + b"\0" * (-len(data) % TOKEN_BYTES)


def id_tokens(ids: Sequence[int]) -> bytes:
    """The tokens with these ids. Raises OverflowError for an id outside 0 … TOKEN_ID_MAX."""
    return b"".join(token_id.to_bytes(TOKEN_BYTES, "little") for token_id in ids)


def chat_tokens(messages: Iterable[tuple[Role, str]]) -> bytes:
    """The prompt of a chat, (role, text) each, up to where the assistant's answer begins."""
    parts: list[bytes] = []
    for role, text in messages:
        parts += (_ROLES[role], text_tokens(text), _END)
    parts.append(_ASSISTANT)
    return b"".join(parts)


def count(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


_WORDS = tuple(
    f"{first}{vowel}{last} " for first in "bcdfghlmnprstvwz" for vowel in "aeio" for last in "nrst"
)
assert len(_WORDS) == 256, "one word for each value of a byte"

_LENGTH = NormalDist(mu=math.log(129), sigma=0.86)
_LENGTH_MAX = 2048


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """The whole answer before its first token is out. All of it is ASCII.

    The KV holds `tokens` tokens; the client sees `visible` characters of `text` (a stop
    sequence is cut off).
    """

    text: str
    tokens: int
    visible: int
    finish_reason: str
    said: int = 0  # characters of its first token that were said before

    def shown(self, start: int, end: int) -> str:
        """What the client sees of tokens `start` to `end`."""
        begin, stop = start * TOKEN_BYTES - self.said, end * TOKEN_BYTES - self.said
        return self.text[max(0, begin) : min(stop, self.visible)]

    def after(self, said: str) -> "SimulatedAnswer | None":
        """The rest of it after its first part; None if it doesn't begin so, or is over."""
        if not self.text.startswith(said) or len(said) >= self.visible:
            return None
        before, cut = divmod(len(said), TOKEN_BYTES)
        rest = self.text[len(said) :]
        left = self.tokens - before
        return SimulatedAnswer(rest, left, self.visible - len(said), self.finish_reason, cut)


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """What bounds the answer's length; `room` is what the context leaves."""

    room: int
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()


def answer(prompt: bytes, options: LengthOptions, seed: int, adapter: str = "") -> SimulatedAnswer:
    """The answer to a prompt; each adapter has its own. `room` is 1 or more, `min_tokens` not above
    what is allowed."""
    key, salt = adapter.encode()[:64], seed.to_bytes(8, "little")
    digest = hashlib.blake2b(prompt, digest_size=16, salt=salt, key=key).digest()
    most = options.room if options.max_tokens is None else min(options.max_tokens, options.room)
    drawn = most + 1 if options.ignore_eos else max(_drawn_length(digest), options.min_tokens)
    tokens = min(drawn, most)
    text = "".join(map(_WORDS.__getitem__, hashlib.shake_128(digest).digest(tokens)))
    return _stopped(text, options, "stop" if drawn <= most else "length")


def _drawn_length(digest: bytes) -> int:
    share = (int.from_bytes(digest[:8], "little") + 0.5) / 2**64
    share = min(max(share, 1e-9), 1 - 1e-9)
    return min(max(round(math.exp(_LENGTH.inv_cdf(share))), 1), _LENGTH_MAX)


def _stopped(text: str, options: LengthOptions, finish_reason: str) -> SimulatedAnswer:
    start = options.min_tokens * TOKEN_BYTES
    found = [(at, stop) for stop in options.stop if (at := text.find(stop, start)) >= 0]
    if not found:
        return SimulatedAnswer(text, len(text) // TOKEN_BYTES, len(text), finish_reason)
    visible, stop = min(found)
    tokens = -(-(visible + len(stop)) // TOKEN_BYTES)
    return SimulatedAnswer(text[: tokens * TOKEN_BYTES], tokens, visible, "stop")
