"""What a request cost in tokens: settled once, at its one end.

Counted is the answer that its client got, or left: by the engine that gave it, else by estimate.
What engines computed besides is no client's cost: of attempts that failed, of a prompt that a
second engine read again to go on with a stream. A client that leaves while an engine has its prompt
has cost that prompt, as has one whose own deadline passes: else leaving early would be free.

Estimated are the prompt by its bytes, as for its placement, and what of it was cached by the
receipt. The answer is estimated by its events: engines send each token in one, unless they are told
to send several at once, and those of one stream are about as long as each other. An answer that is
no stream is estimated by its bytes.
"""

from typing import NamedTuple

from mesh.core.model import effects as fx
from mesh.core.model.prompt import BYTES_PER_TOKEN_START
from mesh.core.model.request import Request
from mesh.session.answer import EVENT_ENDS, AnswerReceiver
from mesh.session.said import Splice
from schemas.decision import chosen_of
from schemas.http_statuses import SUCCESS

ENVELOPE_BYTES = 400  # of a whole answer's JSON, beside its text


class Cost(NamedTuple):
    """Tokens of one request. Both parts of its prompt come from one count."""

    uncached: int = 0  # of the prompt
    cached: int = 0
    output: int = 0
    is_prompt_estimated: bool = False
    is_output_estimated: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.uncached + self.cached


NOTHING = Cost()


def counted(prompt: int, cached: int, output: int, *, is_estimated: bool = False) -> Cost:
    """As an engine counted; an engine that says nothing of cached tokens has none."""
    cached = min(max(0, cached), prompt)
    return Cost(prompt - cached, cached, max(0, output), is_estimated, is_estimated)


class Seen(NamedTuple):
    """What a router knows of an answer without its engine's counts, or with some of them."""

    request: Request
    answer: AnswerReceiver
    decided: fx.Decided | None = None
    splice: Splice | None = None
    prompt: int = -1  # as the engine counted, -1 where it did not
    cached: int = -1
    output: int = -1


def estimated(seen: Seen) -> Cost:
    """What an engine has computed for that answer, as far as it came; what it counted holds."""
    request, answer, splice = seen.request, seen.answer, seen.splice
    head = answer.head
    if head is not None and head.status not in SUCCESS:
        return NOTHING  # the engine has refused it
    is_generated = request.answer_tokens != 0
    prompt, cached, output = seen.prompt, seen.cached, seen.output
    of_prompt, of_output = prompt < 0, output < 0 and is_generated
    if of_prompt:
        prompt = request.prompt.tokens
    if of_output:
        output = _output_tokens(answer)
    if of_prompt:
        cached = _matched_tokens(seen.decided)
    if splice is not None:
        prompt, output = splice.whole(prompt, output)
        of_prompt = of_output = True
    cached = min(max(0, cached), prompt)
    return Cost(prompt - cached, cached, max(0, output), of_prompt, of_output)


def _output_tokens(answer: AnswerReceiver) -> int:
    if not answer.is_event_stream:
        text_bytes = answer.taken_bytes + answer.buffered_bytes - ENVELOPE_BYTES
        return max(0, round(text_bytes / BYTES_PER_TOKEN_START))
    if not answer.taken_bytes:
        return 0
    last = answer.given_out_last
    events = sum(map(last.count, EVENT_ENDS))
    # What came first are the events before the first token, and that one.
    more_bytes = answer.taken_bytes - answer.first_bytes
    return 1 + round(more_bytes * max(1, events) / max(1, len(last)))


def _matched_tokens(decided: fx.Decided | None) -> int:
    """Of the prompt, what the place that it went to was believed to have cached."""
    if decided is None:
        return 0
    decision, unlisted = decided.decision, decided.unlisted
    candidates = decision.candidates if unlisted is None else unlisted.candidates()
    chosen = chosen_of(decision, candidates)
    return 0 if chosen is None else chosen.matched_tokens or 0
