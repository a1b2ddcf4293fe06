"""What a run came to: the JSON file for scripts, two tables and some remarks for people.

A measure without a value is null in the file and a dash in the table, never zero. Output tokens
per second is over the whole run's duration, in every region too, so that regions add up.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from mesh.replay.stats import PERCENTILES, Summary
from mesh.replay.tables import Column, print_table, say
from mesh.replay.tally import Ledger, Outcome, Tally

LATE_ALWAYS_FINE_S = 0.02
LATE_SHARE_OF_TTFT = 0.1
SHOWN_MIN_S = 0.0001  # what is less is no time that anyone waited
PROMPT_RATIO_FINE = (0.8, 1.25)
COUNTS = ("requests", *(outcome.value for outcome in Outcome))
POINTS = ("mean", *PERCENTILES)
_MEASURES = {"TTFT": "ttft_s", "end-to-end": "e2e_s", "inter-token": "itl_s"}

Report = dict[str, Any]


def build_report(ledger: Ledger, duration_s: float, facts: Mapping[str, object]) -> Report:
    """The out file's content. `facts`: how the run was set up, kept beside the results."""
    # vLLM leaves cached_tokens out where it is 0: once any answer named it, silence means 0.
    names_cached = ledger.total.tokens.cached_named > 0
    regions = {
        region: _figures(tally, duration_s, names_cached)
        for region, tally in ledger.regions.items()
    }
    total = _figures(ledger.total, duration_s, names_cached)
    return {**total, "regions": regions, "duration_s": duration_s, **facts}


def _figures(tally: Tally, duration_s: float, names_cached: bool) -> Report:
    tokens = tally.tokens
    known = tokens.answers > 0
    return {
        "requests": tally.requests,
        **{outcome.value: tally.outcomes[outcome] for outcome in Outcome},
        "ttft_s": tally.ttft_s.summary(),
        "e2e_s": tally.e2e_s.summary(),
        "itl_s": tally.itl_s.summary(),
        "output_tokens_per_s": tokens.output / duration_s if known and duration_s else None,
        "cached_token_ratio": (
            tokens.cached / tokens.prompt if names_cached and tokens.prompt else None
        ),
        "failures": dict(sorted(tally.failures.items())),
        "late_s": tally.late_s.summary(),
        "prompt_tokens": {
            "asked": tokens.prompt_asked if known else None,
            "reported": tokens.prompt if known else None,
        },
        "output_tokens": tokens.output if known else None,
    }


def write_report(path: Path, report: Report) -> None:
    """Write the file whole or not at all. Raises OSError."""
    write_whole(path, orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def print_report(report: Report, console: Console) -> None:
    """Both tables, then remarks; without colour or lines where the console is no terminal."""
    groups = {"all": report, **report["regions"]}
    _print_outcomes(groups, console)
    _print_latencies(groups, console)
    for remark in remarks(report):
        say(remark, console)


def _print_outcomes(groups: Mapping[str, Report], console: Console) -> None:
    rows = []
    for name, figures in groups.items():
        counts = [str(figures[key]) for key in COUNTS]
        rate, cached = figures["output_tokens_per_s"], figures["cached_token_ratio"]
        rows.append((name, *counts, known(rate, "{:.1f}"), known(cached, "{:.1%}")))
    numbers = (*map(Column, COUNTS), Column("output tok/s", is_extra=True), Column("cached"))
    print_table((Column("region", is_text=True), *numbers), rows, console)


def _print_latencies(groups: Mapping[str, Report], console: Console) -> None:
    rows = []
    for name, figures in groups.items():
        for label, key in _MEASURES.items():
            summary: Summary = figures[key]
            rows.append((name, label, *map(seconds, summary.values())))
            name = ""  # each region is named once
    columns = (
        *(Column("region", is_text=True), Column("time", is_text=True)),
        *(Column(point, is_extra=point == "p50") for point in POINTS),
    )
    print_table(columns, rows, console)


def known(value: float | None, form: str) -> str:
    """The value in that form, or a dash."""
    return "-" if value is None else form.format(value)


def seconds(value: float | None) -> str:
    """Seconds as people read them, or a dash."""
    if value is None:
        return "-"
    if value < SHOWN_MIN_S:
        return f"<{SHOWN_MIN_S * 1000:g} ms"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def remarks(report: Report) -> Iterator[str]:
    """What a reader must know before believing the tables."""
    if report["failures"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report["failures"].items())
        yield f"failed: {reasons}"
    late_s, ttft_s = report["late_s"]["p99"], report["ttft_s"]["p50"] or 0.0
    if late_s is not None and late_s > max(LATE_ALWAYS_FINE_S, LATE_SHARE_OF_TTFT * ttft_s):
        yield (
            f"warning: requests left late, p99 {seconds(late_s)}: this process was short of CPU, "
            "so the load was smoother than the trace; use a lower --speed or a freer machine"
        )
    itl_s = report["itl_s"]["p50"]
    if itl_s is not None and itl_s < SHOWN_MIN_S:
        yield (
            "note: most tokens arrived together with the one before, so the median inter-token "
            "time is next to nothing; the mean is the pace"
        )
    yield from _calibration(report["prompt_tokens"]["asked"], report["prompt_tokens"]["reported"])


def _calibration(asked: int | None, reported: int | None) -> Iterator[str]:
    if not asked or not reported:
        return
    low, high = PROMPT_RATIO_FINE
    if not low <= reported / asked <= high:
        yield (
            f"note: prompts had {reported / asked:.2f} times the trace's tokens by the engines' "
            "count; divide --bytes-per-token by that"
        )
