"""A study as pictures: SVG files whose texts stay texts.

- `ttft-cdf…`: the distribution of the time to first token; a line for each policy.
- `throughput…`, `ttft-by-load`: by number of replicas, or by load; only in a sweep.
- `regions…`: requests a second over the run, by the clients' region and by the region that
  answered. The difference was forwarded.

Lines differ in colour (Okabe and Ito's eight, which colour-blind readers tell apart) and in dashes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mesh.sim.study.cells import CellResult, labels
from schemas.ids import RegionId

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv<>P"
SIZE_INCHES = (7.0, 4.2)
NOTE_CHARS = 105  # of a note's line, below a picture of that width
LOST_NAMED = 8
STYLE: Any = {  # matplotlib types the key of every setting there is
    "svg.fonttype": "none",
    "svg.hashsalt": "mesh",  # the same study gives the same bytes
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
Group = tuple[tuple[tuple[str, int], ...], float | None]


def draw(folder: Path, study: Mapping[str, CellResult]) -> list[Path]:
    """Write all pictures that this study has data for. Raises OSError."""
    folder.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        figures = dict(_figures(study))
        for name, figure in figures.items():
            figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")
    return [folder / name for name in figures]


def _figures(study: Mapping[str, CellResult]) -> Iterator[tuple[str, Figure]]:
    groups: dict[Group, list[CellResult]] = {}
    for played in study.values():
        fleet = tuple(played.cell.replicas.items())
        groups.setdefault((fleet, played.cell.load), []).append(played)
    suffixes = _suffixes(list(groups))
    for suffix, runs in zip(suffixes, groups.values(), strict=True):
        named = dict(zip(labels([played.cell for played in runs]), runs, strict=True))
        yield f"ttft-cdf{suffix}.svg", ttft_cdf(named)
    runs = list(study.values())
    if len({played.cell.total for played in runs}) > 1:
        yield "throughput.svg", throughput(runs)
    if len({played.cell.load for played in runs}) > 1:
        yield "ttft-by-load.svg", ttft_by_load(runs)
    for name, played in study.items():
        suffix = "" if len(study) == 1 else f"-{slug(name)}"
        yield f"regions{suffix}.svg", regions_over_time(name, played)


def ttft_cdf(runs: Mapping[str, CellResult]) -> Figure:
    """The distribution of the time to the first token, a line for each run.

    The line of a run that lost requests ends at the share that was answered, with a note.
    """
    figure, axes = _canvas()
    lost: dict[str, float] = {}
    for (name, played), style in zip(runs.items(), _line_styles(), strict=False):
        times = played.curves.ttft_curve_s()
        answered = 100 * played.curves.ttft_s.count / max(1, played.report["requests"])
        lost |= {name: 100 - answered} if answered < 100 else {}
        shares = [answered * place / max(1, len(times) - 1) for place in range(len(times))]
        axes.plot(times, shares, label=name, gid=f"ttft {name}", **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(
        xlabel="time to first token (s, logarithmic)",
        ylabel="requests that have their first token (%)",
        ylim=(0, 100),
    )
    if lost:
        figure.supxlabel(_lost_note(lost), x=0.01, ha="left", fontsize=8, gid="lost")
    return _finished(figure, axes, "Time to first token")


def _lost_note(lost: Mapping[str, float]) -> str:
    named = [f"{name} {percent:.2g}%" for name, percent in lost.items()]
    shown = ", ".join(named[:LOST_NAMED]) + (", …" if len(named) > LOST_NAMED else "")
    return fill(
        f"Not in the curves: requests that were shed or failed ({shown}). A curve ends at the "
        "share of all requests that was answered.",
        NOTE_CHARS,
    )


def throughput(runs: Sequence[CellResult]) -> Figure:
    """Output tokens a second against the number of replicas."""
    figure, axes = _canvas()
    kinds = labels([replace(played.cell, replicas={}) for played in runs])
    points = [(played.cell.total, played.report["output_tokens_per_s"]) for played in runs]
    _lines(axes, kinds, points)
    axes.set(xlabel="replicas of all regions", ylabel="output tokens per second")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finished(figure, axes, "Throughput by number of replicas")


def ttft_by_load(runs: Sequence[CellResult]) -> Figure:
    """The 90th percentile of the time to the first token against load."""
    figure, axes = _canvas()
    kinds = labels([replace(played.cell, load=None) for played in runs])
    points = [(played.cell.load, played.report["ttft_s"]["p90"]) for played in runs]
    _lines(axes, kinds, points)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(
        xlabel="load (1: the fleet's whole capacity)",
        ylabel="time to first token, p90 (s, logarithmic)",
    )
    return _finished(figure, axes, "Time to first token by load")


def regions_over_time(name: str, played: CellResult) -> Figure:
    """Requests a second where clients are, and where they were answered."""
    figure = Figure(figsize=(SIZE_INCHES[0], 1.6 * SIZE_INCHES[1]), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, slices, title in (
        (upper, played.curves.sent, "asked, by the clients' region"),
        (lower, played.curves.answered, "answered, by the replicas' region (when complete)"),
    ):
        rates = smoothed(slices.rates_per_s())
        times = [place * slices.slice_s for place in range(len(next(iter(rates.values()), [])))]
        for (region, values), style in zip(rates.items(), _line_styles(), strict=False):
            axes.plot(times, values, label=region, gid=f"{title.split(',')[0]} {region}", **style)
        total = [sum(values) for values in zip(*rates.values(), strict=True)]
        axes.plot(times, total, color="#888888", lw=1, label="all", gid=title.split(",")[0])
        axes.set(title=f"{name}: {title}", ylabel="requests per second")
        axes.set_ylim(bottom=0)
    lower.set_xlabel("seconds since clients began, in the run's own time")
    upper.legend(loc="upper right", frameon=False, ncols=4)
    return figure


def smoothed(rates: Mapping[RegionId, list[float]]) -> dict[RegionId, list[float]]:
    """Each slice as the mean of those around it: about 64 independent ones remain."""
    return {name: _means(values, max(1, len(values) // 64)) for name, values in rates.items()}


def slug(name: str) -> str:
    """A run's name as part of a file's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _means(values: list[float], half: int) -> list[float]:
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _lines(
    axes: Axes, kinds: Sequence[str], points: Sequence[tuple[float | None, float | None]]
) -> None:
    """A line for each kind of run, through its points in order."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, (x, y) in zip(kinds, points, strict=True):
        if x is not None and y is not None:
            lines.setdefault(kind, []).append((x, y))
    for (kind, line), style, marker in zip(
        lines.items(), _line_styles(), cycle(MARKERS), strict=False
    ):
        xs, ys = zip(*sorted(line), strict=True)
        axes.plot(xs, ys, marker=marker, label=kind, gid=f"line {kind}", **style)


def _suffixes(groups: Sequence[Group]) -> list[str]:
    if len(groups) == 1:
        return [""]
    named = (
        "-".join(f"{region}{count}" for region, count in fleet)
        + ("" if load is None else f"-load{load:g}")
        for fleet, load in groups
    )
    return [f"-{slug(name)}" for name in named]


def _line_styles() -> Iterator[dict[str, Any]]:
    """Colours and dashes; the first forty differ."""
    for dash, colour in zip(cycle(DASHES), cycle(COLOURS), strict=False):
        yield {"color": colour, "ls": dash, "lw": 1.8}


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    return figure, figure.add_subplot()


def _finished(figure: Figure, axes: Axes, title: str) -> Figure:
    axes.set_title(title)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
