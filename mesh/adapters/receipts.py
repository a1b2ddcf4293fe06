"""A decision's receipt as span attributes and as one log line.

The candidates are on a span twice: all of them as JSON, and the chosen one and its runner-up as
plain numbers, because traces are searched and plotted by attributes and not by what is inside them.
"""

from collections.abc import Iterator
from dataclasses import replace

import orjson

from schemas.decision import Candidate, Decision, rounded

CANDIDATES_MAX = 16  # on a span; the rest is counted


def attributes(decision: Decision) -> dict[str, str | int | float]:
    """What a trace says of one placement; what nobody knows is left out."""
    decision = rounded(replace(decision, candidates=decision.candidates[:CANDIDATES_MAX]))
    chosen, runner_up = first_two(decision)
    return {
        "mesh.policy": decision.policy,
        "mesh.placement": decision.placement.value,
        "mesh.target": decision.replica or decision.peer or "",
        "mesh.reason": decision.reason,
        "mesh.attempt": decision.attempt,
        "mesh.hops": decision.hops,
        "mesh.held_s": decision.held_s,
        "mesh.considered": decision.considered,
        "mesh.candidates": orjson.dumps(decision.candidates).decode(),
        **dict(_numbers("mesh.chosen", chosen)),
        **dict(_numbers("mesh.runner_up", runner_up)),
    }


def first_two(decision: Decision) -> tuple[Candidate | None, Candidate | None]:
    """Who was chosen, and the best of the others who could have been; None where nobody was."""
    target = decision.replica or decision.peer
    free = [one for one in decision.candidates if one.available]
    chosen = next((one for one in free if one.name == target), None)
    return chosen, next((one for one in free if one is not chosen), None)


def line(decision: Decision) -> str:
    """What the log says of one placement."""
    target = decision.replica or decision.peer or "-"
    free = sum(candidate.available for candidate in decision.candidates)
    chosen, runner_up = first_two(decision)
    prices = "".join(
        f", {one.name} {one.seconds:.3f} s"
        for one in (chosen, runner_up)
        if one is not None and one.seconds is not None
    )
    return (
        f"{decision.request} {decision.placement.value} {target} attempt {decision.attempt} "
        f"held {decision.held_s:.3f} s free {free}/{decision.considered}{prices}: {decision.reason}"
    )


def _numbers(prefix: str, one: Candidate | None) -> Iterator[tuple[str, str | float]]:
    if one is None:
        return
    yield f"{prefix}.name", one.name
    if one.seconds is not None:
        yield f"{prefix}.seconds", one.seconds
    for name, value in one.terms.items():
        if value is not None:
            yield f"{prefix}.{name}", value
