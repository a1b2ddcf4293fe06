"""How many tokens a line's answer may have."""

from collections.abc import Mapping
from typing import Any

ANSWER_TOKENS_DEFAULT = 2048  # where the body names no limit: engines would go on to their own
ANSWER_TOKENS_MAX = 2**20  # a body that names more is taken to mean this
CHOICES_MAX = 128
REPORTED_TOKENS_MAX = 2**22  # of one prompt or answer; what is reported beyond is not believed


def answer_tokens_max(body: Mapping[str, Any]) -> int:
    """The most that this body's answer may have, all choices together; never below 1.

    What is no positive number counts as not named: the engine will refuse it.
    """
    limit = _positive(body.get("max_completion_tokens")) or _positive(body.get("max_tokens"))
    choices = max(_positive(body.get("n")) or 1, _positive(body.get("best_of")) or 1)
    answers = min(choices, CHOICES_MAX)
    prompt = body.get("prompt")  # of the completions endpoint: several prompts, or one of token ids
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        answers *= len(prompt)
    return min(ANSWER_TOKENS_MAX, (limit or ANSWER_TOKENS_DEFAULT) * answers)


def _positive(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else None
