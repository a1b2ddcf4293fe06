"""The engine's answers: they begin and end; and how a request ends that does not end by itself.

Reads: replica.
Writes: cuts, engine, hangs, offline, published, requests, routers, served_total.
"""

from collections.abc import Iterable

from agents.core import adapters, offline_work
from agents.core.effects import AbortRelay, ScrapeNow, SendEnd
from agents.core.engine_results import ANSWERED, Verdict
from agents.core.events import CancelArrived, RelayBegan, RelayEnded, RouterKey
from agents.core.requests import AgentRequest
from agents.core.state import AgentState
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import Outcome

# After these the engine may be gone, or another one may be in its place.
_DOUBTFUL = (Outcome.ENGINE_LOST, Outcome.ENGINE_FAILED)


def began(state: AgentState, event: RelayBegan, now: float) -> None:
    """The first byte of an answer came."""
    requests, engine, hangs = state.requests, state.engine, state.hangs
    record = requests.find(event.inbox)
    if record is None or record.sent_at is None:
        return
    work = record.work
    requests.of(record).begin(record, now)
    if state.offline is not None:
        state.offline.admission.began(event.inbox, now)
    if engine.loaded.on_demand:
        (engine.loaded.answered if event.good else engine.loaded.failed)(work.model, now)
    if event.good and work.path not in SERVER_PATHS:
        hangs.seen(work.path, work.model, answered=True)
        hangs.begun(record.prompt_tokens, record.sent_at, now)
        if engine.counts_own:
            hangs.answered(work.model, now)
        if engine.width is not None and record.is_stream:
            engine.width.began(record, _others(state, record), now)
            engine.bound(now)


def ended(state: AgentState, event: RelayEnded, now: float) -> None:
    """The engine has answered a request, or will not."""
    requests, engine, is_done = state.requests, state.engine, event.outcome is Outcome.DONE
    record = requests.find(event.inbox)
    assert record is not None and record.sent_at is not None, "an end without a StartRelay"
    work = record.work
    if is_done and not work.offline:
        began_at = record.first_token_at(streamed=event.streamed)
        alone, odd = record.alone and not work.is_decode, work.is_odd
        engine.learn(event.usage, record.sent_at, began_at, now, alone=alone, odd=odd)
        state.served_total += 1
    elif not is_done and engine.loaded.on_demand:
        engine.loaded.failed(work.model, now)
    if state.replica.counts_own and work.generates:
        _count_cut(state, record, event, record.sent_at, now)
    if engine.width is not None and record.is_stream:
        engine.width.ended(record, _others(state, record), now)
        engine.bound(now)
    if state.offline is not None:
        offline_work.ended(state.offline, record, event, now)
    state.routers.leave(record.router)
    requests.end(record, record.sent_at, event.outcome, now)
    if event.verdict is ANSWERED:
        engine.results.answered(now)
        if engine.limit.is_lowered:
            engine.limit.answered(now)
    else:
        _take_verdict(state, event.verdict, now)
    if event.outcome in _DOUBTFUL:
        state.emit(ScrapeNow())


def _others(state: AgentState, record: AgentRequest) -> list[AgentRequest]:
    """What the engine has besides."""
    every = state.requests.all()
    return [one for one in every if one.sent_at is not None and one is not record]


def _count_cut(
    state: AgentState, record: AgentRequest, event: RelayEnded, sent_at: float, now: float
) -> None:
    """Of an engine that shows no numbers, which may go on with a request that was cut."""
    if event.verdict is ANSWERED:
        state.cuts.answered(event.usage.completion_tokens, sent_at, now)
    elif event.outcome is Outcome.DONE:
        return  # an error, which an engine may answer beside what it computes
    elif record.aborted and record.answer_tokens is not None:
        state.cuts.cut(record.answer_tokens, sent_at, now)


def _take_verdict(state: AgentState, verdict: Verdict, now: float) -> None:
    """Of a request that the engine did not answer well, and that no longer counts as its."""
    engine = state.engine
    if verdict.failure is not None:
        if engine.results.failed(verdict.failure, now):
            state.published = None  # to be told at once
    elif verdict.too_many_s is not None:
        engine.limit.too_many(verdict.too_many_s, state.requests.at_engine, now)


# Ends that are not the engine's.


def cancelled(state: AgentState, event: CancelArrived, now: float) -> None:
    """Its router wants no more of it."""
    if (record := state.requests.find(event.inbox)) is not None:
        end(state, record, Outcome.CANCELLED, "cancelled")


def orphan(state: AgentState, router: RouterKey, why: str) -> None:
    """Nobody reads the answers to that router any more."""
    orphans = [record for record in state.requests.all() if record.router == router]
    end_all(state, orphans, Outcome.CANCELLED, why)


def end_all(state: AgentState, records: Iterable[AgentRequest], outcome: Outcome, why: str) -> None:
    """End each of them."""
    for record in list(records):
        end(state, record, outcome, why)


def end(state: AgentState, record: AgentRequest, outcome: Outcome, why: str) -> None:
    """End a request that has not ended by itself: abort its relay, if it has one."""
    if record.sent_at is None:
        finish(state, record, outcome, why)
    elif state.requests.of(record).abort(record):
        state.emit(AbortRelay(record.inbox, outcome, why))


def finish(state: AgentState, record: AgentRequest, outcome: Outcome, why: str) -> None:
    """End a request that the engine has not been given."""
    forget(state, record)
    state.requests.totals.add(outcome)
    state.emit(SendEnd(record.inbox, outcome, why))


def forget(state: AgentState, record: AgentRequest) -> None:
    """It leaves without having been at the engine; the caller answers it."""
    if state.offline is not None:
        offline_work.withdraw(state.offline, record)
    adapters.withdraw(state, record)
    state.requests.of(record).remove(record)
    state.routers.leave(record.router)
