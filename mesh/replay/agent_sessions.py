"""kv-cache-tester's coding-agent sessions: one JSON object a line, its requests in order.

A request gives its prompt as ranges `[first, count]` of 64-token block ids that are valid only
inside their session, `t` (seconds since the session's start) and `think` (the client's own time
since the previous answer). `sub` numbers the threads of a session: 0 is the main agent, others are
sub-agents with the session's block ids.

A session's second request is sent when the first is answered, so these are no `Trace`: the twin
plays them as chains, and `mesh replay`, whose loop is open, doesn't.

Source: kv-cache-tester's trace release, captured from Claude Code sessions by WEKA (Apache-2.0).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from mesh.replay.trace import (
    REQUESTS_MAX,
    BlockId,
    TokenCount,
    TokenCountFrom1,
    TraceError,
    TraceRow,
    numbered,
    parsed_row,
)

BLOCK_TOKENS_MAX = 4096
RANGES_MAX = 10_000  # of one prompt
SECONDS_MAX = 1e9
THREADS_MAX = 10_000  # of one session

RecordedSeconds = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
BlockRange = tuple[BlockId, TokenCountFrom1]  # the first block, and how many


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
    block_size: Annotated[int, Field(ge=1, le=BLOCK_TOKENS_MAX)]
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
