"""The answers this agent owes: taken from the bus and not finished."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from agents.core.routers import RouterName
from agents.core.since_look import SinceLook
from agents.core.work import Work

# Bodies of answers without a first byte are held in memory, here or in the HTTP client.
BYTES_PER_TOKEN = 4  # of a prompt that nobody has counted
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
    settled: bool = False  # has a first byte or has ended: waits no more, needs no body
    aborted: bool = False

    @property
    def deadline_at(self) -> float:
        return self.taken_at + self.work.deadline_s

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt, to be computed: the router's estimate, else by the size of its body."""
        estimate = self.work.prefill_tokens
        return self.body_bytes // BYTES_PER_TOKEN if estimate is None else estimate


class AnswerTable:
    """Answers by inbox. The caller bounds their number with `full`."""

    __slots__ = (
        "_by_inbox",
        "_due_at",
        "_unsettled",
        "handed",
        "held_bytes",
        "settled_at",
        "since_look",
    )

    def __init__(self) -> None:
        self._by_inbox: dict[str, Answer] = {}
        # Beside the whole table, because they are few and every event asks for them.
        self._unsettled: dict[str, Answer] = {}
        self.since_look = SinceLook()
        self.held_bytes = 0
        self.handed = 0  # how many the engine has
        self.settled_at = -inf  # when one last ceased to wait
        self._due_at = inf  # no deadline passes before it

    def __len__(self) -> int:
        return len(self._by_inbox)

    def __contains__(self, inbox: str) -> bool:
        return inbox in self._by_inbox

    def __iter__(self) -> Iterator[Answer]:
        """A copy's iterator: the loop may remove answers."""
        return iter(list(self._by_inbox.values()))

    def add(self, answer: Answer) -> None:
        self._by_inbox[answer.inbox] = self._unsettled[answer.inbox] = answer
        self.held_bytes += answer.body_bytes
        self._due_at = min(self._due_at, answer.deadline_at)

    def overdue(self, now: float) -> list[Answer]:
        """Those whose deadline has passed; they are asked for one by one only when one may be."""
        if now < self._due_at:
            return []
        self._due_at = min((answer.deadline_at for answer in self), default=inf)
        return [answer for answer in self if answer.deadline_at <= now]

    def get(self, inbox: str) -> Answer | None:
        return self._by_inbox.get(inbox)

    def hand(self, answer: Answer, now: float) -> None:
        """The engine is given it."""
        answer.handed_at = now
        self.handed += 1
        self.since_look.hand(now)

    def look(self, began_at: float, now: float) -> None:
        """A look at the engine that began then is here."""
        handed = (answer.handed_at for answer in self._unsettled.values())
        self.since_look.look(began_at, now, (at for at in handed if at is not None))

    def begin(self, answer: Answer, now: float) -> None:
        """Its first byte came."""
        if answer.began_at is None:
            answer.began_at = now
            self.settle(answer, now)

    def settle(self, answer: Answer, now: float) -> None:
        """It no longer waits for the engine, and nobody needs its body any more."""
        if answer.settled:
            return
        answer.settled, self.settled_at = True, now
        del self._unsettled[answer.inbox]
        self.held_bytes -= answer.body_bytes
        if answer.handed_at is not None:
            self.since_look.settle(answer.handed_at, now)

    def remove(self, answer: Answer) -> None:
        del self._by_inbox[answer.inbox]
        self.handed -= answer.handed_at is not None
        if self._unsettled.pop(answer.inbox, None) is not None:
            self.held_bytes -= answer.body_bytes
            if answer.handed_at is not None:
                self.since_look.drop(answer.handed_at)

    @property
    def longest_prompt_tokens(self) -> int:
        """Of those that the engine has and that have no first byte."""
        return max((a.prompt_tokens for a in self.waiting() if a.handed_at is not None), default=0)

    def waiting(self) -> Iterator[Answer]:
        """Those without a first byte, in the order they were taken."""
        return iter(self._unsettled.values())
