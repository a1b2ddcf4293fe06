"""What a test run plays: Poisson arrivals, a trace's lines, and the limits of both."""

import itertools
import random
from pathlib import Path
from statistics import median

import orjson
import pytest

from agents.profiler.load import (
    LINE_BYTES_MAX,
    LONGEST,
    REQUESTS_MAX,
    Lengths,
    TraceInvalid,
    poisson,
    read_trace,
)

SHORT = Lengths(prompt_tokens=200, output_tokens=50)


def test_poisson_arrivals_have_the_rate_and_the_medians():
    found = poisson(random.Random(3), 20.0, 500.0, SHORT, 100_000)
    assert len(found) == pytest.approx(10_000, rel=0.05)
    assert all(a.at_s <= b.at_s < 500.0 for a, b in itertools.pairwise(found))
    assert median(each.prompt_tokens for each in found) == pytest.approx(200, rel=0.05)
    assert median(each.output_tokens for each in found) == pytest.approx(50, rel=0.05)
    assert max(each.prompt_tokens for each in found) <= LONGEST * 200


def test_the_same_seed_gives_the_same_arrivals():
    first, second = (poisson(random.Random(3), 2.0, 30.0, SHORT, 4096) for _ in range(2))
    assert first == second != poisson(random.Random(4), 2.0, 30.0, SHORT, 4096)


def test_there_is_a_limit_of_arrivals():
    assert len(poisson(random.Random(1), 1e6, 1.0, SHORT, 4096)) == REQUESTS_MAX


@pytest.mark.parametrize("context", [2, 3, 50, 1000])
def test_every_request_fits_the_context(context):
    dice = random.Random(5)
    for _ in range(200):
        prompt, output = SHORT.draw(dice, context)
        assert prompt >= 1 and output >= 1 and prompt + output <= context


def line(**fields: object) -> bytes:
    row = {"timestamp": 5000, "input_length": 10, "output_length": 2, "hash_ids": [1]}
    return orjson.dumps(row | fields) + b"\n"


def test_a_trace_is_read_in_order_of_time_and_begins_at_zero(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    later = line(timestamp=7500, input_length=30, output_length=0)
    trace.write_bytes(later + b"\n" + line())
    first, second = read_trace(trace)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 10, 2)
    assert (second.at_s, second.prompt_tokens, second.output_tokens) == (2.5, 30, 1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "holds no request"),
        (line() + b"nonsense\n", "line 2: "),
        (line(input_length=0), "line 1: input_length: must be at least 1"),
        (line(input_length="9"), "line 1: input_length: "),
        (line(timestamp=-1), "line 1: timestamp: must be at least 0"),
        (b'{"timestamp": 1}\n', "line 1: input_length"),
        (b"\xff\n", "line 1: "),
        (b" " * (LINE_BYTES_MAX + 1), "line 1: more than"),
        (line() * (REQUESTS_MAX + 1), f"more than {REQUESTS_MAX} requests"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, data: bytes, says: str):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(data)
    with pytest.raises(TraceInvalid) as refused:
        read_trace(trace)
    assert says in str(refused.value) and str(trace) in str(refused.value)


def test_a_trace_that_can_t_be_read(tmp_path: Path):
    with pytest.raises(TraceInvalid, match="can't be read: Is a directory"):
        read_trace(tmp_path)
