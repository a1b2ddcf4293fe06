import math
from pathlib import Path

import orjson

from tests.programs.bench.aiperf import command, parse
from tests.programs.bench.cells import CELLS, Client
from tests.programs.bench.systems.system import System

[CELL] = [cell for cell in CELLS if cell.client is Client.AIPERF]


def test_an_export_is_read():
    figures = {"p50": 6.5, "p99": 9.5, "avg": 7.0}
    export = {
        "request_throughput": {"avg": 21.0},
        "request_count": {"avg": 512.0},
        "time_to_first_token": figures,
        "inter_chunk_latency": {"p50": 5.0, "p99": 8.0},
    }
    assert parse(orjson.dumps(export), 515) == {
        "answered": 512.0,
        "failed": 3.0,
        "requests_per_s": 21.0,
        "ttft_p50_ms": 6.5,
        "ttft_p99_ms": 9.5,
        "gap_p50_ms": 5.0,
        "gap_p99_ms": 8.0,
    }


def test_what_an_export_lacks_is_not_zero():
    found = parse(b'{"request_count": null}', 512)
    assert math.isnan(found["answered"])
    assert math.isnan(found["ttft_p50_ms"])


def test_the_command_sends_each_address_the_cell_s_requests():
    system = System("direct", ("http://h:1", "http://h:2"), "")
    words = command(Path("bin"), Path("tokenizer"), CELL, system, Path("out"))
    assert [words[at + 1] for at, word in enumerate(words) if word == "--url"] == list(system.urls)
    assert words[words.index("--request-count") + 1] == str(CELL.streams * CELL.each)
    assert f"seed:{CELL.gap_ms}" in words
