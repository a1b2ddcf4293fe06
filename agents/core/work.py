"""Work, from its message to the engine: whether the agent takes it, and what becomes of it until
the engine has it.

Reads: adapters, engine, hangs, offline, replica, requests, routers, work_subject.
Writes: acks, fence, refused_total.
"""

from agents.core import adapters, offline_work
from agents.core.answers import finish, forget
from agents.core.cut_requests import plain_answer_tokens
from agents.core.effects import DropWork, Refuse, RequestBody, ScrapeNow
from agents.core.events import AdapterLoadEnded, BodyPartArrived, RouterKey, WorkArrived
from agents.core.heartbeat import is_full, load_counts, replica_state
from agents.core.requests import HELD_BYTES_MAX, AgentRequest, BodyLost
from agents.core.state import AgentState
from agents.core.work_message import BadWork, WorkRequest, parse_handoff, parse_work
from schemas.engine_routes import CONTINUING_KINDS
from schemas.exchange import BodyWanted, Outcome, Refusal, Refused
from schemas.replies import reply_inbox
from schemas.state import ReplicaState

# States in which work is refused, and the reason that the router gets.
CLOSED = {
    ReplicaState.STARTING: Refusal.ENGINE_DOWN,
    ReplicaState.DOWN: Refusal.ENGINE_DOWN,
    ReplicaState.DRAINING: Refusal.DRAINING,
    ReplicaState.GONE: Refusal.DRAINING,
}
NOT_LOADED = "the engine could not load its adapter"


def arrived(state: AgentState, event: WorkArrived, now: float) -> None:
    """Take a request, or refuse it."""
    inbox, home, requests = event.inbox, state.replica.region, state.requests
    address = reply_inbox("work", state.work_subject, inbox, home, None)
    if address is None:
        state.emit(DropWork(inbox, len(event.body)))
        return
    work, problem = None, ""
    try:
        work = parse_work(event.headers, event.body)
    except BadWork as error:
        problem = str(error)
    if (handoff := parse_handoff(event.headers)) is not None:
        state.acks.record(handoff)
    if requests.find(inbox) is not None:
        return  # frames of two responses would mix
    if work is None:
        refuse(state, inbox, Refusal.BAD_WORK, problem)
        return
    size = len(event.body) if work.body_bytes is None else work.body_bytes
    if not state.fence.admits(work.owner or home, work.term, now):
        refuse(state, inbox, Refusal.NOT_OWNER, offline=work.offline)
        return
    if (reason := _reason_against(state, work, size, now)) is not None:
        refuse(state, inbox, reason, offline=work.offline)
        return
    router = RouterKey(address.region, address.router)
    _take(state, AgentRequest(inbox, router, work, event.headers, size, now), event.body, now)


def body_part_arrived(state: AgentState, event: BodyPartArrived, now: float) -> None:
    """More of a body that comes in parts."""
    record = state.requests.find(event.inbox)
    if record is None:
        return
    try:
        body = state.requests.of(record).add_part(event.inbox, event.offset, event.data, now)
    except BodyLost as problem:
        finish(state, record, Outcome.BODY_LOST, str(problem))
        return
    if body is not None:
        _start(state, record, body, now)


def adapter_load_ended(state: AgentState, event: AdapterLoadEnded, now: float) -> None:
    """The requests that waited for that adapter go to the engine, or elsewhere."""
    for record, body in adapters.load_ended(state, event, now):
        if event.good:
            _send(state, record, body, now)
        else:
            forget(state, record)
            refuse(state, record.inbox, Refusal.WRONG_MODEL, NOT_LOADED)
    state.emit(ScrapeNow())


def refuse(
    state: AgentState, inbox: str, reason: Refusal, detail: str = "", *, offline: bool = False
) -> None:
    """Answer a request with the reason, and with the load as it is now. `detail`: for the log."""
    state.emit(Refuse(inbox, refused(state, reason, offline=offline), detail))


def refused(state: AgentState, reason: Refusal, *, offline: bool) -> Refused:
    """One more request is refused."""
    state.refused_total += not offline
    load = load_counts(state)
    return Refused(
        reason=reason,
        region=state.replica.region,
        replica=state.replica.replica,
        pending=-1 if load.pending is None else load.pending,
        running=-1 if load.running is None else load.running,
    )


def _reason_against(state: AgentState, work: WorkRequest, size: int, now: float) -> Refusal | None:
    replica, engine, taken = state.replica, state.engine, replica_state(state)
    if taken in CLOSED:
        return CLOSED[taken]
    if (work.stage or replica.kv) and not replica.computes(work.role):
        return Refusal.WRONG_MODEL
    if work.continues and replica.engine not in CONTINUING_KINDS:
        return Refusal.WRONG_MODEL
    if not engine.serves(work.model, work.path):
        reason = adapters.reason_against(state, work, now)
        if reason is not None:
            return reason
    if work.residency and not replica.fits_residency(work.residency):
        return Refusal.RESIDENCY
    if work.offline:
        has_room = offline_work.has_room(state, work, size, now)
        return None if has_room else Refusal.NO_OFFLINE_ROOM
    if state.requests.online.held_bytes + size > HELD_BYTES_MAX:
        return Refusal.FULL
    return Refusal.FULL if is_full(state, may_queue=work.may_queue) else None


def _take(state: AgentState, record: AgentRequest, body: bytes, now: float) -> None:
    """`body`: unless it comes in parts."""
    work, replica = record.work, state.replica
    state.routers.join(record.router, now)
    state.requests.of(record).add(record, now)
    if work.model in state.adapters.used_at:
        adapters.used(state, work.model, now)
    if work.deadline_s <= 0.0:
        finish(state, record, Outcome.DEADLINE, "no time was left on arrival")
    elif work.body_bytes is None:
        _start(state, record, body, now)
    else:
        state.emit(RequestBody(record.inbox, BodyWanted(replica.region, replica.replica)))


def _start(state: AgentState, record: AgentRequest, body: bytes, now: float) -> None:
    """Its body is whole. An offline request waits for what online ones leave."""
    work = record.work
    state.hangs.seen(work.path, work.model, answered=False)
    if work.offline:
        offline_work.hold(state, record, body, now)
    elif not state.replica.adapters or adapters.is_loaded(state, work.model):
        _send(state, record, body, now)
    elif not adapters.wait(state, record, body, now):
        forget(state, record)
        refuse(state, record.inbox, Refusal.FULL, "no room for its adapter any more")


def _send(state: AgentState, record: AgentRequest, body: bytes, now: float) -> None:
    work, engine = record.work, state.engine
    state.requests.online.send(record, now)
    if state.replica.counts_own and work.generates:
        record.answer_tokens = plain_answer_tokens(body)
    if state.offline is not None:
        offline_work.online_sent(state.offline, record, now)
    if engine.loaded.on_demand:  # it has to load the model now, if it has not:
        engine.loaded.sent(work.model, now)
        state.hangs.seen(work.path, work.model, answered=True)  # that one is asked if it hangs
    state.emit(record.relay(body))
