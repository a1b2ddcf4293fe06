"""Prompt texts that share the prefixes that the trace's prompts shared.

A block's text is a function of its id alone, so two prompts that begin with the same ids begin
with the same bytes in every run. Words have three letters and a space, and byte-pair tokenizers
have common short words as one token with their space: at the default of 4 bytes per token the text
has about the recorded length.

Token ids as prompts (`prompt: [ids]`) would be exact, but work with `/v1/completions` only, and a
router that hashes text would not be exercised.
"""

import hashlib
from functools import lru_cache

from mesh.replay.trace import TraceRequest

WORD_BYTES = 4
BLOCK_BYTES_MIN = 32  # eight words, 48 bits: shorter blocks would soon look alike by chance
BLOCKS_KEPT = 8192  # 2 KiB each at full length
_TEXT = (
    "the and for are but not you all any can had her was one our out "
    "day get has him his how man new now old see two way who boy did "
    "its let put say she too use car cat dog run sun red big hot top "
    "end war art air eye far few job key law lot own pay bed box cup "
)
_WORDS = [_TEXT[at : at + WORD_BYTES] for at in range(0, len(_TEXT), WORD_BYTES)]
_WORD_OF_BYTE = [_WORDS[byte % len(_WORDS)] for byte in range(256)]


class Prompts:
    """Makes each request's prompt; caches the texts of recently used blocks."""

    def __init__(self, block_tokens: int, bytes_per_token: float = 4.0, salt: str = "") -> None:
        """`salt` makes all texts new, for a run against caches that a former run has warmed."""
        self._bytes_per_token = bytes_per_token
        self._block_bytes = round(block_tokens * bytes_per_token)
        self._salt = salt
        if self._block_bytes < BLOCK_BYTES_MIN:
            raise ValueError(
                f"blocks of {block_tokens} tokens would be {self._block_bytes} bytes of text, "
                f"fewer than the {BLOCK_BYTES_MIN} that make them differ: scale lengths down less"
            )
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._make_block)

    def text(self, request: TraceRequest, number: int) -> str:
        """The prompt: its blocks' texts cut to its length; what they don't cover is its own."""
        wanted = max(1, round(request.input_tokens * self._bytes_per_token))
        shared = "".join(map(self._block, request.blocks))[:wanted]
        if len(shared) == wanted:
            return shared
        return shared + _words(f"{self._salt}/request {number}", wanted - len(shared))

    def _make_block(self, block: int) -> str:
        return _words(f"{self._salt}/block {block}", self._block_bytes)


def _words(seed: str, size_bytes: int) -> str:
    digest = hashlib.shake_128(seed.encode()).digest(-(-size_bytes // WORD_BYTES))
    return "".join(map(_WORD_OF_BYTE.__getitem__, digest))[:size_bytes]
