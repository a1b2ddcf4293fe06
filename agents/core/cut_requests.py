"""Requests that were cut before their end, and that an engine may compute all the same.

An engine notices that its client left when it next writes. mlx-lm and transformers serve write a
plain answer at its end: cut before, it is computed to its last token, and the next request waits
for that. So an agent whose engine shows no numbers counts a plain request that was cut as running,
until its estimated end or a good answer to a later request; engines answer one request after the
other, or are free enough. Streams stop at once.

Which engines stop is learned: where STOPS_AFTER such answers in a row came long before the
estimated end, nothing is counted, until one comes late. However many count, the agent takes one
more request: only its answer can teach.
"""

import re
from typing import NamedTuple

ANSWER_TOKENS = 512  # where a request doesn't bound its answer
TOKEN_S = 0.05  # of an answer, while unmeasured: a laptop's pace
TOKENS_MEASURED_MIN = 8  # a shorter answer is mostly its prompt
PACE_WEIGHT = 0.2  # of the last answer in the mean
CUT_S_MIN, CUT_S_MAX = 1.0, 600.0
CUTS_MAX = 64
EARLY = 0.5  # of the time that was left when the later request was sent
STOPS_AFTER = 3

# Neither matches inside a text, whose quotation marks are escaped.
_TOKENS = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,7})\b')
_STREAMED = re.compile(rb'"stream"\s*:\s*true')


def plain_answer_tokens(body: bytes) -> int | None:
    """The most tokens that the answer to this request may have; None if it is a stream."""
    if _STREAMED.search(body):
        return None
    found = _TOKENS.search(body)
    return ANSWER_TOKENS if found is None else int(found[1])


class _Cut(NamedTuple):
    sent_at: float
    at: float
    until: float  # by the estimate


class CutRequests:
    """Of one engine that shows no numbers."""

    def __init__(self) -> None:
        self.count = 0  # that count as running now
        self._cuts: list[_Cut] = []
        self._token_s = TOKEN_S
        self._early = 0  # answers in a row

    def cut(self, tokens: int, sent_at: float, now: float) -> None:
        """A plain request for so many tokens at most, sent then, has been cut."""
        left_s = min(CUT_S_MAX, tokens * self._token_s - (now - sent_at))
        if left_s >= CUT_S_MIN:
            self._cuts = [*self._cuts[-CUTS_MAX + 1 :], _Cut(sent_at, now, now + left_s)]
        self.update(now)

    def answered(self, tokens: int, sent_at: float, now: float) -> None:
        """A request that was sent then is answered well, with so many tokens; -1: unknown."""
        if tokens >= TOKENS_MEASURED_MIN:
            self._token_s += PACE_WEIGHT * ((now - sent_at) / tokens - self._token_s)
        if not self._cuts:
            return
        # Those that were over before this one was sent teach nothing.
        left = [cut for cut in self._cuts if cut.until > sent_at]
        if before := [cut for cut in left if cut.at <= sent_at]:
            left_s = max(cut.until for cut in before) - sent_at
            self._early = self._early + 1 if now - sent_at < EARLY * left_s else 0
        self._cuts = [cut for cut in left if cut.at > sent_at]
        self.update(now)

    def update(self, now: float) -> None:
        """Time has passed."""
        if self._cuts and self._early < STOPS_AFTER:
            self.count = sum(cut.until > now for cut in self._cuts)
        else:
            self.count = 0

    def may_compute(self, sent_until: float, now: float) -> bool:
        """Whether it may still compute one that was sent until then. Where it has been silent for
        long, later ones show nothing: clients go on to send and to leave."""
        return any(cut.sent_at <= sent_until and cut.until > now for cut in self._cuts)

    def clear(self) -> None:
        """The engine is gone, and what it computed with it."""
        self._cuts, self.count = [], 0
