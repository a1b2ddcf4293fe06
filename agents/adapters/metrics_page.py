"""Reading a few numbers off a Prometheus text page, quickly.

An agent scrapes its engine ten to twenty times a second and a real page has hundreds of histogram
lines, so only required names are searched for; the rest is never parsed. prometheus_client's parser
takes 1.5 ms instead of 36 µs for a 10 KB page of SGLang, a third of a core for twelve busy agents.

A name is matched whole: `x_total` has neighbours `x_created` that hold a time, not a count.
Format: Prometheus text exposition 0.0.4.
"""

import math
import re
from dataclasses import dataclass

SERIES_MAX = 4096  # label sets of one name; more is no engine's page

_LINE = re.compile(r'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+([^ \t]+)')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a metric. Labels stay text until one is read."""

    labels_text: str
    value: float

    def label(self, name: str) -> str | None:
        """The value of one label, escapes left as they are."""
        for found in _LABEL.finditer(self.labels_text):
            if found[1] == name:
                return found[2]
        return None


class MetricsPage:
    """One metrics page."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = "\n" + text

    def series(self, name: str) -> list[Series]:
        """All lines of that exact metric; none if the page lacks it. NaN and Inf are left out."""
        found: list[Series] = []
        start = "\n" + name
        at = self._text.find(start)
        while at >= 0 and len(found) < SERIES_MAX:
            rest = at + len(start)
            end = self._text.find("\n", rest)
            line = self._text[rest : end if end >= 0 else len(self._text)]
            parsed = _parsed(line)
            if parsed is not None:
                found.append(parsed)
            at = self._text.find(start, rest)
        return found

    def total(self, name: str) -> float | None:
        """The sum over all label sets (engines, ranks) of one name, or None if it is missing."""
        values = [series.value for series in self.series(name)]
        return sum(values) if values else None

    def count(self, name: str) -> int | None:
        """`total` as a number of things; None if missing or negative."""
        value = self.total(name)
        return None if value is None or value < 0 else round(value)

    def totals(self, *names: str) -> tuple[float, ...]:
        """`total` of each of these that the page has, in this order."""
        totals = (self.total(name) for name in names)
        return tuple(total for total in totals if total is not None)

    def mean(self, name: str) -> float | None:
        """The mean over all label sets, or None if the page lacks the name."""
        values = [series.value for series in self.series(name)]
        return sum(values) / len(values) if values else None

    def ratio(self, name: str) -> float | None:
        """`mean` of a share, held inside 0..1: engines round beyond it."""
        value = self.mean(name)
        return None if value is None else min(1.0, max(0.0, value))

    def share(self, part: str, whole: str) -> float | None:
        """One counter as a share of another; None if either is missing or nothing was counted."""
        counted, of = self.total(part), self.total(whole)
        if counted is None or not of:
            return None
        return min(1.0, max(0.0, counted / of))


def _parsed(line: str) -> Series | None:
    found = _LINE.match(line)
    if found is None:
        return None
    try:
        value = float(found[2])
    except ValueError:
        return None
    return Series(found[1] or "", value) if math.isfinite(value) else None
