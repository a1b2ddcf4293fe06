"""Two agents with one replica name: which of them leaves.

They would share the work and look to routers like one agent that restarts without end. So an agent
asks on the bus whether its name is in use before it subscribes to work, and from then on answers
such questions. The agent that holds the name stays; a newcomer leaves at any answer. Two may hold
it nevertheless: both started within CLAIM_S, or one was stopped or cut off. Then the one with the
lower epoch stays, in whatever order their messages arrive, so never do both leave.
"""

from enum import StrEnum

CLAIM_S = 1.0  # to wait for an answer; without a subscriber the server reports that at once


class NameDecision(StrEnum):
    """What to do about another agent with our name."""

    IGNORE = "ignore"
    ANSWER = "answer"  # the name is in use
    LEAVE = "leave"


class NameClaim:
    """One agent's side. `ask` at its start and after each reconnect; `take` in between."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._asked_at = float("-inf")
        self._has_it = False

    def ask(self, now: float) -> None:
        self._asked_at = now

    def take(self) -> None:
        """No answer came: this agent holds the name from now on."""
        self._has_it = True

    def question_arrived(self, epoch: int, now: float) -> NameDecision:
        """An agent of that epoch asks for our name; we may receive our own question."""
        if epoch == self._epoch:
            return NameDecision.IGNORE
        asks = now - self._asked_at <= CLAIM_S
        return NameDecision.LEAVE if asks and epoch < self._epoch else NameDecision.ANSWER

    def answer_arrived(self, epoch: int) -> NameDecision:
        """An agent of that epoch holds the name, and answers us or a third agent."""
        if epoch == self._epoch:
            return NameDecision.IGNORE
        stays = self._has_it and epoch > self._epoch
        return NameDecision.ANSWER if stays else NameDecision.LEAVE
