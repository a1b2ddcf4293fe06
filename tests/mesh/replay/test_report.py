"""From tallies to figures: no value is null, regions add up, remarks when they matter."""

import io
import random
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from mesh.replay.report import build_report, print_report, remarks, write_report
from mesh.replay.tally import RecordedUsage, RequestOutcome, RequestResult, RunTally

NOTHING = {"mean": None, "p50": None, "p90": None, "p99": None}


def ledger_of(*rows: tuple[str, RequestResult]) -> RunTally:
    ledger = RunTally(("us", "eu"), random.Random(0))
    for region, answer in rows:
        ledger.add(region, answer, prompt_tokens_asked=100)
    return ledger


def ok(cached: int | None, late_s: float = 0.001) -> RequestResult:
    usage = RecordedUsage(prompt_tokens=100, output_tokens=10, cached_tokens=cached)
    return RequestResult(RequestOutcome.OK, "", late_s, 0.2, 0.5, (0.1, 0.2), usage)


SHED = RequestResult(RequestOutcome.SHED, "status_429", 0.001)
FAILED = RequestResult(RequestOutcome.FAILED, "timeout", 0.001)


def test_figures_count_and_add_up() -> None:
    report = build_report(
        ledger_of(("us", ok(80)), ("us", SHED), ("eu", ok(0)), ("eu", FAILED)), 2.0, {}
    )
    assert [report[key] for key in ("requests", "ok", "shed", "failed")] == [4, 2, 1, 1]
    assert report["output_tokens_per_s"] == 10.0
    assert report["cached_token_ratio"] == 0.4
    assert report["failures"] == {"timeout": 1}
    us, eu = report["regions"]["us"], report["regions"]["eu"]
    assert us["output_tokens_per_s"] + eu["output_tokens_per_s"] == 10.0
    assert (us["cached_token_ratio"], eu["cached_token_ratio"]) == (0.8, 0.0)
    assert us["itl_s"]["mean"] == pytest.approx(0.15)


def test_times_of_refused_and_failed_requests_do_not_count() -> None:
    report = build_report(ledger_of(("us", SHED), ("us", FAILED)), 1.0, {})
    assert report["ttft_s"] == report["e2e_s"] == report["itl_s"] == NOTHING
    assert report["output_tokens_per_s"] is None
    assert report["cached_token_ratio"] is None


@pytest.mark.parametrize(
    ("cached", "ratio"),
    [
        ((None, None), None),  # an engine that never reports it
        ((80, None), 0.4),  # one that leaves the field out where it is 0
        ((0, 0), 0.0),
    ],
)
def test_silence_about_cached_tokens(cached: tuple[int | None, ...], ratio: float | None) -> None:
    report = build_report(ledger_of(*(("us", ok(tokens)) for tokens in cached)), 1.0, {})
    assert report["cached_token_ratio"] == ratio


def test_remarks_only_when_they_matter() -> None:
    fine = build_report(ledger_of(("us", ok(0))), 1.0, {})
    assert list(remarks(fine)) == []
    late = build_report(ledger_of(("us", ok(0, late_s=0.5)), ("us", FAILED)), 1.0, {})
    failed, warning = remarks(late)
    assert failed == "failed: timeout 1"
    assert warning.startswith("warning: requests left late, p99 495.0 ms")
    long = RunTally(("us",), random.Random(0))
    long.add("us", ok(0), prompt_tokens_asked=50)
    assert "2.00 times" in next(remarks(build_report(long, 1.0, {})))


def test_tokens_that_arrive_together_are_explained_instead_of_looking_broken() -> None:
    usage = RecordedUsage(prompt_tokens=100, output_tokens=5, cached_tokens=0)
    together = RequestResult(
        RequestOutcome.OK, "", 0.001, 0.2, 0.5, (0.2, 0.00004, 0.0, 0.00002, 0.0), usage
    )
    report = build_report(ledger_of(("us", together)), 1.0, {})
    assert next(remarks(report)).startswith("note: most tokens arrived together")
    console = Console(file=io.StringIO(), width=100)
    print_report(report, console)
    [inter_token, *_] = [
        line.split() for line in console.file.getvalue().splitlines() if "inter-token" in line
    ]
    assert inter_token == ["inter-token", "40.0", "ms", "<0.1", "ms", *inter_token[5:]]


def test_the_plain_table_has_every_group_and_a_dash_for_nothing() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(build_report(ledger_of(("us", ok(80))), 1.0, {}), console)
    rows = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert ["us", "1", "1", "0", "0", "10.0", "80.0%"] in rows
    assert ["eu", "0", "0", "0", "0", "-", "-"] in rows
    assert ["us", "TTFT", *["200.0", "ms"] * 4] in rows
    assert all(line.isascii() for line in console.file.getvalue().splitlines())


def test_the_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_report(path, {"requests": 1})
    assert orjson.loads(path.read_bytes()) == {"requests": 1}
    with pytest.raises(TypeError):
        write_report(path, {"requests": object()})
    assert orjson.loads(path.read_bytes()) == {"requests": 1}
    assert list(tmp_path.iterdir()) == [path]
