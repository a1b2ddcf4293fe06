"""What the simulated model says: always the same answer to the same prompt.

The words mean nothing and are four letters long, one token each. Where the client leaves the
length to the model, it is drawn from a log-normal whose median and spread are those of the
19,366 chat answers in the Azure LLM inference trace of 2023 (median 129 tokens, standard
deviation of the logarithm 0.86), by a hash of the prompt instead of a dice.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agents.sim.tokens import TOKEN_BYTES

_WORDS = tuple(
    f"{first}{vowel}{last} " for first in "bcdfghlmnprstvwz" for vowel in "aeio" for last in "nrst"
)
assert len(_WORDS) == 256, "one word for each value of a byte"

_LENGTH = NormalDist(mu=math.log(129), sigma=0.86)
_LENGTH_MAX = 2048


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer before its first token is out. All of it is ASCII.

    The KV holds `tokens` tokens; the client sees `visible` characters of `text` (a stop
    sequence is cut off).
    """

    text: str
    tokens: int
    visible: int
    finish_reason: str

    def shown(self, start: int, end: int) -> str:
        """What the client sees of tokens `start` to `end`."""
        return self.text[start * TOKEN_BYTES : min(end * TOKEN_BYTES, self.visible)]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client asks of the answer's length; `room` is what the context leaves."""

    room: int
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()


def answer(prompt: bytes, wishes: Wishes, seed: int) -> Answer:
    """The answer to a prompt. `room` is 1 or more, `min_tokens` not above what is allowed."""
    digest = hashlib.blake2b(prompt, digest_size=16, salt=seed.to_bytes(8, "little")).digest()
    most = wishes.room if wishes.max_tokens is None else min(wishes.max_tokens, wishes.room)
    drawn = most + 1 if wishes.ignore_eos else max(_drawn_length(digest), wishes.min_tokens)
    tokens = min(drawn, most)
    text = "".join(map(_WORDS.__getitem__, hashlib.shake_128(digest).digest(tokens)))
    return _stopped(text, wishes, "stop" if drawn <= most else "length")


def _drawn_length(digest: bytes) -> int:
    share = (int.from_bytes(digest[:8], "little") + 0.5) / 2**64
    share = min(max(share, 1e-9), 1 - 1e-9)
    return min(max(round(math.exp(_LENGTH.inv_cdf(share))), 1), _LENGTH_MAX)


def _stopped(text: str, wishes: Wishes, finish_reason: str) -> Answer:
    start = wishes.min_tokens * TOKEN_BYTES
    found = [(at, stop) for stop in wishes.stop if (at := text.find(stop, start)) >= 0]
    if not found:
        return Answer(text, len(text) // TOKEN_BYTES, len(text), finish_reason)
    visible, stop = min(found)
    tokens = -(-(visible + len(stop)) // TOKEN_BYTES)
    return Answer(text[: tokens * TOKEN_BYTES], tokens, visible, "stop")
