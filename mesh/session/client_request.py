"""A client's request from its admission to its end, with what its receipt says of the wait."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import intern

from mesh.core.model import events as ev
from mesh.core.model.prompt import NO_TEXT, TextSize
from mesh.core.model.served_names import model_of
from mesh.core.requests.limits import Held
from mesh.session.cost import NOTHING, Cost, Seen, counted, estimated
from mesh.session.record import UNKNOWN, Ending, Numbers, OpenRequest, Step
from schemas.decision import Decision, Placement
from schemas.engine_routes import SERVER_PATHS, error_form
from schemas.http import Fault, error_body

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
    sent_status: int = 0  # of the head that its client was sent; 0: none was
    held: Held | None = None  # of its key's limits, until it is over
    limit_headers: Mapping[str, str] | None = None  # of its answer

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

    def ending_at(
        self, at: float, outcome: str, status: int = 0, error_type: str = "", detail: str = ""
    ) -> Ending:
        request, answer, failure = self.request, self.answer, self.failure
        asked = request.asked
        region = replica = fault = ""
        numbers, sent_bytes, peer_held_s, is_stream, cost = UNKNOWN, 0, 0.0, False, NOTHING
        if answer is not None:
            region, replica = answer.region or "", answer.replica or ""
            sent_bytes = 0 if answer.is_broken else answer.taken_bytes
            # Of one that broke, the answer that was to go on with it may have no head yet.
            is_stream, end = answer.is_event_stream or self.said is not None, answer.end
            if answer.peer_held_s:
                peer_held_s = self.bounded_peer_held_s(at)
            if end is not None:
                numbers = end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.ttft_s
                if self.splice is not None and end.prompt_tokens >= 0 <= end.completion_tokens:
                    prompt, output = self.splice.whole(end.prompt_tokens, end.completion_tokens)
                    numbers = prompt, min(end.cached_tokens, prompt), output, end.ttft_s
            cost = self._cost(numbers)
            if self.said is not None:
                sent_bytes += self.said.sent_bytes
        if failure is not None:
            fault = failure.fault.value.code
            if self.first_byte_at is None:
                form = error_form(self.path)
                sent_bytes = len(error_body(failure.fault, failure.message, form=form))
        elif self.pass_engine_error and self.engine_error is not None:
            sent_bytes = len(self.engine_error.body)
        return Ending(
            outcome,
            status,
            error_type,
            detail,
            at,
            request=request.request_id,
            trace=self.spans.trace_id,
            method="POST" if self.call is None else self.call.method,
            route=self.path,
            model=intern(model_of(request.model)),
            asked="" if asked is None else asked.model,
            tenant=self.tenant or "",
            region=region,
            replica=replica,
            peer_held_s=peer_held_s,
            numbers=numbers,
            cost=cost,
            sent_bytes=sent_bytes,
            is_stream=is_stream,
            fault=fault,
            arrived_at=request.arrived_at,
            started_at=self.first_byte_at,
            decided=self.decided,
            steps=self.steps,
        )

    def _cost(self, numbers: Numbers) -> Cost:
        """What it has cost if it ends now; `numbers`: of its engine."""
        prompt, cached, output, _ = numbers
        is_counted = prompt >= 0 and (output >= 0 or self.request.answer_tokens == 0)
        if is_counted:
            # Of one that went on elsewhere, what was said before is counted by its events.
            return counted(prompt, cached, output, is_estimated=self.splice is not None)
        if self.call is not None or self.path in SERVER_PATHS or not self._was_computed:
            return NOTHING
        assert self.answer is not None
        seen = Seen(self.request, self.answer, self.decided, self.splice, prompt, cached, output)
        return estimated(seen)

    @property
    def _was_computed(self) -> bool:
        """Whether its client has got some of an answer, or gave up while an engine had it."""
        if self.first_byte_at is not None:
            return True
        failure, answer, steps = self.failure, self.answer, self.steps
        gave_up = not self.pass_engine_error and (
            failure is None or failure.fault is Fault.DEADLINE
        )
        is_there = answer is not None and answer.replica is not None
        has_returned = bool(steps) and isinstance(steps[-1].what, RETURNED)
        return gave_up and is_there and not has_returned

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
