"""The answers this agent owes: taken from the bus and not finished."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agents.core.routers import RouterName
from agents.core.work import Work

# Bodies of answers without a first byte are held in memory, here or in the HTTP client.
HELD_BYTES_MAX = 256 * 1024 * 1024


@dataclass(slots=True)
class Answer:
    """One answer. Times are None until they happen."""

    inbox: str
    router: RouterName
    work: Work
    headers: Mapping[str, str]
    body_bytes: int
    taken_at: float
    handed_at: float | None = None
    began_at: float | None = None
    unqueued: bool = False  # met an engine with nothing waiting and nobody else prefilling
    aborted: bool = False

    @property
    def deadline_at(self) -> float:
        return self.taken_at + self.work.deadline_s


class AnswerTable:
    """Answers by inbox. The caller bounds their number with `full`."""

    __slots__ = ("_by_inbox", "held_bytes")

    def __init__(self) -> None:
        self._by_inbox: dict[str, Answer] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._by_inbox)

    def __contains__(self, inbox: str) -> bool:
        return inbox in self._by_inbox

    def __iter__(self) -> Iterator[Answer]:
        """A copy's iterator: the loop may remove answers."""
        return iter(list(self._by_inbox.values()))

    def add(self, answer: Answer) -> None:
        self._by_inbox[answer.inbox] = answer
        self.held_bytes += answer.body_bytes

    def get(self, inbox: str) -> Answer | None:
        return self._by_inbox.get(inbox)

    def begin(self, answer: Answer, now: float) -> None:
        """Its first byte came: nobody needs its body any more."""
        if answer.began_at is None:
            answer.began_at = now
            self.held_bytes -= answer.body_bytes

    def remove(self, inbox: str) -> Answer | None:
        answer = self._by_inbox.pop(inbox, None)
        if answer is not None and answer.began_at is None:
            self.held_bytes -= answer.body_bytes
        return answer

    def unbegun(self, handed_after: float) -> int:
        """How many were handed over after that time and have no first byte."""
        return sum(
            answer.began_at is None
            and answer.handed_at is not None
            and answer.handed_at > handed_after
            for answer in self._by_inbox.values()
        )

    def handed(self) -> int:
        """How many the engine has."""
        return sum(answer.handed_at is not None for answer in self._by_inbox.values())
