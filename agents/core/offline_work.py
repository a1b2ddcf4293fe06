"""The agent's offline requests: their records and bodies, and what the admission decides of them.

They are kept apart from the online ones, so that no number of an online request's load counts them.
What the engine itself reports covers both; `online_part` takes the offline requests out of it:
engines serve what waits in order of arrival (by priority where that is used), so those that wait
are the last ones sent of those without a first byte. A scrape is of the moment when it began: what
was at the engine then is taken out, though it may have begun or ended since.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from agents.core import effects
from agents.core.effects import AgentEffect
from agents.core.events import EngineReading, EngineScraped, RelayEnded
from agents.core.heartbeat import ReplicaConfig
from agents.core.offline_admission import OfflineAdmission
from agents.core.offline_request import (
    Abort,
    Admit,
    Decision,
    read_fields,
    read_request,
    with_priority,
)
from agents.core.request_tables import RequestTables
from agents.core.requests import BYTES_PER_TOKEN, AgentRequest, WorkRequest
from agents.core.routers import RouterLiveness
from schemas.exchange import Outcome

GIVEN_BACK = "given back for online requests"
NO_ROOM = "no room for it any more"
ENDED_MAX = 4096  # remembered between two scrapes
HELD_BYTES_MAX = 64 * 1024 * 1024  # beside what online requests may hold


class OfflineTotals(NamedTuple):
    """Since the agent began. `tokens`: of prompts and answers, as the engine counted them."""

    admitted: int = 0
    preempted: int = 0
    done: int = 0
    tokens: int = 0


class OfflineWork:
    """Without a profile it takes none. Call `decide` after every event."""

    def __init__(
        self, replica: ReplicaConfig, tables: RequestTables, routers: RouterLiveness
    ) -> None:
        profile = replica.offline
        self._online = tables.online
        self._table = tables.offline
        self._admission = None if profile is None else OfflineAdmission(profile)
        self._queued_max = 0 if profile is None else profile.queued_requests_max
        self._batch_max = replica.batch_max
        self._priority = replica.offline_priority
        self._routers = routers
        self._bodies: dict[str, bytes] = {}  # of those that the admission has queued
        # Of those that have left the engine since the last scrape began: when sent, when ended.
        self._ended: deque[tuple[float, float]] = deque(maxlen=ENDED_MAX)
        self._done = self._tokens = 0

    @property
    def waiting(self) -> int:
        """Taken and not given to the engine."""
        return len(self._table.by_inbox) - self._table.at_engine

    @property
    def totals(self) -> OfflineTotals:
        admission = self._admission
        if admission is None:
            return OfflineTotals()
        preempted = admission.given_back_total + admission.aborted_total
        return OfflineTotals(admission.admitted_total, preempted, self._done, self._tokens)

    def room_tokens(self, now: float, *, is_open: bool) -> int | None:
        """For the heartbeat; None without a profile."""
        if self._admission is None:
            return None
        return self._admission.room_tokens(now) if is_open else 0

    def queue_s(self, now: float) -> float | None:
        """For the heartbeat: predicted wait of an online prompt; None without a profile."""
        return None if self._admission is None else self._admission.queue_s(now)

    def has_room(self, work: WorkRequest, size: int, now: float) -> bool:
        """Whether to take a request whose body has that size; its answer's bound is in there."""
        if self._admission is None or self.waiting >= self._queued_max:
            return False
        if self._table.held_bytes + size > HELD_BYTES_MAX:
            return False
        prompt_tokens = work.prefill_tokens
        if prompt_tokens is None:
            prompt_tokens = size // BYTES_PER_TOKEN
        return prompt_tokens < self._admission.room_tokens(now)

    def hold(self, record: AgentRequest, body: bytes, now: float) -> list[AgentEffect]:
        """Its body is whole: queue it, or give it back."""
        assert self._admission is not None, "taken without a profile"
        inbox = record.inbox
        fields = read_fields(body)
        generates = record.work.generates
        request = read_request(inbox, record.prompt_tokens, fields, generates=generates)
        if not self._admission.offer(request, now):
            return self._give_back(record, NO_ROOM)
        if self._priority is not None and fields is not None:
            body = with_priority(body, fields, self._priority)
        self._bodies[inbox] = body
        self._table.queue(record)
        return [effects.HoldWork(inbox)]

    def decide(self, now: float, *, full: bool, is_open: bool) -> list[AgentEffect]:
        """What to do about offline requests now. `full`: new online work would be refused;
        `is_open`: the replica takes work at all."""
        if self._admission is None:
            return []
        if is_open:
            decisions = self._admission.decide(now, full=full)
        else:
            decisions = self._admission.give_back_all()
        return [effect for each in decisions for effect in self._performed(each, now)]

    def _performed(self, decision: Decision, now: float) -> Iterable[AgentEffect]:
        inbox = str(decision.key)
        record = self._table.by_inbox[inbox]
        if isinstance(decision, Admit):
            self._table.send(record, now)
            yield record.relay(self._bodies.pop(inbox))
        elif isinstance(decision, Abort):
            if self._table.abort(record):
                yield effects.AbortRelay(inbox, Outcome.PREEMPTED, GIVEN_BACK)
        else:
            yield from self._give_back(record, GIVEN_BACK)

    def _give_back(self, record: AgentRequest, why: str) -> list[AgentEffect]:
        self._bodies.pop(record.inbox, None)
        self._table.remove(record)
        self._routers.leave(record.router)
        return [effects.SendEnd(record.inbox, Outcome.PREEMPTED, why)]

    def withdraw(self, record: AgentRequest) -> None:
        """It ends without having been at the engine."""
        if self._bodies.pop(record.inbox, None) is not None and self._admission is not None:
            self._admission.withdraw(record.inbox)

    # Requests at the engine, online ones too.

    def online_sent(self, record: AgentRequest, now: float) -> None:
        """An online request was sent to the engine. Its time to first token measures nothing of
        the engine if a prompt of an offline one is before it."""
        if self._admission is None:
            return
        if self._admission.offline_prefilling():
            record.alone = False
        context_tokens = record.body_bytes // BYTES_PER_TOKEN  # what is cached included
        self._admission.online_sent(
            record.inbox,
            record.prompt_tokens,
            context_tokens,
            now,
            generates=record.work.generates,
        )

    def began(self, inbox: str, now: float) -> None:
        """The first byte of an answer came."""
        if self._admission is not None:
            self._admission.began(inbox, now)

    def ended(self, event: RelayEnded, sent_at: float, now: float, *, offline: bool) -> None:
        """A request has left the engine."""
        if self._admission is None:
            return
        if offline:
            self._ended.append((sent_at, now))
        done, usage = event.outcome is Outcome.DONE, event.usage
        streamed_tokens = usage.completion_tokens if done and event.streamed else -1
        self._admission.ended(event.inbox, now, streamed_tokens)
        if done and offline:
            self._done += 1
            self._tokens += max(0, usage.prompt_tokens) + max(0, usage.completion_tokens)

    def restart_clock(self, now: float) -> None:
        """The agent was stopped until now."""
        if self._admission is not None:
            self._admission.restart_clock(now)

    # What the engine reports.

    def online_part(self, event: EngineScraped, now: float) -> EngineScraped:
        """The scrape without the offline requests."""
        reading, began_at = event.reading, event.began_at
        if self._admission is None:
            return event
        self._table.scraped(began_at, now)
        waiting = self._online_waiting(reading, began_at)
        seen = reading
        if seen.batch_max is None:
            seen = replace(seen, batch_max=self._batch_max)
        self._admission.scraped(seen, waiting or 0, now)
        while self._ended and self._ended[0][1] <= began_at:
            self._ended.popleft()
        if not (self._table.at_engine or self._ended):
            return event
        sent = [record.sent_at for record in self._table.by_inbox.values()]
        sent += [sent_at for sent_at, _ in self._ended]
        there = [at for at in sent if at is not None and at <= began_at]
        running = reading.running
        if running is not None:
            offline_waiting = (reading.waiting or 0) - (waiting or 0)
            running = max(0, running - max(0, len(there) - offline_waiting))
        kv_used_ratio = self._online_kv(reading)
        counts = replace(reading, waiting=waiting, running=running, kv_used_ratio=kv_used_ratio)
        return replace(event, reading=counts)

    def _online_waiting(self, reading: EngineReading, began_at: float) -> int | None:
        if not reading.waiting:
            return reading.waiting
        order = [(sent_at, False) for sent_at in self._online.unanswered(began_at)]
        order += [(sent_at, True) for sent_at in self._table.unanswered(began_at)]
        last_by_priority = self._priority is not None
        order.sort(key=lambda one: (last_by_priority and one[1], one[0]))
        return reading.waiting - sum(is_offline for _, is_offline in order[-reading.waiting :])

    def _online_kv(self, reading: EngineReading) -> float | None:
        used, capacity = reading.kv_used_ratio, reading.kv_capacity_tokens
        if used is None or not capacity or self._admission is None:
            return used
        return max(0.0, used - self._admission.offline_kv_tokens() / capacity)
