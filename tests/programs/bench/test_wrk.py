import orjson
import pytest

from tests.programs.bench.request_bodies import request_body
from tests.programs.bench.wrk import NoReport, command, parse, program, script

SAID = """Running 3s test @ http://127.0.0.1:8000/v1/chat/completions
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     5.94ms   10.90ms 210.35ms   97.84%
    Req/Sec    13.65k     2.48k   18.28k    76.67%
  Latency Distribution
     50%  850.00us
     75%    5.70ms
     90%    8.08ms
     99%    1.20s
  29401 requests in 3.05s, 13.01MB read
Requests/sec:   9639.67
Transfer/sec:      4.27MB
"""


def test_a_report_is_read():
    report = parse(SAID)
    assert (report.answered, report.seconds, report.failed) == (29401, 3.05, 0)
    assert (report.latency_p50_ms, report.latency_p99_ms) == (0.85, 1200.0)


def test_what_failed_is_not_counted_as_answered():
    broken = "  Socket errors: connect 1, read 2, write 3, timeout 4\n"
    report = parse(SAID + broken + "  Non-2xx or 3xx responses: 401\n")
    assert (report.answered, report.failed) == (29000, 411)


@pytest.mark.parametrize("output", ["", "unable to connect to 127.0.0.1:1 Connection refused\n"])
def test_anything_else_is_no_report(output):
    with pytest.raises(NoReport, match="no report"):
        parse(output)


def test_the_script_numbers_prompts_and_keeps_json_as_it_is():
    asked = request_body(50, 32, 5)
    text = script(asked, 3_000_000)
    assert "local number = 3000000" in text
    assert '"%012d"' in text
    assert f"[==[{asked.before}]==], [==[{asked.after}]==]" in text
    orjson.loads(asked.before + "000003000001" + asked.after)


def test_the_command_names_the_script_and_the_load(tmp_path):
    words = command("http://h:1", tmp_path / "s.lua", streams=64, seconds=3.0)
    assert words[0] == "wrk"
    assert words[-1] == "http://h:1/v1/chat/completions"
    assert {"64", "3s", str(tmp_path / "s.lua")} <= set(words)


def test_a_missing_program_is_known_to_be_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert program() is None
