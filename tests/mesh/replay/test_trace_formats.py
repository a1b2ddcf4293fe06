"""Mooncake lines in, requests out; every damaged line named."""

from pathlib import Path

import orjson
import pytest

from mesh.replay.trace import Trace, TraceError, TraceRequest
from mesh.replay.trace_formats import load_trace, parse_mooncake

GOOD = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
RECORDED = Path("tests/data/mooncake/conversation_first60.jsonl")


def line(**changes: object) -> bytes:
    return orjson.dumps(GOOD | changes)


def test_a_line_becomes_a_request() -> None:
    assert parse_mooncake([line()]) == Trace(512, (TraceRequest(27.482, 600, 52, (46, 47)),))


def test_the_recorded_trace_reads_whole() -> None:
    trace = load_trace(RECORDED, "mooncake")
    assert len(trace.requests) == 60
    assert trace.requests[0].input_tokens == 6758
    assert all(request.blocks[0] == 0 for request in trace.requests)


def test_requests_come_in_order_of_time_and_empty_lines_are_none() -> None:
    trace = parse_mooncake([line(timestamp=5), b"\n", line(timestamp=1), line(timestamp=3)])
    assert [request.at_s for request in trace.requests] == [0.001, 0.003, 0.005]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b'{"timestamp": 1,', "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (line(timestamp=None), "timestamp"),
        (line(timestamp="3"), "timestamp"),
        (line(timestamp=True), "timestamp"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp=1e300), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(input_length=1.5), "input_length"),
        (line(input_length=10**9), "input_length"),
        (line(output_length=-1), "output_length"),
        (line(output_length=True), "output_length"),
        (line(hash_ids=7), "hash_ids"),
        (line(hash_ids=[1, "2"]), "hash_ids"),
        (line(hash_ids=[1, -2]), "hash_ids"),
        (line(hash_ids=[1, 2, 3]), "512"),
    ],
)
def test_a_damaged_line_is_named(bad: bytes, problem: str) -> None:
    with pytest.raises(TraceError, match=f"line 3: .*{problem}"):
        parse_mooncake([line(), line(), bad])
