"""Tables as text that a person and a page both read."""

import math
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; all columns but the first are numbers."""
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def seconds(value: float) -> str:
    """Three digits of seconds, or a dash."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(value: float) -> str:
    """A ratio, or a dash."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def share(value: float) -> str:
    """A part of one as a percentage, or a dash."""
    return "–" if math.isnan(value) else f"{value:.1%}"


def mark(is_met: bool) -> str:
    """Whether a target is met; a miss has to be seen."""
    return "hit" if is_met else "**miss**"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
