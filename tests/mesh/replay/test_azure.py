"""Azure's rows in, requests without prefixes out."""

from pathlib import Path

import pytest

from mesh.replay.trace import TraceError, TraceRequest
from mesh.replay.trace_formats import load_trace, parse_azure

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = b"2023-11-16 18:15:46.6805900,374,44\n"


def test_the_recorded_rows_read_whole() -> None:
    trace = load_trace(Path("tests/data/azure/conv_first60.csv"), "azure")
    first, second = trace.requests[:2]
    assert len(trace.requests) == 60
    assert (first.input_tokens, first.output_tokens, first.blocks) == (374, 44, ())
    assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-5)


def test_rows_come_in_order_of_time_and_offsets_count() -> None:
    later = b"2023-11-16 19:15:47+01:00,7,1\n"
    trace = parse_azure([HEADER, later, ROW, b"\n"])
    assert [request.input_tokens for request in trace.requests] == [374, 7]
    assert trace.requests[1].at_s - trace.requests[0].at_s == pytest.approx(0.31941, abs=1e-5)


def test_columns_are_found_by_name() -> None:
    trace = parse_azure(
        [b"GeneratedTokens,x,ContextTokens,TIMESTAMP\n", b"3,,5,1970-01-01 00:00:01\n"]
    )
    assert trace.requests == (TraceRequest(1.0, 5, 3),)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"2023-11-16 18:15:46,374\n", "2 fields are fewer"),
        (b"yesterday,374,44\n", "TIMESTAMP must be like .*'yesterday'"),
        (b"2023-11-16 18:15:46,0,44\n", "ContextTokens must be a whole number from 1"),
        (b"2023-11-16 18:15:46,1e3,44\n", "ContextTokens"),
        (b"2023-11-16 18:15:46,12,-1\n", "GeneratedTokens must be a whole number from 0"),
        (b"2023-11-16 18:15:46,12,99999999999\n", "GeneratedTokens"),
        (b"x" * 2000, "2000 bytes"),
        (b'2023-11-16 18:15:46,"12,1\n', "not CSV"),
    ],
)
def test_a_damaged_row_is_named(bad: bytes, problem: str) -> None:
    with pytest.raises(TraceError, match=f"line 3: .*{problem}"):
        parse_azure([HEADER, ROW, bad])


def test_a_file_without_its_header_is_an_error_that_names_it() -> None:
    with pytest.raises(TraceError, match="line 1: the header lacks TIMESTAMP"):
        parse_azure([ROW])
    with pytest.raises(TraceError, match="the header lacks TIMESTAMP"):
        parse_azure([])
    with pytest.raises(TraceError, match="holds no request"):
        parse_azure([HEADER])
