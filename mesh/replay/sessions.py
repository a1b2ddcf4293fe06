"""Recorded sessions, set beside each other.

Some recorders write sessions that ran on different days, one after the other or each from its
own zero. Played as they stand they would be one user's work with nights between. So sessions
keep their own times from their first request on, and begin as independent users do: a Poisson
process, seeded, in the order in which they were recorded.

Its mean gap is a convention, not a measurement: it fixes what speed 1 means for such a trace.
"""

import random
from dataclasses import replace

from mesh.replay.trace import Trace

SESSION_GAP_S = 10.0


def session_starts_s(
    sessions: int, rng: random.Random, gap_s: float = SESSION_GAP_S
) -> list[float]:
    """When each session begins: the first at 0, the others `gap_s` apart in the mean."""
    starts = [0.0]
    for _ in range(sessions - 1):
        starts.append(starts[-1] + rng.expovariate(1 / gap_s))
    return starts[:sessions]


def together(trace: Trace, rng: random.Random) -> Trace:
    """The trace with its named sessions set beside each other; without names, as it is."""
    first_s: dict[str, float] = {}
    for request in trace.requests:
        if request.session:
            first_s.setdefault(request.session, request.at_s)
    if len(first_s) < 2:
        return trace
    starts = session_starts_s(len(first_s), rng)
    moved_s = {
        session: start - first
        for (session, first), start in zip(first_s.items(), starts, strict=True)
    }
    requests = [
        replace(request, at_s=request.at_s + moved_s.get(request.session, 0.0))
        for request in trace.requests
    ]
    requests.sort(key=lambda request: request.at_s)
    return replace(trace, requests=tuple(requests))
