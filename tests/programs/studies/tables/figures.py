"""Numbers read from results, and how they are put together. Higher ratios are better, always."""

import math
from collections.abc import Callable, Iterable

from tests.programs.studies.tables.result_files import Result

Figure = Callable[[Result], float]


def ttft(point: str) -> Figure:
    """Seconds to the first token: mean, p50, p90 or p99."""
    return lambda result: _known(result["ttft_s"][point])


def e2e(point: str) -> Figure:
    """Seconds to the last token."""
    return lambda result: _known(result["e2e_s"][point])


def throughput(result: Result) -> float:
    """Output tokens a second."""
    return float(result["throughput"])


def hit_ratio(result: Result) -> float:
    """Part of all prompt tokens that engines had cached."""
    return _known(result["cached_token_ratio"])


def lost_ratio(result: Result) -> float:
    """Part of all requests that were shed or failed."""
    return (result["shed"] + result["failed"]) / result["requests"]


def unfairness(result: Result) -> float:
    """Mean TTFT of the slowest region over that of the quickest; 1 is fair."""
    means = [_known(figures["ttft_s"]["mean"]) for figures in result["regions"].values()]
    known = [mean for mean in means if mean == mean]
    return max(known) / min(known) if known else math.nan


def mean_of(figure: Figure, results: Iterable[Result]) -> float:
    """Over repetitions with other seeds."""
    values = [figure(result) for result in results]
    return sum(values) / len(values) if values else math.nan


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of those that are known; nan if none is."""
    logs = [math.log(value) for value in values if value > 0.0 and value < math.inf]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _known(value: float | None) -> float:
    return math.nan if value is None else value
