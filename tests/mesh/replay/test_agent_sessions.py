"""Sessions in, turns out, with the client's own time between them."""

from pathlib import Path

import orjson
import pytest

from mesh.replay.trace import TraceError
from mesh.replay.trace_formats import Turn, parse_kv_cache_tester, read_lines

RECORDED = Path("tests/data/kv-cache-tester/four_sessions.jsonl")
TURN = {"t": 0.0, "sub": 0, "in": 130, "out": 5, "api": 2.0, "think": 0.0, "hash_ranges": [[1, 2]]}


def line(*turns: dict[str, object], **changes: object) -> bytes:
    rows = [TURN | turn for turn in turns]
    return orjson.dumps({"id": "a", "block_size": 64, "requests": rows} | changes)


def test_a_line_becomes_a_session() -> None:
    (session,) = parse_kv_cache_tester([line({}, {"t": 9.0, "think": 7.0})])
    assert (session.name, session.block_tokens) == ("a", 64)
    assert session.turns == (
        Turn(0.0, 0.0, 0, 130, 5, ((1, 2),)),
        Turn(9.0, 7.0, 0, 130, 5, ((1, 2),)),
    )


def test_think_time_that_was_not_recorded_is_what_the_answer_before_left() -> None:
    rows = ({}, {"t": 9.0, "think": None}, {"t": 10.0, "think": None, "api": None})
    (session,) = parse_kv_cache_tester([line(*rows)])
    assert [turn.think_s for turn in session.turns] == [0.0, 7.0, 0.0]


def test_a_sub_agent_begins_after_the_main_agents_last_answer() -> None:
    rows = ({}, {"t": 9.0, "think": 7.0, "api": 1.0}, {"t": 12.5, "sub": 1}, {"t": 20.0, "sub": 1})
    (session,) = parse_kv_cache_tester([line(*rows)])
    assert [turn.think_s for turn in session.turns] == [0.0, 7.0, 2.5, 0.0]


def test_the_recorded_sessions_read_whole() -> None:
    sessions = read_lines(RECORDED, parse_kv_cache_tester)
    assert [len(session.turns) for session in sessions] == [3, 3, 4, 32]
    assert {turn.thread for turn in sessions[3].turns} == {0, 1, 2}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"{", "not a JSON object"),
        (line({}, block_size=0), "block_size"),
        (line(), "requests must have at least 1"),
        (line({}, requests=[3]), "requests.0 must be an object"),
        (line({}, id=7), "id must be a text"),
        (line({"t": -1}), "requests.0.t must be at least 0"),
        (line({"t": 5.0}, {"t": 4.0}), "request 2: t runs backwards"),
        (line({"api": "x"}), "api must be a number"),
        (line({"think": -3}), "think must be at least 0"),
        (line({"sub": None}), "sub must be a whole number"),
        (line({"in": 0}), "in must be at least 1"),
        (line({"hash_ranges": [[1]]}), "hash_ranges.0.1 Field required"),
        (line({"hash_ranges": [[1, 0]]}), "hash_ranges.0.1 must be at least 1"),
        (line({"hash_ranges": [[1, 3]]}), "hash_ranges name 3 blocks; the prompt has 2"),
    ],
)
def test_a_damaged_session_is_named(bad: bytes, problem: str) -> None:
    with pytest.raises(TraceError, match=f"line 2.*{problem}"):
        parse_kv_cache_tester([line({}), bad])
