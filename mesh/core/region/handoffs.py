"""Work sent to one replica that its heartbeats don't show yet.

A hand-off takes room from the moment it is sent until a heartbeat counts it (`Heartbeat.taken`)
or it is over. When its answer begins it waits no longer, but it still sits in the batch slot
that the last heartbeat showed free: giving that slot away again is how a replica gets pending
work. Rejected: counting only what has not begun, which overfills a batch by as much as starts
between two heartbeats.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Handoff:
    """One piece of work on its way."""

    sent_at: float
    tokens: int
    prefill_tokens: int
    waits: bool = True


class Handoffs:
    """One replica's, by their numbers, the oldest first."""

    def __init__(self) -> None:
        self._unseen: dict[int, Handoff] = {}
        self.count = 0  # all of them; an attribute, because it is read for everybody every time
        self.tokens = 0  # their prompt tokens
        self.prefill_tokens = 0  # still to be computed, of those whose answers have not begun
        self.waiting = 0  # and how many those are

    def __len__(self) -> int:
        return self.count

    def add(self, number: int, tokens: int, prefill_tokens: int, now: float) -> None:
        """Count work that is being sent. Numbers rise."""
        self._unseen[number] = Handoff(now, tokens, prefill_tokens)
        self.count += 1
        self.tokens += tokens
        self.prefill_tokens += prefill_tokens
        self.waiting += 1

    def began(self, number: int) -> None:
        """Its answer has begun: it runs."""
        handoff = self._unseen.get(number)
        if handoff is not None and handoff.waits:
            handoff.waits = False
            self.waiting -= 1
            self.prefill_tokens -= handoff.prefill_tokens

    def over(self, number: int) -> None:
        """It ended, or was never taken."""
        handoff = self._unseen.pop(number, None)
        if handoff is not None:
            self.count -= 1
            self.tokens -= handoff.tokens
            if handoff.waits:
                self.waiting -= 1
                self.prefill_tokens -= handoff.prefill_tokens

    def confirm(self, last: int) -> None:
        """A heartbeat counts everything up to number `last`."""
        while self._unseen and (first := next(iter(self._unseen))) <= last:
            self.over(first)

    def expire(self, sent_before: float) -> None:
        """What no heartbeat confirmed for so long was lost, or has been served."""
        while self._unseen:
            number, handoff = next(iter(self._unseen.items()))
            if handoff.sent_at >= sent_before:
                return
            self.over(number)
