"""What follows from scrapes and probes of the engine: what is known of it, and what becomes of the
requests of one that is gone or hangs.

Reads: nothing.
Writes: cuts, engine, hangs, health, offline, requests.
"""

from agents.core import adapters, offline_work, speed_probe
from agents.core.answers import end_all, forget
from agents.core.effects import AbortRelay
from agents.core.engine_health import BLIND_S, EngineBacklog
from agents.core.events import EngineScraped, ProbeEnded, ScrapeFailed
from agents.core.state import AgentState
from agents.core.work import refuse, refused
from schemas.exchange import Outcome, Refusal
from schemas.state import ReplicaState

HANGS = "the engine hangs: it answers scrapes and computes nothing"


def scraped(state: AgentState, event: EngineScraped, now: float) -> None:
    """A good scrape."""
    requests, engine, health = state.requests, state.engine, state.health
    event = speed_probe.scraped(state, event)
    offline = state.offline
    own = event if offline is None else offline_work.online_part(state, offline, event, now)
    engine.scraped(own)
    adapters.scraped(state, event, health.state)
    asleep = bool(event.reading.is_asleep)
    if state.hangs.shows_restart(event.reading.progress):
        _forget_answers(state, now)
    if asleep:
        health.slept(now)
        engine.results.clear()  # what it was, not what it is when it wakes up
    else:
        health.succeeded(wants_proof=event.pages.wants_proof)
    requests.online.scraped(event.began_at, now)
    at_engine = requests.at_engine - len(event.held) - requests.waiting_for_others(now)
    is_loading = engine.loaded.loading or _may_load(state, now)
    backlog = EngineBacklog(0 if asleep else at_engine, requests.longest_prompt_tokens, is_loading)
    progress, line = event.reading.progress, engine.prefill.line
    if state.hangs.scraped(progress, event.last_content_at, backlog, line, now):
        _let_go(state, also_sent=True)


def _may_load(state: AgentState, now: float) -> bool:
    """Whether an engine that shows no numbers may be loading a model for a request, or still
    computes one that was cut. Looked into only when it has been silent for long."""
    hangs = state.hangs
    if not state.engine.counts_own or hangs.silent_s(now) < BLIND_S:
        return False
    silent_at = now - hangs.silent_s(now) + BLIND_S
    if state.cuts.count and state.cuts.may_compute(silent_at, now):
        return True
    # One with a single model has had requests for it ever since, and keeps it while it has any.
    since = now - hangs.silent_s(now) if len(state.engine.models) == 1 else now
    return any(
        hangs.may_load(record.work.model, min(since, record.sent_at))
        for record in state.requests.waiting()
        if record.sent_at is not None
    )


def scrape_failed(state: AgentState, event: ScrapeFailed, now: float) -> None:
    """A bad scrape, or none."""
    state.health.failed(event, now)
    state.hangs.scrape_failed()
    if state.health.state is ReplicaState.DOWN:
        _forget_answers(state, now)


def _forget_answers(state: AgentState, now: float) -> None:
    """What answered, failed or said 429 is gone: another process is there, or will be."""
    state.cuts.clear()
    state.engine.results.clear()
    state.engine.limit.clear(now)
    if state.engine.width is not None:
        state.engine.width.clear()
        state.engine.bound(now)


def probe_ended(state: AgentState, event: ProbeEnded, now: float) -> None:
    """The engine answered a probe, or did not."""
    if state.hangs.probed(now, answered=event.answered):
        _let_go(state, also_sent=False)


def _let_go(state: AgentState, *, also_sent: bool) -> None:
    """The engine hangs: requests without a byte are placed elsewhere, and have not failed.

    `also_sent`: those at the engine too. Not if it may compute them after all.
    """
    requests, reason = state.requests, Refusal.ENGINE_DOWN
    for record in requests.waiting():
        offline = record.work.offline
        if record.sent_at is None:
            forget(state, record)
            refuse(state, record.inbox, reason, HANGS, offline=offline)
        elif also_sent and requests.of(record).abort(record):
            fresh = refused(state, reason, offline=offline)
            state.emit(AbortRelay(record.inbox, Outcome.ENGINE_LOST, HANGS, fresh))


def end_lost(state: AgentState, now: float) -> None:
    """Time has passed: end the requests of an engine that is away, or hangs, for too long."""
    requests = state.requests
    if state.health.lost(now):
        end_all(state, requests.all(), Outcome.ENGINE_LOST, "the engine fell silent")
    if state.hangs.is_given_up(now):
        held = state.engine.held
        stuck = [record for record in requests.all() if record.inbox not in held]
        end_all(state, stuck, Outcome.ENGINE_LOST, HANGS)


def probe(state: AgentState, now: float) -> None:
    """Time has passed: probe an engine that hangs, or that nothing but an answer shows to be up."""
    loaded, models, wants_proof = state.engine.loaded, state.engine.models, state.health.wants_proof
    if loaded.on_demand:
        models = loaded.to_probe(models)
        if wants_proof:  # it must not load a model for that
            wants_proof = bool(models) and all(loaded.may_ask(each, now) for each in models)
    asked = state.hangs.probe(models, now, wants_proof=wants_proof)
    if asked is not None:
        state.emit(asked)


def down_because(state: AgentState, now: float) -> str | None:
    """For the log: why it is down though its last scrape was good."""
    if state.health.asleep:
        return "engine asleep: it was told to sleep and not to wake up"
    if not state.hangs.hung:
        return None
    silence = f"no output and no counter moved for {state.hangs.silent_s(now):.1f} s"
    return f"engine hung: {len(state.requests)} requests outstanding, {silence}"
