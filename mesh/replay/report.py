"""A run's report: the JSON file for scripts, two tables and some remarks for people.

A measure without a value is null in the file and a dash in the table, never zero. Output tokens
per second are over the whole run's duration, in every region too, so that regions add up.

Tables fit the terminal: text columns fold at their spaces; if that is not enough, columns marked
as extra are left out, the last first, and a line names them. A number is never cut. Where the
output is no terminal nothing is folded or left out.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from mesh.replay.tally import PERCENTILES, GroupTally, RequestOutcome, RunTally

LATE_ALWAYS_FINE_S = 0.02
LATE_SHARE_OF_TTFT = 0.1
SHOWN_MIN_S = 0.0001  # shorter times are shown as less than this
PROMPT_RATIO_FINE = (0.8, 1.25)
PLAIN_COLUMNS = 10_000  # where the output is no terminal
COUNTS = ("requests", *(outcome.value for outcome in RequestOutcome))
POINTS = ("mean", *PERCENTILES)
_MEASURES = {"TTFT": "ttft_s", "end-to-end": "e2e_s", "inter-token": "itl_s"}

RunReport = dict[str, Any]


def build_report(tally: RunTally, duration_s: float, facts: Mapping[str, object]) -> RunReport:
    """The out file's content. `facts`: how the run was set up, kept beside the results."""
    # vLLM leaves cached_tokens out where it is 0: once any answer named it, a missing one means 0.
    names_cached = tally.total.tokens.cached_named > 0
    regions = {
        region: _figures(group, duration_s, names_cached) for region, group in tally.regions.items()
    }
    total = _figures(tally.total, duration_s, names_cached)
    return {**total, "regions": regions, "duration_s": duration_s, **facts}


def _figures(tally: GroupTally, duration_s: float, names_cached: bool) -> RunReport:
    tokens = tally.tokens
    known = tokens.answers > 0
    return {
        "requests": tally.requests,
        **{outcome.value: tally.outcomes[outcome] for outcome in RequestOutcome},
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


def write_report(path: Path, report: RunReport) -> None:
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


def print_report(report: RunReport, console: Console) -> None:
    """Both tables, then remarks."""
    name = Column("region", is_text=True)
    counts, times = [], []
    for region, figures in {"all": report, **report["regions"]}.items():
        rate, cached = figures["output_tokens_per_s"], figures["cached_token_ratio"]
        numbers = (str(figures[key]) for key in COUNTS)
        counts.append((region, *numbers, or_dash(rate, "{:.1f}"), or_dash(cached, "{:.1%}")))
        for label, key in _MEASURES.items():  # each region is named once
            shown = region if label == "TTFT" else ""
            times.append((shown, label, *map(readable_time, figures[key].values())))
    extra = Column("output tok/s", is_extra=True)
    print_table((name, *map(Column, COUNTS), extra, Column("cached")), counts, console)
    points = (Column(point, is_extra=point == "p50") for point in POINTS)
    print_table((name, Column("time", is_text=True), *points), times, console)
    for remark in remarks(report):
        print_line(remark, console)


def or_dash(value: float | None, form: str) -> str:
    """The value in that format, or a dash."""
    return "-" if value is None else form.format(value)


def readable_time(seconds: float | None) -> str:
    """Milliseconds below a second, seconds above, or a dash."""
    if seconds is None:
        return "-"
    if seconds < SHOWN_MIN_S:
        return f"<{SHOWN_MIN_S * 1000:g} ms"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def remarks(report: RunReport) -> Iterator[str]:
    """What a reader must know before believing the tables."""
    if report["failures"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report["failures"].items())
        yield f"failed: {reasons}"
    late_s, ttft_s = report["late_s"]["p99"], report["ttft_s"]["p50"] or 0.0
    if late_s is not None and late_s > max(LATE_ALWAYS_FINE_S, LATE_SHARE_OF_TTFT * ttft_s):
        yield (
            f"warning: requests left late, p99 {readable_time(late_s)}: this process was short of "
            "CPU, so the load was smoother than the trace; use a lower --speed or a freer machine"
        )
    itl_s = report["itl_s"]["p50"]
    if itl_s is not None and itl_s < SHOWN_MIN_S:
        yield (
            "note: most tokens arrived together with the one before, so the median inter-token "
            "time is next to nothing; the mean is the pace"
        )
    asked, reported = report["prompt_tokens"]["asked"], report["prompt_tokens"]["reported"]
    low, high = PROMPT_RATIO_FINE
    if asked and reported and not low <= reported / asked <= high:
        yield (
            f"note: prompts had {reported / asked:.2f} times the trace's tokens by the engines' "
            "count; divide --bytes-per-token by that"
        )


class Column(NamedTuple):
    """One column of a table. `is_text`: it may fold. `is_extra`: it may be left out."""

    head: str
    is_text: bool = False
    is_extra: bool = False


def table_console() -> Console:
    """Where tables are printed: as wide as the terminal, and plain where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS, color_system=None)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console) -> None:
    """The rows under their heads, and a line that names columns that were left out."""
    kept, dropped = list(columns), list[str]()
    unbounded = console.options.update_width(PLAIN_COLUMNS)
    while True:
        places = [columns.index(column) for column in kept]
        table = _table(kept, [[row[place] for place in places] for row in rows], console)
        fits = Measurement.get(console, unbounded, table).minimum <= console.width
        extra = next((column for column in reversed(kept) if column.is_extra), None)
        if fits or extra is None:
            break
        kept.remove(extra)
        dropped.insert(0, extra.head)
    console.print(table)
    if dropped:
        print_line(f" (no room for {', '.join(dropped)} in {console.width} columns)", console)


def print_line(line: str, console: Console) -> None:
    """A line of prose, folded by the terminal."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console) -> Table:
    """Text columns fold down to their longest word, number columns not at all."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    for at, column in enumerate(columns):
        texts = [column.head, *(row[at] for row in rows)]
        parts = [word for text in texts for word in text.split()] if column.is_text else texts
        least = max(map(cell_len, parts))
        table.add_column(
            column.head,
            justify="left" if column.is_text else "right",
            no_wrap=least == max(map(cell_len, texts)),
            overflow="fold",
            min_width=least,
        )
    for row in rows:
        table.add_row(*row)
    return table
