"""What the agent knows of its engine: the last reading, its models, its health, its speeds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from agents.core import load
from agents.core.answers import Answer, AnswerTable
from agents.core.events import AnswerEnded, EngineFailed, EngineRead
from agents.core.health import EngineHealth
from agents.core.load import NOBODY_HANDED, Handed
from agents.core.prefill import PrefillEstimator, PrefillLine
from agents.core.reading import NOTHING_KNOWN, EngineReading
from agents.core.served import Served
from agents.core.stall import Owed, StallWatch
from schemas.exchange import Outcome
from schemas.ids import ModelId
from schemas.state import DownReason, ModelCard, ReplicaState


class Load(NamedTuple):
    """The replica's load at one moment; None where the engine does not show it."""

    pending: int | None
    running: int | None


class EngineView:
    """Fed with looks at the engine and with finished answers."""

    def __init__(self, *, batch_max: int | None, counts_own: bool) -> None:
        """`batch_max`: the operator's word, where the metrics don't say it.

        `counts_own`: the engine shows no counts; what it runs is what it was handed.
        """
        self._batch_max = batch_max
        self._counts_own = counts_own
        self._prefill = PrefillEstimator()
        self.health = EngineHealth()
        self.stall = StallWatch()
        self.served = Served()
        self.reading: EngineReading = NOTHING_KNOWN
        self.held: frozenset[str] = frozenset()  # inboxes of answers that wait for their clients
        self.read_at: float | None = None  # when the last reading began
        self.models: tuple[ModelId, ...] = ()
        self.cards: Mapping[ModelId, ModelCard] = {}

    @property
    def state(self) -> ReplicaState:
        """Whether it can be given work."""
        return ReplicaState.DOWN if self.stall.hung else self.health.state

    @property
    def down_reason(self) -> DownReason | None:
        """Why it is down; None if it isn't."""
        if self.health.state is ReplicaState.DOWN:
            return DownReason.UNREACHABLE
        return DownReason.HUNG if self.stall.hung else None

    def wait_anew(self, now: float) -> None:
        """This process stood still: what the engine did meanwhile is still to be read."""
        self.health.wait_anew(now)
        self.stall.wait_anew(now)

    def stalls(self, event: EngineRead, answers: AnswerTable, now: float) -> bool:
        """Whether a good look shows that it hangs as of now."""
        owed = Owed(answers.handed - len(event.held), answers.longest_prompt_tokens)
        return self.stall.look(event.reading.progress, event.heard_at, owed, self.line, now)

    @property
    def line(self) -> PrefillLine | None:
        return self._prefill.line()

    @property
    def prefix_hit_ratio(self) -> float | None:
        """Of what this agent served, else of the engine's whole life."""
        ours = self.served.prefix_hit_ratio
        return self.reading.prefix_hit_ratio if ours is None else ours

    def read(self, event: EngineRead) -> None:
        reading = event.reading
        if reading.batch_max is None and self._batch_max is not None:
            reading = replace(reading, batch_max=self._batch_max)
        self.reading = reading
        self.read_at, self.held = event.began_at, event.held
        if event.models is not None:
            self.models, self.cards = event.models, event.cards
        self.health.succeeded()

    def failed(self, event: EngineFailed, now: float) -> None:
        self.health.failed(event, now)

    def load(self, answers: AnswerTable) -> Load:
        """Pending and running by the rules in `load`."""
        pending = load.pending(self.reading, self._handed(answers), self.served.tokens_per_answer)
        running = answers.handed if self._counts_own else self.reading.running
        return Load(pending, running)

    def _handed(self, answers: AnswerTable) -> Handed:
        if self.reading.waiting is None or self.read_at is None:
            return NOBODY_HANDED
        counted = answers.since_look
        return Handed(counted.still, counted.settled, counted.since)

    def is_unqueued(self, answers: AnswerTable) -> bool:
        """Whether an answer handed over now has the engine's prefill to itself.

        All that can stand before it is what was handed over and has no first byte: work is taken
        while nothing waits, or by the word of a router that knows what does.
        """
        return answers.since_look.unbegun == 0

    def learn(self, answer: Answer, event: AnswerEnded, now: float) -> None:
        """Take what a finished answer teaches; partial and unstreamed ones teach less."""
        if event.outcome is not Outcome.DONE or answer.handed_at is None:
            return
        streamed = event.streamed and answer.began_at is not None
        decode_s = now - answer.began_at if streamed and answer.began_at is not None else None
        if not answer.work.warm:
            self.served.add(event.usage, decode_s)
        usage = event.usage
        if not streamed or not answer.unqueued or answer.began_at is None:
            return
        if usage.prompt_tokens < 0 or usage.cached_tokens < 0:
            return
        uncached = max(0, usage.prompt_tokens - usage.cached_tokens)
        self._prefill.add(uncached, answer.began_at - answer.handed_at)
