"""LMCache's agent traces: JSON lines with the full text of prompt and answer, in microseconds.

What two prompts share is read off their texts. A prompt is cut into pieces of 64 bytes, which
are 16 tokens of four bytes (the simulated engine's tokenizer), and a piece's id is the hash of
the text up to its end: equal ids mean that everything before is equal too, in this session and
across sessions. The rest of a text is its own.

Rejected: cutting at messages. The texts are flat (roles are words in them), so the cuts would be
guesses, and an engine's cache shares blocks, not messages.

Source: LMCache's "lmcache-agentic-traces": miniswe, magagent, taubench.
"""

from collections.abc import Iterable

import xxhash

from mesh.replay.formats.lines import (
    BLOCK_ID_MAX,
    TOKENS_MAX,
    at_least_one,
    json_object,
    numbered,
    text,
    whole,
)
from mesh.replay.trace import Trace, TraceError, TraceRequest

BLOCK_TOKENS = 16  # as engines cut; these texts are short
TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
TIMESTAMP_US_MAX = 10**18


def parse_lmcache(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    requests = at_least_one([_request(line, number) for number, line in numbered(lines)])
    requests.sort(key=lambda request: request.at_s)
    return Trace(BLOCK_TOKENS, tuple(requests))


def _request(line: bytes, number: int) -> TraceRequest:
    record, where = json_object(line, number), f"line {number}"
    prompt = text(record, "input", where).encode("utf-8", "replace")
    answer = text(record, "output", where).encode("utf-8", "replace")
    session = text(record, "session_id", where)
    if not session:
        raise TraceError(f"{where}: session_id is empty")
    if len(prompt) > TOKENS_MAX * TOKEN_BYTES:
        raise TraceError(f"{where}: input is longer than {TOKENS_MAX} tokens")
    return TraceRequest(
        at_s=whole(record, "timestamp", where, least=0, most=TIMESTAMP_US_MAX) / 1e6,
        input_tokens=max(1, -(-len(prompt) // TOKEN_BYTES)),
        output_tokens=-(-len(answer) // TOKEN_BYTES),
        blocks=_blocks(prompt),
        session=session,
    )


def _blocks(prompt: bytes) -> tuple[int, ...]:
    hasher = xxhash.xxh3_64()
    ids: list[int] = []
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        hasher.update(prompt[end - BLOCK_BYTES : end])
        ids.append(hasher.intdigest() & BLOCK_ID_MAX)
    return tuple(ids)
