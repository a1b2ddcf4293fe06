"""Two agents of one name: which of them is to leave.

They would share work by halves, and look to routers like one that restarts without end. So an
agent asks before it listens for work whether somebody answers to its name, and from then on it
answers. Whoever is there stays, and whoever asks before it has the name leaves to any answer.

Two may have it nevertheless: both started within CLAIM_S, or one was stopped or cut off while the
other asked. Of these the one with the lower epoch stays, whoever asks and in whatever order they
hear each other, so never do both leave; host clocks decide that and nothing else.

Rejected: of two that have it, who comes back to the bus leaves. An answer that it gave to the other
one's old question may be on its way already, and then both would leave.
"""

from enum import StrEnum

CLAIM_S = 1.0  # for an answer to come; where nobody listens, the bus says so at once


class Verdict(StrEnum):
    """What to do about a namesake."""

    IGNORE = "ignore"
    ANSWER = "answer"  # tell it that the name is taken
    LEAVE = "leave"


class Namesake:
    """One agent's side. `ask` at its start and when it is back on the bus; `take` in between."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._asked_at = float("-inf")
        self._has_it = False

    def ask(self, now: float) -> None:
        """It asks whether somebody has its name."""
        self._asked_at = now

    def take(self) -> None:
        """Nobody has answered: the name is ours from now on."""
        self._has_it = True

    def hear_question(self, epoch: int, now: float) -> Verdict:
        """An agent of that epoch asks for our name; we may hear ourselves."""
        if epoch == self._epoch:
            return Verdict.IGNORE
        return Verdict.LEAVE if self._asks(now) and epoch < self._epoch else Verdict.ANSWER

    def hear_answer(self, epoch: int) -> Verdict:
        """An agent of that epoch says that it has the name, to us or to another one."""
        if epoch == self._epoch:
            return Verdict.IGNORE
        return Verdict.ANSWER if self._has_it and epoch > self._epoch else Verdict.LEAVE

    def _asks(self, now: float) -> bool:
        return now - self._asked_at <= CLAIM_S
