"""All requests of an agent: the online ones and, apart from them, the offline ones."""

from collections.abc import Iterable

from agents.core.requests import AgentRequest, RequestTable


class RequestTables:
    """Two tables with one view on both. Every count of load is of `online` alone."""

    def __init__(self) -> None:
        self.online = RequestTable()
        self.offline = RequestTable()

    def __len__(self) -> int:
        return len(self.online.by_inbox) + len(self.offline.by_inbox)

    def of(self, record: AgentRequest) -> RequestTable:
        """The table that the record belongs to."""
        return self.offline if record.work.offline else self.online

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

    @property
    def longest_prompt_tokens(self) -> int:
        """Of those at the engine without a first byte."""
        return max(self.online.longest_prompt_tokens, self.offline.longest_prompt_tokens)
