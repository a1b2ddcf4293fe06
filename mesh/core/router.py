"""RouterCore: takes events in, gives effects out, and calls the floors below it.

`requests/record.py` has a request's states. The router tries a request on a local replica or
through a peer. A refusal, a loss or an error before the client's first byte leads to another
attempt or to one error; after that byte another engine goes on with the stream, where that is exact
(`lifecycle/continued_streams.py`), or it leads to an error event. A peer's request is placed on a
local replica, held in the same queue (`lifecycle/forwarded.py`), or refused. Its answer goes
straight to the peer's router; this one keeps only its inbox, to report the loss of the replica
there.

Every client's request ends in exactly one of: AnswerEnded or ClientGone (from the host), Fail or
PassEngineError (from here). The core ignores events of an attempt that is not the current one.

Reads and writes: all of the state.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mesh.core import cluster_events
from mesh.core.lifecycle import (
    admission,
    attempts,
    continued_streams,
    ends,
    failed_attempts,
    fair_turns,
    forwarded,
    model_choice,
    queue_scheduler,
    timeouts,
)
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelTargets
from mesh.core.model.request import Request
from mesh.core.model.settings import with_changes
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.record import Cause, RequestRecord, RequestState
from mesh.core.state import RouterState
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import ModelId
from schemas.prompt_writing import PromptWriting, common_writing
from schemas.residency import Labels
from schemas.state import ModelCard

Handler = Callable[[RouterState, Any, float], None]


class RouterCore:
    """Decides and has no side effects: same events, times and seed, same effects."""

    def __init__(self, state: RouterState) -> None:
        """`state`: as it is at the start, of this core alone."""
        self.state = state
        # What hosts read, and metrics.
        self.region, self.replicas, self.peers = state.region, state.replicas, state.peers
        self.inflight, self.held = state.inflight, state.held
        self.gossip, self.held_prefixes = state.gossip, state.held_prefixes
        self.ownership = state.ownership

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """The effects of one event, in order. `now`: seconds, never going back."""
        state = self.state
        if state.unlearned is not None:
            attempts.learn(state)
        if now >= state.ownership.release_at:
            cluster_events.release_expired_leases(state, now)
        HANDLERS[type(event)](state, event, now)
        return self._taken() if state.effects else []

    def finish(self) -> list[fx.Effect]:
        """Learn where the last event's request went, which else the next event begins with."""
        attempts.learn(self.state)
        return self._taken()

    def _taken(self) -> list[fx.Effect]:
        effects = self.state.effects.copy()
        self.state.effects.clear()
        return effects

    @property
    def draining(self) -> bool:
        return self.state.draining

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and peers know that digests come less often."""
        return not self.inflight and self.state.digest.is_slow

    def models(self) -> tuple[ModelId, ...]:
        """Models that some ready replica of the mesh serves now, full or not."""
        return self.state.targets.known(timeouts.ready_models(self.state))

    def known_models(self) -> tuple[ModelId, ...]:
        """Those, and the ones that may come back: requests for them are held, not refused."""
        return self.state.models.names

    def model_card(self, model: ModelId) -> ModelCard:
        """Its card, by an engine of this region rather than of a peer."""
        return timeouts.model_card(self.state, model)

    def prompt_writing(self, model: ModelId) -> PromptWriting:
        """How the region's engines write the prompts of such requests."""
        beats = (replica.heartbeat for replica in self.replicas.serving(model))
        return common_writing((beat.engine, beat.system_first) for beat in beats)

    def model_for(
        self, asked: ModelId, conversation: int, path: str, labels: Labels, now: float
    ) -> ModelId | None:
        """The model that serves this conversation's request for an alias, if one does or may."""
        return model_choice.choose(self.state, asked, conversation, path, labels, now)

    @property
    def has_listened(self) -> bool:
        """Whether replicas and peers have had time to be heard: not where it has just started."""
        return self.state.models.has_listened

    def may_hear_of(self, names: Collection[ModelId]) -> bool:
        """Whether none of them is known, and one may be heard of yet: a request for them is to
        wait, as an error would not be tried again."""
        if self.has_listened or not self.known_models() or not names:
            return False
        return not any(map(self.knows, names))

    def knows(self, name: ModelId) -> bool:
        """Whether some replica serves, or may serve (again), that model on that optional path."""
        return name in self.state.models or self.is_served(name)

    def is_served(self, name: ModelId) -> bool:
        """Whether a replica here has that name, ready or not, or one of a peer is ready for it."""
        return bool(self.replicas.serving(name)) or any(
            peer.ready(name) > 0 for _, peer in self.peers
        )


# Requests.


