"""A client's request from its admission to its end, with what its receipt says of the wait."""

from dataclasses import dataclass, replace

from mesh.core.model import events as ev
from mesh.core.model.prompt import NO_TEXT, TextSize
from mesh.session.record import OpenRequest, Step
from schemas.decision import Decision, Placement

RETURNED = ev.AttemptRefused, ev.AttemptFailed  # to the hold queue, if it did not fail at once

SENT = (Placement.LOCAL, Placement.PEER)


def lost(sent: Decision) -> str:
    """What became of an attempt after which its request is in the hold queue without a word."""
    return f"{sent.replica or f'region {sent.peer}'} was lost: it fell silent, restarted or left"


@dataclass(slots=True, kw_only=True)
class ClientRequest(OpenRequest):
    """Times are seconds on the event loop's clock."""

    size: TextSize = NO_TEXT  # of the prompt
    wants_decision: bool = False  # as a header of its answer
    first_byte_at: float | None = None

    @property
    def receipt(self) -> Decision | None:
        """The last decision, with what is known since: the replica that a peer has chosen, and what
        the wait for the first byte consists of."""
        decision, answer = self.decision, self.answer
        if decision is None or answer is None:
            return decision
        replica = decision.replica if decision.peer is None else answer.replica
        if self.first_byte_at is None:
            return replace(decision, replica=replica)
        wait_s = self.first_byte_at - self.request.arrived_at
        peer_held_s = self.bounded_peer_held_s(self.first_byte_at)
        return replace(
            decision,
            replica=replica,
            peer_held_s=peer_held_s,
            attempts_s=max(0.0, wait_s - decision.held_s - peer_held_s),
            ttft_s=wait_s if answer.is_event_stream else None,
        )

    def note_return(self, at: float) -> None:
        """It has been in the hold queue since then: its attempt, if one was under way, was lost."""
        decision, last = self.decision, self.steps[-1] if self.steps else None
        if decision is None or last is None or last.what is not self.decided:
            return
        if decision.placement in SENT:
            failed = ev.AttemptFailed(self.request.key, decision.attempt, lost(decision))
            self.steps += (Step(at, failed),)

    def count_last_hold(self, now: float) -> None:
        """Add to its receipt how long it has been in the hold queue if it ends there: the core
        reports the wait of one that leaves it."""
        decided, last = self.decided, self.steps[-1] if self.steps else None
        if decided is None or last is None:
            return
        is_held = decided.decision.placement is Placement.HOLD
        if is_held if last.what is decided else isinstance(last.what, RETURNED):
            held_s = decided.decision.held_s + now - last.at
            self.decided = replace(decided, decision=replace(decided.decision, held_s=held_s))

    def bounded_peer_held_s(self, until: float) -> float:
        """In the peer's hold queue: its claim, which can't be longer than the time until then."""
        held_s = 0.0 if self.decision is None else self.decision.held_s
        claimed_s = 0.0 if self.answer is None else self.answer.peer_held_s
        return min(max(0.0, claimed_s), max(0.0, until - self.request.arrived_at - held_s))
