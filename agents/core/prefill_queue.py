"""How many prompt tokens the engine still has to compute before it is through what it took.

Routers say with each request how many of its prompt tokens they believe are not cached. The sum
over requests without a first byte is the queue that a newcomer finds; "two pending" may be a
hundred tokens or a hundred thousand. Engines compute prompts in order of arrival and say nothing
of their progress, so what the oldest has behind it is reckoned from the learned speed.

An engine whose requests came without an estimate has an unknown queue, not an empty one.
"""

from agents.core.answers import AnswerTable
from agents.core.prefill import PrefillLine


def queued_tokens(
    answers: AnswerTable, line: PrefillLine | None, began_at: float, now: float
) -> int | None:
    """Prompt tokens to compute as of `now`; `began_at`: when an answer last began."""
    total, front = 0, None
    for answer in answers.waiting():
        if answer.work.prefill_tokens is None:
            return None
        total += answer.work.prefill_tokens
        front = front or answer
    if front is None or front.handed_at is None or line is None or line.s_per_token <= 0.0:
        return total
    done = (now - max(front.handed_at, began_at)) / line.s_per_token
    assert front.work.prefill_tokens is not None
    return total - min(front.work.prefill_tokens, max(0, round(done)))
