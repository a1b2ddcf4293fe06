"""The agent's offline requests: their records and bodies, and what the admission decides of them.

They are kept apart from the online ones, so that no number of an online request's load counts them.
What the engine itself reports covers both; `online_part` takes the offline requests out of it:
engines serve what waits in order of arrival (by priority where that is used), so those that wait
are the last ones sent of those without a first byte. A scrape is of the moment when it began: what
was at the engine then is taken out, though it may have begun or ended since.

Reads: replica, routers.
Writes: offline, requests.
"""

from dataclasses import replace
from typing import NamedTuple

from agents.core.effects import AbortRelay, HoldWork, SendEnd
from agents.core.events import EngineReading, EngineScraped, RelayEnded
from agents.core.offline_request import (
    Abort,
    Admit,
    Decision,
    read_fields,
    read_request,
    with_priority,
)
from agents.core.requests import BYTES_PER_TOKEN, AgentRequest
from agents.core.state import AgentState, OfflineTable
from agents.core.work_message import WorkRequest
from schemas.exchange import Outcome

GIVEN_BACK = "given back for online requests"
NO_ROOM = "no room for it any more"
HELD_BYTES_MAX = 64 * 1024 * 1024  # beside what online requests may hold


class OfflineTotals(NamedTuple):
    """Since the agent began. `tokens`: of prompts and answers, as the engine counted them."""

    admitted: int = 0
    preempted: int = 0
    done: int = 0
    tokens: int = 0


def totals(state: AgentState) -> OfflineTotals:
    """For metrics; zeros without a profile."""
    if (offline := state.offline) is None:
        return OfflineTotals()
    admission = offline.admission
    preempted = admission.given_back_total + admission.aborted_total
    return OfflineTotals(admission.admitted_total, preempted, offline.done, offline.tokens)


def has_room(state: AgentState, work: WorkRequest, size: int, now: float) -> bool:
    """Whether to take a request whose body has that size; its answer's bound is in there."""
    profile, table = state.replica.offline, state.requests.offline
    if profile is None or state.offline is None or table.not_sent >= profile.queued_requests_max:
        return False
    if table.held_bytes + size > HELD_BYTES_MAX:
        return False
    prompt_tokens = work.prefill_tokens
    if prompt_tokens is None:
        prompt_tokens = size // BYTES_PER_TOKEN
    return prompt_tokens < state.offline.admission.room_tokens(now)


def hold(state: AgentState, record: AgentRequest, body: bytes, now: float) -> None:
    """Its body is whole: queue it, or give it back."""
    assert state.offline is not None, "taken without a profile"
    fields, generates = read_fields(body), record.work.generates
    request = read_request(record.inbox, record.prompt_tokens, fields, generates=generates)
    if not state.offline.admission.offer(request, now):
        _give_back(state, record, NO_ROOM)
        return
    priority = state.replica.offline_priority
    if priority is not None and fields is not None:
        body = with_priority(body, fields, priority)
    state.offline.bodies[record.inbox] = body
    state.requests.offline.queue(record)
    state.emit(HoldWork(record.inbox))


def decide(
    state: AgentState, offline: OfflineTable, now: float, *, full: bool, is_open: bool
) -> None:
    """What to do about offline requests now; call it after each event. `full`: new online work
    would be refused; `is_open`: the replica takes work at all."""
    admission = offline.admission
    decisions = admission.decide(now, full=full) if is_open else admission.give_back_all()
    for decision in decisions:
        _perform(state, offline, decision, now)


def _perform(state: AgentState, offline: OfflineTable, decision: Decision, now: float) -> None:
    table, inbox = state.requests.offline, str(decision.key)
    record = table.by_inbox[inbox]
    if isinstance(decision, Admit):
        table.send(record, now)
        state.emit(record.relay(offline.bodies.pop(inbox)))
    elif not isinstance(decision, Abort):
        _give_back(state, record, GIVEN_BACK)
    elif table.abort(record):
        state.emit(AbortRelay(inbox, Outcome.PREEMPTED, GIVEN_BACK))


def _give_back(state: AgentState, record: AgentRequest, why: str) -> None:
    if state.offline is not None:
        state.offline.bodies.pop(record.inbox, None)
    state.requests.offline.remove(record)
    state.routers.leave(record.router)
    state.emit(SendEnd(record.inbox, Outcome.PREEMPTED, why))


def withdraw(offline: OfflineTable, record: AgentRequest) -> None:
    """It ends without having been at the engine."""
    if offline.bodies.pop(record.inbox, None) is not None:
        offline.admission.withdraw(record.inbox)


# Requests at the engine, online ones too.


def online_sent(offline: OfflineTable, record: AgentRequest, now: float) -> None:
    """An online request was sent to the engine. Its time to first token measures nothing of
    the engine if a prompt of an offline one is before it."""
    if offline.admission.offline_prefilling():
        record.alone = False
    context_tokens = record.body_bytes // BYTES_PER_TOKEN  # what is cached included
    offline.admission.online_sent(
        record.inbox,
        record.prompt_tokens,
        context_tokens,
        now,
        generates=record.work.generates,
    )


def ended(offline: OfflineTable, record: AgentRequest, event: RelayEnded, now: float) -> None:
    """A request has left the engine."""
    is_offline, usage = record.work.offline, event.usage
    if is_offline and record.sent_at is not None:
        offline.ended.append((record.sent_at, now))
    done = event.outcome is Outcome.DONE
    streamed_tokens = usage.completion_tokens if done and event.streamed else -1
    offline.admission.ended(event.inbox, now, streamed_tokens)
    if done and is_offline:
        offline.done += 1
        offline.tokens += max(0, usage.prompt_tokens) + max(0, usage.completion_tokens)


# What the engine reports.


def online_part(
    state: AgentState, offline: OfflineTable, event: EngineScraped, now: float
) -> EngineScraped:
    """The scrape without the offline requests."""
    reading, began_at, table = event.reading, event.began_at, state.requests.offline
    table.scraped(began_at, now)
    waiting = _online_waiting(state, reading, began_at)
    seen = reading
    if seen.batch_max is None:
        seen = replace(seen, batch_max=state.replica.batch_max)
    offline.admission.scraped(seen, waiting or 0, now)
    while offline.ended and offline.ended[0][1] <= began_at:
        offline.ended.popleft()
    if not (table.at_engine or offline.ended):
        return event
    sent = [record.sent_at for record in table.by_inbox.values()]
    sent += [sent_at for sent_at, _ in offline.ended]
    there = [at for at in sent if at is not None and at <= began_at]
    running = reading.running
    if running is not None:
        offline_waiting = (reading.waiting or 0) - (waiting or 0)
        running = max(0, running - max(0, len(there) - offline_waiting))
    used, capacity = reading.kv_used_ratio, reading.kv_capacity_tokens
    if used is not None and capacity:
        used = max(0.0, used - offline.admission.offline_kv_tokens() / capacity)
    return replace(
        event, reading=replace(reading, waiting=waiting, running=running, kv_used_ratio=used)
    )


def _online_waiting(state: AgentState, reading: EngineReading, began_at: float) -> int | None:
    if not reading.waiting:
        return reading.waiting
    requests = state.requests
    order = [(sent_at, False) for sent_at in requests.online.unanswered(began_at)]
    order += [(sent_at, True) for sent_at in requests.offline.unanswered(began_at)]
    last_by_priority = state.replica.offline_priority is not None
    order.sort(key=lambda one: (last_by_priority and one[1], one[0]))
    return reading.waiting - sum(is_offline for _, is_offline in order[-reading.waiting :])
