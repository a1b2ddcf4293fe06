"""An answer that a simulated replica is computing, and the message that ends it."""

from collections.abc import Iterable
from dataclasses import dataclass

from agents.core.events import NO_USAGE, TokenUsage
from mesh.sim.session_host import SessionHost
from mesh.sim.workload import SentRequest
from schemas.exchange import WORKING_S, End


@dataclass(slots=True)
class RunningAnswer:
    inbox: str
    request: SentRequest
    receiver: SessionHost
    number: int  # in the engine
    last_message_at: float
    offline: bool  # a line of a batch job: no stream
    cached_tokens: int = 0
    predicted_tokens: int = 0  # of its prompt, that its router took for cached
    began: bool = False


def end_message(outcome: str, detail: str, usage: TokenUsage = NO_USAGE) -> End:
    """As an agent sends it; the time to first token is not measured here."""
    counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    return End(outcome, detail, *counts, -1.0)


def due_progress(
    answers: Iterable[RunningAnswer], now: float, *, is_stuck: bool
) -> dict[SessionHost, list[str]]:
    """The inboxes of answers that make progress, or have been silent for WORKING_S, by the host
    that is told; they count as told. `is_stuck`: their engine produces nothing."""
    found: dict[SessionHost, list[str]] = {}
    for running in answers:
        streams = running.began and not is_stuck
        if streams or now - running.last_message_at >= WORKING_S:
            running.last_message_at = now
            found.setdefault(running.receiver, []).append(running.inbox)
    return found
