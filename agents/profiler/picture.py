"""The search as an SVG file: against the budget, each measure as a share of its limit, and the
offline tokens that were computed a second.

Lines differ in colour (of Okabe and Ito's, which colour-blind readers tell apart) and in dashes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from agents.profiler.run import Found

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 80, 50, 110
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DASHES = ("none", "8 4", "2 3", "10 3 2 3")
OFFLINE_COLOUR = "#777777"
PERCENT_MAX = 300.0  # of a limit: a run that breaks it by more is drawn at the border
STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:15px}.grid{stroke:#ddd}"
    ".axis{stroke:#555}.limit{stroke:#c00;stroke-width:1.5}.line{fill:none;stroke-width:2}"
    ".chosen{stroke:#222;stroke-dasharray:3 3}"
)

Point = tuple[float, float]
Scale = Callable[[float], float]


def draw(found: Found) -> str:
    """The picture's text, of a search with one trial at least."""
    trials = sorted(found.trials, key=lambda trial: trial.budget_s)
    budgets = [trial.budget_s * 1000 for trial in trials]
    x = _logarithmic(budgets[0] / 1.1, budgets[-1] * 1.1)
    shares = {
        measure: [
            (at, min(PERCENT_MAX, 100 * trial.result.latency_s[measure] / limit))
            for at, trial in zip(budgets, trials, strict=True)
            if measure in trial.result.latency_s
        ]
        for measure, limit in found.limits.items()
    }
    highest = max([120.0, *[share for points in shares.values() for _, share in points]])
    rates = [trial.result.offline_tokens_per_s for trial in trials]
    percent_step, rate_step = _step(highest), _step(max([1.0, *rates]))
    y = _vertical(percent_step * math.ceil(highest / percent_step))
    y_rate = _vertical(rate_step * math.ceil(max([1.0, *rates]) / rate_step))
    parts = [
        *_frame(x, budgets),
        *_ticks(y, highest, percent_step, LEFT - 8, "end", "%"),
        *_ticks(y_rate, max([1.0, *rates]), rate_step, WIDTH - RIGHT + 8, "start", ""),
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(100):.1f}" '
        f'y2="{y(100):.1f}"/>',
    ]
    if found.profile is not None:
        at = x(found.profile.latency_budget_s * 1000)
        parts.append(
            f'<line class="chosen" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        chosen = f"budget {found.profile.latency_budget_s * 1000:.1f} ms"
        parts.append(_text(at, TOP - 6, chosen, "middle"))
    lines = [
        (f"{measure}, limit {found.limits[measure] * 1000:.1f} ms", points, colour, dash, y)
        for (measure, points), colour, dash in zip(shares.items(), COLOURS, DASHES, strict=False)
    ]
    offline = list(zip(budgets, rates, strict=True))
    lines.append(("offline tokens/s (right)", offline, OFFLINE_COLOUR, "none", y_rate))
    for row, (name, points, colour, dash, scale) in enumerate(lines):
        parts += _line([(x(at), scale(value)) for at, value in points], colour, dash)
        parts += _legend(row, name, colour, dash)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _frame(x: Scale, budgets: Sequence[float]) -> Iterator[str]:
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, 22, "Online latency and offline throughput by latency budget", kind="title")
    for at in (LEFT, WIDTH - RIGHT):
        yield f'<line class="axis" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    drawn = -math.inf
    for budget in budgets:
        if x(budget) - drawn > 48:  # a label's width
            drawn = x(budget)
            yield _text(drawn, bottom + 18, f"{budget:.3g}")
    yield _text(middle, bottom + 36, "latency budget of an iteration, ms (logarithmic)")
    yield _turned(16, "share of the limit")
    yield _turned(WIDTH - 12, "offline tokens per second")


def _ticks(
    y: Scale, highest: float, step: float, at: float, anchor: str, unit: str
) -> Iterator[str]:
    for number in range(math.ceil(highest / step) + 1):
        value = number * step
        if unit:
            yield (
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            )
        yield _text(at, y(value) + 4, f"{value:g}{unit}", anchor)


def _line(points: Sequence[Point], colour: str, dash: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield (f'<polyline class="line" points="{path}" stroke="{colour}" stroke-dasharray="{dash}"/>')
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def _legend(row: int, name: str, colour: str, dash: str) -> Iterator[str]:
    x, y = LEFT + 320 * (row % 2), HEIGHT - BOTTOM + 60 + 18 * (row // 2)
    yield (
        f'<line class="line" x1="{x}" x2="{x + 34}" y1="{y - 4}" y2="{y - 4}" '
        f'stroke="{colour}" stroke-dasharray="{dash}"/>'
    )
    yield _text(x + 42, y, name, "start")


def _text(x: float, y: float, says: str, anchor: str = "middle", kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(says)}</text>'


def _turned(x: float, says: str) -> str:
    y = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 {x:.0f} {y:.0f})">{escape(says)}</text>'
    )


def _logarithmic(low: float, high: float) -> Scale:
    width = (WIDTH - LEFT - RIGHT) / math.log(high / low)
    return lambda value: LEFT + width * math.log(value / low)


def _vertical(high: float) -> Scale:
    height = HEIGHT - TOP - BOTTOM
    return lambda value: HEIGHT - BOTTOM - height * value / high


def _step(highest: float) -> float:
    """Between two labels, so that there are five to ten of them."""
    power = 10.0 ** math.floor(math.log10(highest))
    return power * (0.2 if highest <= 2 * power else 0.5 if highest <= 5 * power else 1.0)