def _on_request(state: RouterState, event: ev.RequestArrived, now: float) -> None:
    request = event.request
    state.digest.busy(now)
    if not request.kind.ends_here:
        _on_forwarded(state, request, now)
        return
    if request.kind.is_demand:
        state.digest.arrivals.count(now)
    record = RequestRecord(request)
    state.inflight[request.key] = record
    if state.draining:
        ends.fail(state, record, now, Fault.DRAINING, ends.SHUTTING_DOWN, 1.0)
    elif (forbidden := state.placer.forbidden(request, now)) is not None:
        attempts.decided(state, request, forbidden)
        ends.fail(state, record, now, Fault.RESIDENCY, forbidden.reason)
    else:
        if state.held.keys or state.shares or state.replicas.bus.lost_at is not None:
            place = queue_scheduler.place_new(state, request, now)
        else:
            place = state.placer.place(request, (), now)
        if place.target is None:
            _hold(state, record, place, now)
        else:
            queue_scheduler.begin(state, record, place, now, learn_later=True)


def _on_forwarded(state: RouterState, request: Request, now: float) -> None:
    place = forwarded.place(state, request, now)
    if isinstance(place, Refusal):
        ends.refuse(state, request, place, now)
    elif place.target is not None:
        if state.shares:
            fair_turns.placed(state, request, place, now)
        queue_scheduler.begin_foreign(state, RequestRecord(request), place, now)
    else:
        state.inflight[request.key] = record = RequestRecord(request)
        record.decided(place)
        attempts.decided(state, request, place)
        queue_scheduler.hold(state, record, now)
        queue_scheduler.joined(state, request, place)
        attempts.tell_held(state, request, now)


def _hold(state: RouterState, record: RequestRecord, place: PlacementResult, now: float) -> None:
    """Hold a new request, or shed it, or shed another one for it."""
    if ends.end_copy(state, record, now) or ends.shed_if_too_late(state, record, place, now):
        return
    if not ends.make_room(state, record, place, now):
        return
    expected = admission.with_expectation(state, record, place, now)
    record.decided(expected)
    attempts.decided(state, record.request, expected)
    queue_scheduler.hold(state, record, now)
    queue_scheduler.joined(state, record.request, place)


def _on_client_gone(state: RouterState, event: ev.ClientGone, now: float) -> None:
    record = state.inflight.get(event.key)
    if record is None:
        return
    if record.held_since is None:
        attempts.cancel(state, record)
    ends.end(state, record, now)
    if state.held.keys:  # its replica may have room for a held request
        queue_scheduler.offer(state, record.replica, now)


# Attempts.


def _current(state: RouterState, key: int, attempt: int) -> RequestRecord | None:
    """The request, if that attempt is under way."""
    record = state.inflight.get(key)
    if record is None or record.attempt != attempt or not record.is_under_way:
        return None
    return record


