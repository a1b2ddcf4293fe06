"""Every request's end, counted once and hashed, so that one number compares two runs.

Counts and times are `mesh replay`'s own (`mesh.replay.tally`), so both report the same fields.
One inter-token time is taken per answer, its mean: tokens are no events here. The digest covers
every request, those of the warm-up too, in the order in which they ended.
"""

import hashlib
import struct
from collections.abc import Callable
from random import Random

from mesh.replay.report import RunReport, build_report
from mesh.replay.tally import RecordedUsage, RequestOutcome, RequestResult, RunTally
from mesh.sim.ask import Answered, Ask
from schemas.ids import RegionId

_LINE = struct.Struct("<qqqqBB")
_OUTCOMES = tuple(RequestOutcome)
NO_TTFT = -1.0

OnRequestEnd = Callable[[Ask, Answered, float], None]


class RequestLog:
    """The clients record in it; `report` at the end."""

    def __init__(self, regions: list[RegionId], dice: Random, reported_from: float) -> None:
        """`reported_from`: requests that begin earlier are only counted and hashed."""
        self.asked = 0
        self.ended = 0
        self.forwarded = 0
        self.last_at = 0.0
        self.watch: OnRequestEnd | None = None  # called with every reported end
        self._first_at: float | None = None
        self._reported_from = reported_from
        self._tally = RunTally(regions, dice)
        self._hash = hashlib.blake2b(digest_size=16)

    def began(self, ask: Ask) -> None:
        """A client sends a request."""
        self.asked += 1
        if self._first_at is None:
            self._first_at = ask.asked_at

    def add(self, ask: Ask, answered: Answered, now: float) -> None:
        """A client has its whole answer, or none."""
        self.ended += 1
        self.last_at = now
        ok = answered.outcome is RequestOutcome.OK
        ttft_s = NO_TTFT if ask.first_at is None else ask.first_at - ask.asked_at
        e2e_s = now - ask.asked_at
        self._add_to_digest(ask, answered, ttft_s, e2e_s)
        if ask.asked_at < self._reported_from:
            return
        self.forwarded += ok and answered.hops > 0
        tokens = ask.node.answer.tokens
        result = RequestResult(
            answered.outcome,
            answered.reason,
            ttft_s=ttft_s if ok else None,
            e2e_s=e2e_s,
            gaps_s=((e2e_s - ttft_s) / (tokens - 1),) if ok and tokens > 1 else (),
            usage=RecordedUsage(ask.node.prompt_tokens, tokens, answered.cached_tokens)
            if ok
            else None,
        )
        self._tally.add(ask.region, result, ask.node.prompt_tokens)
        if self.watch is not None:
            self.watch(ask, answered, now)

    def report(self, facts: dict[str, object]) -> RunReport:
        """The fields of a replay's report, and `facts`."""
        first_at = max(self._first_at or 0.0, self._reported_from)
        return build_report(self._tally, max(0.0, self.last_at - first_at), facts)

    def digest(self) -> str:
        """The hash of all ends."""
        return self._hash.hexdigest()

    def _add_to_digest(self, ask: Ask, answered: Answered, ttft_s: float, e2e_s: float) -> None:
        outcome = _OUTCOMES.index(answered.outcome)
        us = round(ttft_s * 1e6), round(e2e_s * 1e6)
        line = _LINE.pack(ask.number, *us, answered.cached_tokens, outcome, answered.hops)
        self._hash.update(line)
        self._hash.update(f"{ask.region} {answered.replica} {answered.reason}\n".encode())
