"""A decision's receipt as span attributes and as one log line."""

import orjson

from schemas.decision import Decision

CANDIDATES_MAX = 16  # on a span; the rest is counted


def attributes(decision: Decision) -> dict[str, str | int | float]:
    """What a trace says of one placement."""
    kept = decision.candidates[:CANDIDATES_MAX]
    return {
        "mesh.policy": decision.policy,
        "mesh.placement": decision.placement.value,
        "mesh.target": decision.replica or decision.peer or "",
        "mesh.reason": decision.reason,
        "mesh.attempt": decision.attempt,
        "mesh.hops": decision.hops,
        "mesh.held_s": decision.held_s,
        "mesh.considered": decision.considered,
        "mesh.candidates": orjson.dumps(kept).decode(),
    }


def line(decision: Decision) -> str:
    """What the log says of one placement."""
    target = decision.replica or decision.peer or "-"
    free = sum(candidate.available for candidate in decision.candidates)
    return (
        f"{decision.request} {decision.placement.value} {target} attempt {decision.attempt} "
        f"held {decision.held_s:.3f} s free {free}/{decision.considered}: {decision.reason}"
    )
