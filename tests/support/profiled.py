"""What a profiling run finds, where a test has its own way to play it."""

from collections.abc import Callable

from agents.core.latency_predictor import LatencyPredictor
from agents.core.slo_profile import Limits, OnlineLatency, SloProfile, search


def coefficients_of(predictor: LatencyPredictor) -> dict[str, tuple[float, ...]]:
    """The fields `computing` and `waiting` of a profile for a fitted predictor."""
    computing, waiting = predictor.coefficients
    return {"computing": computing, "waiting": waiting}


def largest_knob(
    play: Callable[[float], OnlineLatency], limits: Limits, values: tuple[float, ...]
) -> SloProfile:
    """What `search` finds with `play` for each run."""
    steps = search(limits, values)
    try:
        knob = next(steps)
        while True:
            knob = steps.send(play(knob))
    except StopIteration as end:
        return end.value
