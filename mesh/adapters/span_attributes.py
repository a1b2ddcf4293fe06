"""A placement's receipt as attributes of spans, and as a line of the log.

The candidates are on a span twice: all of them as JSON, and the chosen one's terms and both prices
as plain numbers, because traces are searched and plotted by attributes, not by what is inside them.
"""

from collections.abc import Sequence

import orjson

from infra.span_conventions import Attributes
from mesh.session.client_request import ClientRequest
from mesh.session.record import OpenRequest
from schemas.decision import (
    SECONDS_DIGITS,
    Candidate,
    Decision,
    chosen_of,
    place_name,
    rounded_candidate,
)

CANDIDATES_MAX = 16  # on a span; the rest is counted


def decision_attributes(decision: Decision) -> Attributes:
    """One placement as span attributes; unknown values are left out."""
    listed = [rounded_candidate(one) for one in decision.candidates[:CANDIDATES_MAX]]
    chosen, runner_up = _best(decision, listed)
    about: Attributes = {
        "mesh.policy": decision.policy,
        "mesh.placement": decision.placement.value,
        "mesh.target": decision.replica or decision.peer or "",
        "mesh.reason": decision.reason,
        "mesh.attempt": decision.attempt,
        "mesh.hops": decision.hops,
        "mesh.held_s": round(decision.held_s, SECONDS_DIGITS),
        "mesh.considered": decision.considered,
        "mesh.candidates": orjson.dumps(listed).decode(),
    }
    for name, one in (("mesh.chosen.seconds", chosen), ("mesh.runner_up.seconds", runner_up)):
        if one is not None and one.seconds is not None:
            about[name] = one.seconds
    if chosen is not None:
        for term, seconds in chosen.terms.items():
            if seconds is not None:
                about[f"mesh.chosen.{term}"] = seconds
    if runner_up is not None:
        about["mesh.runner_up.name"] = place_name(runner_up.name, runner_up.prefill)
    return about


def receipt_attributes(record: OpenRequest, *, is_stream: bool) -> Attributes:
    """Of a root span: who answers, and what the wait for the first byte consists of.

    The first byte of an answer that is no stream comes with its last: no `ttft_s`.
    """
    receipt = record.receipt if isinstance(record, ClientRequest) else record.decision
    if receipt is None:
        return {}
    seconds = {"mesh.held_s": receipt.held_s, "mesh.peer_held_s": receipt.peer_held_s}
    if is_stream and receipt.ttft_s is not None and receipt.attempts_s is not None:
        seconds |= {
            "mesh.attempts_s": receipt.attempts_s,
            "mesh.ttft_s": receipt.ttft_s,
        }
    return {
        "mesh.placement": receipt.placement.value,
        "mesh.region": receipt.peer or receipt.region,
        "mesh.replica": receipt.replica or "",
        **({"mesh.prefill_replica": receipt.prefill} if receipt.prefill else {}),
        **{name: round(value, SECONDS_DIGITS) for name, value in seconds.items()},
    }


def _best(
    decision: Decision, candidates: Sequence[Candidate]
) -> tuple[Candidate | None, Candidate | None]:
    """The chosen candidate, and the best of the other available ones; None if there is none."""
    chosen = chosen_of(decision, candidates)
    return chosen, next((one for one in candidates if one.available and one is not chosen), None)


def receipt_line(decision: Decision) -> str:
    target = decision.replica or decision.peer or "-"
    free = sum(candidate.available for candidate in decision.candidates)
    chosen, runner_up = _best(decision, decision.candidates)
    prices = "".join(
        f", {place_name(one.name, one.prefill)} {one.seconds:.3f} s"
        for one in (chosen, runner_up)
        if one is not None and one.seconds is not None
    )
    return (
        f"{decision.request} {decision.placement.value} {target} attempt {decision.attempt} "
        f"held {decision.held_s:.3f} s free {free}/{decision.considered}{prices}: {decision.reason}"
    )