def _on_placed_by_peer(state: RouterState, event: ev.PlacedByPeer, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None and record.peer is not None:
        record.placed_by_peer(event.replica, now)


def _on_prefilled(state: RouterState, event: ev.PrefillEnded, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is None or record.prefill is None:
        return
    attempts.prefilled(state, record, event.served, now)
    decode = record.replica
    if record.is_prefilling and decode is not None:
        if decode not in state.replicas.by_name:
            why = "it left during the prefill stage"
            failed_attempts.replica_lost(state, [record], decode, why, now)
            return
        attempts.decode(state, record, now)
    if not record.request.kind.ends_here:
        state.told_held_at.pop(event.key, None)
        del state.inflight[event.key]
        record.end()


def _on_progressed(state: RouterState, event: ev.AttemptProgressed, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None:
        record.progressed(now)


def _on_started(state: RouterState, event: ev.AnswerStarted, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None:
        record.start(now, may_continue=event.may_continue, why_not=event.why_not)
        attempts.began(state, record, now, shows_ttft=event.shows_ttft)
        if state.held.keys:
            queue_scheduler.offer(state, record.replica, now)


def _on_refused(state: RouterState, event: ev.AttemptRefused, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None and not record.has_started:
        failed_attempts.on_refused(state, record, event, now)


def _on_failed(state: RouterState, event: ev.AttemptFailed, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None:
        failed_attempts.on_failed(state, record, event, now)


def _on_ended(state: RouterState, event: ev.AnswerEnded, now: float) -> None:
    record = _current(state, event.key, event.attempt)
    if record is not None:
        if event.shows_ttft and not record.has_started:
            attempts.began(state, record, now, shows_ttft=True)
        attempts.served(state, record, event.served, now)
        ends.end(state, record, now)
        if state.held.keys:
            queue_scheduler.offer(state, record.replica, now)


# The router itself.


def _on_bus_returned(state: RouterState, event: ev.BusReturned, now: float) -> None:
    state.replicas.bus.returned(now)
    state.digest.busy(now)  # peers have missed digests
    state.gossip.siblings.bus_returned()
    for record in list(state.inflight.values()):
        if record.state is RequestState.TRIED and not record.is_handed_over:
            # Started answers show a loss by themselves.
            attempts.cancel(state, record)
            queue_scheduler.hold(state, record, now)
    queue_scheduler.place_waiting(state, now)


def _on_settings(state: RouterState, event: ev.SettingsChanged, now: float) -> None:
    """What is under way goes on as it began; held requests are priced again at once."""
    settings = with_changes(state.settings, event.settings)
    state.settings, state.targets = settings, ModelTargets(settings.models)
    state.replicas.follow(settings)
    state.placer.follow(settings)
    state.held.model_max = state.targets.hold_max
    state.weights = dict(settings.tenant_weights)
    for shares in state.shares.values():
        shares.weigh(state.weights)
    queue_scheduler.place_waiting(state, now)


def _on_drain(state: RouterState, event: ev.Drain, now: float) -> None:
    """Own clients are served to the end; peers' held requests are refused."""
    cluster_events.drain(state, now)
    foreign = [request for request in state.held if not request.kind.ends_here]
    ends.drained(state, [state.inflight[request.key] for request in foreign], now)


def _on_tick(state: RouterState, event: ev.Tick, now: float) -> None:
    cluster_events.expire(state, now)
    admission.look(state, now)
    for record in timeouts.due_for_check(state, now):
        _check(state, record, now)
    failed_attempts.place_overdue_again(state, now)
    continued_streams.move(state, now)
    queue_scheduler.tick(state, now)
    cluster_events.publish_digest_if_due(state, now, has_changed=False)
    state.gossip.tick(now, rests=state.digest.is_slow)
    for ask in state.held_prefixes.tick(state.placer.replica_indexes, now):
        state.emit(ask)


def _check(state: RouterState, record: RequestRecord, now: float) -> None:
    """End it, or its attempt, if its time is over."""
    if now >= record.request.deadline:
        if record.held_since is None:
            attempts.cancel(state, record)
        ends.fail(state, record, now, Fault.DEADLINE, timeouts.DEADLINE_PASSED)
    elif record.held_since is not None:
        failed_attempts.reconsider(state, record)
        model_choice.retarget(state, record, now)
        if record.queued_s(now) >= state.settings.hold_s_max:
            _hold_expired(state, record, now)
        elif not ends.shed_if_too_late(state, record, record.place, now):
            attempts.tell_held_if_due(state, record.request, now)
    elif (lost := timeouts.lost_because(state, record, now)) is not None:
        attempts.cancel(state, record)
        if timeouts.is_left_waiting(state, record, now):  # another router there may place it
            failed_attempts.refused(state, record, now)
        else:
            cause = Cause.PREFILL if record.is_prefilling else Cause.PLACE
            if record.peer is not None and not record.waits_at_peer:
                cause = Cause.LINK
            failed_attempts.failed(state, record, lost, now, cause)
    elif record.is_prefilling:
        attempts.tell_held_if_due(state, record.request, now)


def _hold_expired(state: RouterState, record: RequestRecord, now: float) -> None:
    if (why := timeouts.unserved_because(state, record)) is not None:
        ends.unserved(state, record, why, now)
    else:
        ends.shed(state, record, None, f"held for {state.settings.hold_s_max:g} s", now)


HANDLERS: Mapping[type, Handler] = {
    ev.RequestArrived: _on_request,
    ev.ClientGone: _on_client_gone,
    ev.CostEstimated: fair_turns.estimated,
    ev.HeartbeatSeen: cluster_events.on_heartbeat,
    ev.DigestSeen: cluster_events.on_digest,
    ev.RttMeasured: cluster_events.on_round_trip,
    ev.LeaseHeard: cluster_events.on_lease_heard,
    ev.LeaseAnswered: cluster_events.on_lease_answered,
    ev.TrieSeen: lambda state, event, now: state.gossip.receive(event.delta, now),
    ev.TriePartSeen: lambda state, event, now: state.gossip.receive_part(event.part, now),
    ev.TrieAsked: lambda state, event, now: state.gossip.asked(
        event.ask, event.region, event.inbox, now
    ),
    ev.SiblingSeen: lambda state, event, now: state.gossip.siblings.receive(event.delta, now),
    ev.SiblingPartSeen: lambda state, event, now: state.gossip.siblings.receive_part(
        event.part, now
    ),
    ev.HeldDeltaSeen: lambda state, event, now: state.held_prefixes.take_delta(
        event, state.placer.replica_indexes, now
    ),
    ev.HeldPartSeen: lambda state, event, now: state.held_prefixes.take_part(
        event, state.placer.replica_indexes, now
    ),
    ev.PlacedByPeer: _on_placed_by_peer,
    ev.PrefillEnded: _on_prefilled,
    ev.AttemptRefused: _on_refused,
    ev.AttemptProgressed: _on_progressed,
    ev.AnswerStarted: _on_started,
    ev.Movable: continued_streams.movable,
    ev.ContinuationRead: continued_streams.read,
    ev.AttemptFailed: _on_failed,
    ev.AnswerEnded: _on_ended,
    ev.BusLost: lambda state, event, now: state.replicas.bus.lost(now),
    ev.BusReturned: _on_bus_returned,
    ev.SettingsChanged: _on_settings,
    ev.MoveStreams: lambda state, event, now: state.replicas.move(event),
    ev.Drain: _on_drain,
    ev.DrainOver: lambda state, event, now: ends.drained(state, state.inflight.values(), now),
    ev.Tick: _on_tick,
}
