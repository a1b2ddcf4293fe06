"""E2's recent history H: what each target was given within a window, as counts of tokens.

Preble 3.2: a target's load is the time its requests of the last three minutes take to compute,
not what runs at the moment, because "the placement of a prefix has a longer-term effect than a
single load in time". Only counts are kept and turned into seconds by each target's own speed.

One line of assignments in order of time serves all targets: each enters it once and leaves it
once, so the sums cost constant time whatever the window holds.
"""

from collections import deque
from dataclasses import dataclass

from mesh.core.policies.e2_tree import Holder, Node
from mesh.core.policies.speed import TYPICAL, Speed
from mesh.core.requests.request import Served

OUTPUT_TOKENS = 45.0  # of an answer while none has ended: Preble's workloads have 4 to 190
ASSIGNMENTS_MAX = 262_144  # within the window, over all targets; then the oldest leave early


class Account(Holder):
    """One target: what it holds, and what it was given within the window."""

    __slots__ = (
        "answers",
        "given",
        "load_s",
        "missed_tokens",
        "output_tokens",
        "requests",
        "said",
        "speed",
    )

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.speed: Speed = TYPICAL
        self.said: object = None  # what `speed` was read from
        self.given = 0  # requests, ever
        self.requests = 0
        self.missed_tokens = 0
        self.answers = 0
        self.output_tokens = 0
        self.load_s = 0.0  # Preble's L

    @property
    def prefill_s(self) -> float:
        """Time to compute what its requests missed in its cache."""
        speed = self.speed
        return self.requests * speed.prefill_base_s + self.missed_tokens * speed.prefill_s_per_token

    @property
    def decode_s(self) -> float:
        """Time to generate its answers, by their average length."""
        average = self.output_tokens / self.answers if self.answers else OUTPUT_TOKENS
        return self.requests * average * self.speed.decode_s_per_token

    def reprice(self) -> None:
        """To be called when anything that `load_s` adds up from has changed."""
        self.load_s = self.prefill_s + self.decode_s


@dataclass(slots=True, eq=False)
class Assignment:
    """One request given to one target. `leaf`: its prompt's end; `shared`: its key portion."""

    account: Account
    leaf: Node[Account]
    shared: Node[Account] | None
    missed_tokens: int
    at: float
    output_tokens: int | None = None  # once it is answered
    began: bool = False
    counted: bool = True  # its numbers are in its account


class Window:
    """Assignments of the last `window_s` seconds, the oldest first."""

    def __init__(self, window_s: float, assignments_max: int = ASSIGNMENTS_MAX) -> None:
        self._window_s = window_s
        self._assignments_max = assignments_max
        self._line: deque[Assignment] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, assignment: Assignment) -> None:
        """A request went to its account, which holds the load from now on."""
        self._line.append(assignment)
        account = assignment.account
        account.given += 1
        account.requests += 1
        account.missed_tokens += assignment.missed_tokens
        account.reprice()

    def answered(self, assignment: Assignment, served: Served) -> None:
        """Its answer is known: how long it was, and what the engine really had to compute."""
        if not assignment.counted:
            return
        account = assignment.account
        if served.output_tokens is not None and assignment.output_tokens is None:
            assignment.output_tokens = served.output_tokens
            account.answers += 1
            account.output_tokens += served.output_tokens
        if served.prompt_tokens is not None and served.cached_tokens is not None:
            missed_tokens = max(0, served.prompt_tokens - served.cached_tokens)
            account.missed_tokens += missed_tokens - assignment.missed_tokens
            assignment.missed_tokens = missed_tokens
        account.reprice()

    def take_back(self, assignment: Assignment) -> bool:
        """It counts no longer; False if it did not before."""
        if not assignment.counted:
            return False
        assignment.counted = False
        account = assignment.account
        account.requests -= 1
        account.missed_tokens -= assignment.missed_tokens
        if assignment.output_tokens is not None:
            account.answers -= 1
            account.output_tokens -= assignment.output_tokens
        account.reprice()
        return True

    def expire(self, now: float) -> list[Assignment]:
        """Take back what has left the window; returns those that counted until now."""
        line, left = self._line, []
        while line and (line[0].at <= now - self._window_s or len(line) > self._assignments_max):
            assignment = line.popleft()
            if self.take_back(assignment):
                left.append(assignment)
        return left
