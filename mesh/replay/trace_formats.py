"""The published trace formats: Mooncake, Azure, LMCache, kv-cache-tester.

The first three are lists of requests. A format is a function from lines to a `Trace`; an error
names the line, and `load_trace` adds the file. A folder is read as the traces of its files
together, because some recorders write a file per session. A column mapping by configuration would
not do: formats differ in meaning (block size, clock, session-local ids) and not in column names.

- Mooncake: JSON lines with milliseconds, token counts and ids of 512-token blocks. Source: Qin et
  al., "Mooncake", FAST 2025, appendix, and its trace release.
- Azure: CSV with wall-clock times (UTC where no offset is given) and token counts. It doesn't name
  which prompts share a prefix, so none do. Source: Patel et al., "Splitwise", ISCA 2024;
  AzurePublicDataset, AzureLLMInferenceDataset2023.
- LMCache: JSON lines with microseconds and the full text of prompt and answer. Prompts are cut
  into pieces of 64 bytes (16 tokens of the simulated engine's tokenizer); a piece's id is the hash
  of the text up to its end, so equal ids mean equal prefixes. Source: LMCache's
  "lmcache-agentic-traces": miniswe, magagent, taubench.
- kv-cache-tester: one coding-agent session a line, its requests in order. A request gives its
  prompt as ranges `[first, count]` of 64-token block ids that are valid only inside their session,
  `t` (seconds since the session's start) and `think` (the client's own time since the previous
  answer). `sub` numbers the threads of a session: 0 is the main agent, others are sub-agents with
  the session's block ids. A session's second request is sent when the first is answered, so these
  are no `Trace`: the twin plays them as chains, and `mesh replay`, whose loop is open, doesn't.
  Source: kv-cache-tester's trace release, captured from Claude Code sessions by WEKA (Apache-2.0).
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import xxhash
from pydantic import Field

from mesh.replay.trace import (
    BLOCK_ID_MAX,
    REQUESTS_MAX,
    TOKENS_MAX,
    BlockId,
    TokenCount,
    TokenCountFrom1,
    Trace,
    TraceError,
    TraceRequest,
    TraceRow,
    numbered,
    parsed_row,
)

Parsed = TypeVar("Parsed")

SESSION_BLOCK_TOKENS_MAX = 4096
RANGES_MAX = 10_000  # of one prompt
SECONDS_MAX = 1e9
THREADS_MAX = 10_000  # of one session
FILES_MAX = 10_000
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_MS_MAX = 10**15  # wall clocks since 1970 are 10**12
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_BLOCK_TOKENS = 512  # no request names a block; texts are made in pieces of this length
AZURE_LINE_BYTES_MAX = 1000
LMCACHE_BLOCK_TOKENS = 16  # as engines cut; these texts are short
LMCACHE_TOKEN_BYTES = 4
LMCACHE_BLOCK_BYTES = LMCACHE_BLOCK_TOKENS * LMCACHE_TOKEN_BYTES
LMCACHE_US_MAX = 10**18

RecordedSeconds = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
BlockRange = tuple[BlockId, TokenCountFrom1]  # the first block, and how many


def load_trace(path: Path, format_name: str) -> Trace:
    """Read a trace file, or a folder's. Raises TraceError, whose message names the file."""
    if format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}: use one of {', '.join(FORMATS)}")
    traces = [read_lines(file, FORMATS[format_name]) for file in trace_files(path)]
    return _in_order(
        traces[0].block_tokens, [request for trace in traces for request in trace.requests]
    )


def trace_files(path: Path) -> list[Path]:
    """The file itself, or a folder's `.jsonl` and `.csv` files by name. Raises TraceError."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".csv"))
    if not 0 < len(files) <= FILES_MAX:
        raise TraceError(f"{path}: holds {len(files)} .jsonl or .csv files, 1 to {FILES_MAX} do")
    return files


def read_lines(file: Path, parse: Callable[[Iterable[bytes]], Parsed]) -> Parsed:
    """What `parse` makes of a file's lines. Raises TraceError, whose message names the file."""
    try:
        with file.open("rb") as lines:
            return parse(lines)
    except OSError as error:
        raise TraceError(f"can't read trace {file}: {error.strerror}") from error
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from error


