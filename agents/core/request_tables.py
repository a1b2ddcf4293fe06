"""All requests of an agent: the online ones and, apart from them, the offline ones."""

from collections.abc import Iterable
from dataclasses import dataclass

from agents.core.requests import AgentRequest, RequestTable
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import Outcome

OTHER_S = 60.0  # far more than a prompt and its transfer take
_NO_FAILURES = (Outcome.DONE, Outcome.CANCELLED, Outcome.PREEMPTED)


@dataclass(slots=True)
class WorkTotals:
    """Requests taken and ended since the agent started."""

    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    engine_s: float = 0.0  # of all of them, from sending to the last byte
    last_failure: Outcome | None = None

    def add(self, outcome: Outcome, engine_s: float = 0.0) -> None:
        """One more has ended; `engine_s`: 0 where the engine never had it."""
        self.ended += 1
        self.engine_s += engine_s
        if outcome is Outcome.CANCELLED:
            self.cancelled += 1
        elif outcome not in _NO_FAILURES:
            self.failed += 1
            self.last_failure = outcome


class RequestTables:
    """Two tables with one view on both. Every count of load is of `online` alone."""

    def __init__(self) -> None:
        self.online = RequestTable()
        self.offline = RequestTable()
        self.totals = WorkTotals()

    def __len__(self) -> int:
        return len(self.online.by_inbox) + len(self.offline.by_inbox)

    def of(self, record: AgentRequest) -> RequestTable:
        """The table that the record belongs to."""
        return self.offline if record.work.offline else self.online

    def end(self, record: AgentRequest, sent_at: float, outcome: Outcome, now: float) -> None:
        """The relay of a request is over."""
        table = self.of(record)
        table.settle(record, now)
        table.remove(record)
        self.totals.add(outcome, now - sent_at)

    def find(self, inbox: str) -> AgentRequest | None:
        """The request that is answered to this inbox."""
        return self.online.by_inbox.get(inbox) or self.offline.by_inbox.get(inbox)

    def all(self) -> list[AgentRequest]:
        """Online ones first."""
        return [*self.online.by_inbox.values(), *self.offline.by_inbox.values()]

    def waiting(self) -> list[AgentRequest]:
        """Those without a first byte."""
        return [*self.online.waiting(), *self.offline.waiting()]

    def overdue(self, now: float) -> list[AgentRequest]:
        """Those whose deadline has passed."""
        return [*self.online.overdue(now), *self.offline.overdue(now)]

    def without_next_part(self, now: float) -> Iterable[AgentRequest]:
        """Those whose next part is overdue."""
        return [*self.online.without_next_part(now), *self.offline.without_next_part(now)]

    def restart_clock(self, now: float) -> None:
        """No part could arrive until now."""
        self.online.restart_clock(now)
        self.offline.restart_clock(now)

    @property
    def at_engine(self) -> int:
        """Sent to the engine and not ended."""
        return self.online.at_engine + self.offline.at_engine

    def waiting_for_others(self, now: float) -> int:
        """Requests at the engine that are no sign of a hang: stages that wait for another engine,
        and what its HTTP server answers alone."""
        return sum(
            (record.waits_for_other and now - record.sent_at < OTHER_S)
            or record.work.path in SERVER_PATHS
            for record in self.online.waiting()
            if record.sent_at is not None
        )

    @property
    def longest_prompt_tokens(self) -> int:
        """Of those at the engine without a first byte."""
        return max(self.online.longest_prompt_tokens, self.offline.longest_prompt_tokens)
