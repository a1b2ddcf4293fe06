"""kv-cache-tester's coding-agent sessions: one JSON object a line, its requests in order.

A request tells its prompt as ranges `[first, count]` of 64-token block ids that mean something
only inside their session, and when it was asked: `t` since the session's start, `think` the
client's own time since the answer before. `sub` numbers the talks of a session: 0 is the main
agent, others are sub-agents beside it, with the session's block ids.

These are sessions and not a list of requests: when the second request comes is decided by when
the first is answered. So they are no `Trace`; the twin makes chains of them, and `mesh replay`,
whose loop is open, doesn't play them.

Source: kv-cache-tester's trace release, captured from Claude Code sessions by WEKA (Apache-2.0).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mesh.replay.formats.lines import (
    BLOCK_ID_MAX,
    REQUESTS_MAX,
    TOKENS_MAX,
    json_object,
    number_from_0,
    numbered,
    text,
    whole,
)
from mesh.replay.trace import TraceError

BLOCK_TOKENS_MAX = 4096
RANGES_MAX = 10_000  # of one prompt
SECONDS_MAX = 1e9
TALKS_MAX = 10_000  # of one session


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    `think_s`: since the answer before it in its talk; for a sub-agent's first, since the main
    agent's last answer.
    """

    at_s: float
    think_s: float
    talk: int
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
        sessions.append(_session(json_object(line, number), f"line {number}"))
        requests += len(sessions[-1].turns)
        if requests > REQUESTS_MAX:
            raise TraceError(f"line {number}: more than {REQUESTS_MAX} requests: split the file")
    if not sessions:
        raise TraceError("holds no session")
    return tuple(sessions)


def _session(record: dict[str, Any], where: str) -> AgentSession:
    block_tokens = whole(record, "block_size", where, least=1, most=BLOCK_TOKENS_MAX)
    rows = record.get("requests")
    if not isinstance(rows, list) or not rows:
        raise TraceError(f"{where}: requests must be a list of one or more")
    turns: list[Turn] = []
    answered_s: dict[int, float] = {}  # of each talk's last request
    for place, row in enumerate(rows, 1):
        at = f"{where}, request {place}"
        if not isinstance(row, dict):
            raise TraceError(f"{at}: not a JSON object")
        turn = _turn(row, block_tokens, answered_s, at)
        if turns and turn.at_s < turns[-1].at_s:
            raise TraceError(f"{at}: t runs backwards")
        turns.append(turn)
        answered_s[turn.talk] = turn.at_s + (_seconds(row, "api", at) or 0.0)
    return AgentSession(text(record, "id", where), block_tokens, tuple(turns))


def _turn(row: dict[str, Any], block_tokens: int, answered_s: dict[int, float], where: str) -> Turn:
    at_s = number_from_0(row, "t", where, most=SECONDS_MAX, unit="seconds")
    talk = whole(row, "sub", where, least=0, most=TALKS_MAX)
    think_s = _seconds(row, "think", where)
    if think_s is None or talk not in answered_s:  # what is left between the answer and this
        main_s = next(iter(answered_s.values()), at_s)  # the first talk is the main agent's
        think_s = max(0.0, at_s - answered_s.get(talk, main_s))
    input_tokens = whole(row, "in", where, least=1)
    return Turn(
        at_s=at_s,
        think_s=think_s,
        talk=talk,
        input_tokens=input_tokens,
        output_tokens=whole(row, "out", where, least=0),
        ranges=_ranges(row, input_tokens // block_tokens, where),
    )


def _seconds(row: dict[str, Any], key: str, where: str) -> float | None:
    if row.get(key) is None:
        return None
    return number_from_0(row, key, where, most=SECONDS_MAX, unit="seconds")


def _ranges(row: dict[str, Any], blocks: int, where: str) -> tuple[tuple[int, int], ...]:
    ranges = row.get("hash_ranges")
    if not isinstance(ranges, list) or len(ranges) > RANGES_MAX or not all(map(_is_range, ranges)):
        raise TraceError(
            f"{where}: hash_ranges must be a list of up to {RANGES_MAX} [first block, count]"
        )
    covered = sum(count for _, count in ranges)
    if covered > blocks:
        raise TraceError(f"{where}: hash_ranges name {covered} blocks; the prompt has {blocks}")
    return tuple((first, count) for first, count in ranges)


def _is_range(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int for number in value)
        and 0 <= value[0] <= BLOCK_ID_MAX
        and 1 <= value[1] <= TOKENS_MAX
    )
