"""Two agents of one name: which of them is to leave.

They would share work by halves, and look to routers like one that restarts without end. So an
agent asks before it listens for work whether somebody answers to its name, and from then on it
answers. Whoever is there stays. Of two that start within CLAIM_S, so that neither was there before,
the one with the lower epoch stays; host clocks decide that and nothing else.
"""

from enum import StrEnum

CLAIM_S = 1.0  # for an answer to come; where nobody listens, the bus says so at once


class Verdict(StrEnum):
    """What to do about a namesake."""

    IGNORE = "ignore"
    ANSWER = "answer"  # tell it that the name is taken
    LEAVE = "leave"


class Namesake:
    """One agent's side. `ask` at its start, and whenever it comes back to the bus."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._asked_at = float("-inf")

    def ask(self, now: float) -> None:
        """It asks whether somebody has its name."""
        self._asked_at = now

    def hear_question(self, epoch: int, now: float) -> Verdict:
        """An agent of that epoch asks for our name; we may hear ourselves."""
        if epoch == self._epoch:
            return Verdict.IGNORE
        return Verdict.LEAVE if self._asks(now) and epoch < self._epoch else Verdict.ANSWER

    def hear_answer(self, epoch: int, now: float) -> Verdict:
        """An agent of that epoch says that it has the name, to us or to another one."""
        return Verdict.LEAVE if epoch != self._epoch and self._asks(now) else Verdict.IGNORE

    def _asks(self, now: float) -> bool:
        return now - self._asked_at <= CLAIM_S
