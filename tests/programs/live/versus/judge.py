"""What the clients got, judged alike for live systems and for the twin.

A request is lost if its client has no complete answer, or the first token came later than clients
are patient: it counts with their patience as its time to first token, so that nothing is gained by
losing it. An answer whose first token came within its objective (`recorded.in_time_s`) is in time;
goodput is such answers a second of the trace.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.replay.tally import RequestOutcome, RequestResult, percentile
from tests.programs.studies.tables.client_view import PATIENCE_S

MEAN, P50, P90, CACHED = "TTFT mean, s", "TTFT p50, s", "TTFT p90, s", "cached prompt tokens"
LOST, GOODPUT = "lost", "goodput, answers/s"
FIGURES = (P50, P90, MEAN, CACHED, GOODPUT, LOST)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it. `ttft_s`: None where it was lost, `why` then says how."""

    ttft_s: float | None
    prompt_tokens: int = 0  # these two by the engine's count, 0 where it was lost
    cached_tokens: int = 0
    late_s: float = 0.0  # from when it was due until it left
    why: str = ""


def seen(result: RequestResult) -> Seen:
    """A live request's result."""
    late_s = result.late_s or 0.0
    if result.outcome is not RequestOutcome.OK or result.ttft_s is None:
        return Seen(None, late_s=late_s, why=result.reason or "no token")
    if result.ttft_s > PATIENCE_S:
        return Seen(None, late_s=late_s, why="patience")
    usage = result.usage
    if usage is None:
        return Seen(result.ttft_s, late_s=late_s)
    return Seen(result.ttft_s, usage.prompt_tokens, usage.cached_tokens or 0, late_s)


def figures(
    requests: Sequence[Seen], in_time_s: Sequence[float], duration_s: float
) -> dict[str, float]:
    """`in_time_s`: each request's objective. `duration_s`: of the trace that was played."""
    ttft_s = [PATIENCE_S if one.ttft_s is None else one.ttft_s for one in requests]
    ordered = sorted(ttft_s)
    prompts = sum(one.prompt_tokens for one in requests)
    kept = sum(
        one.ttft_s is not None and one.ttft_s <= objective_s
        for one, objective_s in zip(requests, in_time_s, strict=True)
    )
    return {
        P50: percentile(ordered, 0.5),
        P90: percentile(ordered, 0.9),
        MEAN: sum(ttft_s) / len(ttft_s),
        CACHED: sum(one.cached_tokens for one in requests) / prompts if prompts else 0.0,
        GOODPUT: kept / duration_s,
        LOST: float(sum(one.ttft_s is None for one in requests)),
    }


def reasons(requests: Sequence[Seen]) -> Counter[str]:
    """Why requests were lost."""
    return Counter(one.why for one in requests if one.ttft_s is None)