def _in_order(block_tokens: int, requests: list[TraceRequest]) -> Trace:
    if not requests:
        raise TraceError("holds no request")
    requests.sort(key=lambda request: request.at_s)
    return Trace(block_tokens, tuple(requests))


def parse_mooncake(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    requests = [_mooncake_request(line, number) for number, line in numbered(lines)]
    return _in_order(MOONCAKE_BLOCK_TOKENS, requests)


class MooncakeRow(TraceRow):
    timestamp: Annotated[float, Field(ge=0, le=MOONCAKE_MS_MAX)]
    input_length: TokenCountFrom1
    output_length: TokenCount
    hash_ids: tuple[BlockId, ...]


def _mooncake_request(line: bytes, number: int) -> TraceRequest:
    row = parsed_row(MooncakeRow, line, number)
    ids, tokens = row.hash_ids, row.input_length
    if len(ids) > math.ceil(tokens / MOONCAKE_BLOCK_TOKENS):
        raise TraceError(
            f"line {number}: {len(ids)} hash_ids are more than {tokens} tokens hold; "
            f"a Mooncake block is {MOONCAKE_BLOCK_TOKENS} tokens"
        )
    return TraceRequest(row.timestamp / 1000, tokens, row.output_length, ids)


def parse_azure(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    rows = _azure_rows(lines)
    number, names = next(rows, (1, []))
    missing = [column for column in AZURE_COLUMNS if column not in names]
    if missing:
        raise TraceError(
            f"line {number}: the header lacks {missing[0]}: "
            f"it should name {', '.join(AZURE_COLUMNS)}, separated by commas"
        )
    places = [names.index(column) for column in AZURE_COLUMNS]
    requests = [_azure_request(row, places, f"line {number}") for number, row in rows]
    return _in_order(AZURE_BLOCK_TOKENS, requests)


def _azure_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    for number, line in numbered(lines):
        if len(line) > AZURE_LINE_BYTES_MAX:
            raise TraceError(f"line {number}: {len(line)} bytes are no line of this format")
        row = line.decode("utf-8-sig", "replace").strip()
        try:
            yield number, next(csv.reader([row], strict=True))
        except csv.Error as error:
            raise TraceError(f"line {number}: not CSV ({error})") from error


def _azure_request(row: list[str], places: list[int], where: str) -> TraceRequest:
    if len(row) <= max(places):
        raise TraceError(f"{where}: {len(row)} fields are fewer than the header's")
    at, prompt, answer = (row[place] for place in places)
    return TraceRequest(
        at_s=_azure_seconds(at, where),
        input_tokens=_azure_tokens(prompt, AZURE_COLUMNS[1], where, least=1),
        output_tokens=_azure_tokens(answer, AZURE_COLUMNS[2], where, least=0),
    )


def _azure_seconds(value: str, where: str) -> float:
    try:
        at = datetime.fromisoformat(value)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise TraceError(
            f"{where}: TIMESTAMP must be like 2023-11-16 18:15:46.68, got {value!r}"
        ) from error


def _azure_tokens(value: str, column: str, where: str, *, least: int) -> int:
    count = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else -1
    if not least <= count <= TOKENS_MAX:
        raise TraceError(
            f"{where}: {column} must be a whole number from {least} to {TOKENS_MAX}, got {value!r}"
        )
    return count


def parse_lmcache(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    requests = [_lmcache_request(line, number) for number, line in numbered(lines)]
    return _in_order(LMCACHE_BLOCK_TOKENS, requests)


class LMCacheRow(TraceRow):
    timestamp: Annotated[int, Field(ge=0, le=LMCACHE_US_MAX)]
    input: str
    output: str
    session_id: Annotated[str, Field(min_length=1)]


def _lmcache_request(line: bytes, number: int) -> TraceRequest:
    row = parsed_row(LMCacheRow, line, number)
    prompt = row.input.encode("utf-8", "replace")
    answer = row.output.encode("utf-8", "replace")
    if len(prompt) > TOKENS_MAX * LMCACHE_TOKEN_BYTES:
        raise TraceError(f"line {number}: input is longer than {TOKENS_MAX} tokens")
    return TraceRequest(
        at_s=row.timestamp / 1e6,
        input_tokens=max(1, -(-len(prompt) // LMCACHE_TOKEN_BYTES)),
        output_tokens=-(-len(answer) // LMCACHE_TOKEN_BYTES),
        blocks=_lmcache_blocks(prompt),
        session=row.session_id,
    )


def _lmcache_blocks(prompt: bytes) -> tuple[int, ...]:
    hasher = xxhash.xxh3_64()
    ids: list[int] = []
    for end in range(LMCACHE_BLOCK_BYTES, len(prompt) + 1, LMCACHE_BLOCK_BYTES):
        hasher.update(prompt[end - LMCACHE_BLOCK_BYTES : end])
        ids.append(hasher.intdigest() & BLOCK_ID_MAX)
    return tuple(ids)


FORMATS: Mapping[str, Callable[[Iterable[bytes]], Trace]] = {
    "mooncake": parse_mooncake,
    "azure": parse_azure,
    "lmcache": parse_lmcache,
}


class TurnRow(TraceRow):
    t: RecordedSeconds
    think: RecordedSeconds | None = None
    api: RecordedSeconds | None = None
    sub: Annotated[int, Field(ge=0, le=THREADS_MAX)]
    input_tokens: Annotated[TokenCountFrom1, Field(alias="in")]
    out: TokenCount
    hash_ranges: Annotated[tuple[BlockRange, ...], Field(max_length=RANGES_MAX)]


class SessionRow(TraceRow):
    id: str
    block_size: Annotated[int, Field(ge=1, le=SESSION_BLOCK_TOKENS_MAX)]
    requests: Annotated[tuple[TurnRow, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    `think_s`: since the answer before it in its thread; for a sub-agent's first, since the main
    agent's last answer.
    """

    at_s: float
    think_s: float
    thread: int
    input_tokens: int
    output_tokens: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One recorded session; its turns are in order of time."""

    name: str
    block_tokens: int
    turns: tuple[Turn, ...]


def parse_kv_cache_tester(lines: Iterable[bytes]) -> tuple[AgentSession, ...]:
    """The sessions of these lines, as they come. Raises TraceError that names a line."""
    sessions: list[AgentSession] = []
    requests = 0
    for number, line in numbered(lines):
        sessions.append(_session(parsed_row(SessionRow, line, number), f"line {number}"))
        requests += len(sessions[-1].turns)
        if requests > REQUESTS_MAX:
            raise TraceError(f"line {number}: more than {REQUESTS_MAX} requests: split the file")
    if not sessions:
        raise TraceError("holds no session")
    return tuple(sessions)


def _session(row: SessionRow, where: str) -> AgentSession:
    turns: list[Turn] = []
    answered_s: dict[int, float] = {}  # of each thread's last request
    for place, request in enumerate(row.requests, 1):
        covered = sum(count for _, count in request.hash_ranges)
        blocks = request.input_tokens // row.block_size
        if covered > blocks:
            raise TraceError(
                f"{where}, request {place}: hash_ranges name {covered} blocks; the prompt has "
                f"{blocks}"
            )
        if turns and request.t < turns[-1].at_s:
            raise TraceError(f"{where}, request {place}: t runs backwards")
        think_s = request.think
        if think_s is None or request.sub not in answered_s:
            main_s = next(iter(answered_s.values()), request.t)  # the first thread is the main's
            think_s = max(0.0, request.t - answered_s.get(request.sub, main_s))
        turns.append(
            Turn(
                at_s=request.t,
                think_s=think_s,
                thread=request.sub,
                input_tokens=request.input_tokens,
                output_tokens=request.out,
                ranges=request.hash_ranges,
            )
        )
        answered_s[request.sub] = request.t + (request.api or 0.0)
    return AgentSession(row.id, row.block_size, tuple(turns))
