"""RouterCore: takes events in, gives effects out, and calls the floors below it.

`requests/record.py` has a request's states. The router tries a request on a local replica or
through a peer. A refusal, a loss or an error before the client's first byte leads to another
attempt or to one error; after that byte it leads to an error event. A peer's request is placed on a
local replica, held in the same queue (`lifecycle/forwarded.py`), or refused. Its answer goes
straight to the peer's router; this one keeps only its inbox, to report the loss of the replica
there.

Every client's request ends in exactly one of: AnswerEnded or ClientGone (from the host), Fail or
PassEngineError (from here). The core ignores events of an attempt that is not the current one.
"""

from collections.abc import Callable, Collection
from random import Random
from typing import Any

from mesh.core.cluster_events import ClusterEvents
from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.held_prefixes import HeldPrefixes
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.attempts import SHUTTING_DOWN, Attempts, Completion
from mesh.core.lifecycle.failed_attempts import FailedAttempts
from mesh.core.lifecycle.forwarded import ForwardedQueue, ForwardedRequests
from mesh.core.lifecycle.model_choice import ModelChoice
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.lifecycle.timeouts import DEADLINE_PASSED, Timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings, with_changes
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.policies import PolicyMakers
from mesh.core.requests.hold_queue import HoldQueue, make_order
from mesh.core.requests.record import RequestRecord, RequestState
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId


class RouterCore:
    """Decides and has no side effects: same events, times and seed, same effects."""

    def __init__(
        self,
        *,
        region: RegionId,
        router: RouterId,
        epoch: int,
        settings: RouterSettings,
        dice: Random,
        makers: PolicyMakers | None = None,
        peers: tuple[RegionId, ...] = (),
    ) -> None:
        """`makers`: policies by name, `mesh.core.policies.POLICIES` unless given.

        `peers`: regions that this one adopts when they lose their routers, and that adopt it.
        """
        self.region = region
        self.replicas = ReplicaTable(router, settings)
        self.peers = PeerTable(settings, region)
        self.inflight: dict[int, RequestRecord] = {}
        self._settings = settings
        self._effects: list[fx.Effect] = []
        self._placer = Placer(settings, self.replicas, self.peers, dice, makers, region)
        turns = make_order(settings.hold_order, self._placer.hit_ratio)
        self.held = HoldQueue(settings.hold_max, turns)
        self._timeouts = Timeouts(self.replicas, self.peers, settings, self._placer.residency)
        self._admission = Admission(
            self.held,
            self.inflight,
            settings,
            dice,
            self._timeouts.serving,
            self.replicas,
            self._placer,
        )
        self._scheduler = QueueScheduler(
            self.held, self.inflight, self.replicas, self._placer, self._begin, self._admission
        )
        terms: dict[RegionId, int] = {}  # of owned regions' leases: `Ownership` fills it
        self._attempts = Attempts(
            region, self.replicas, self.peers, self._placer, self._effects, terms
        )
        self.gossip = Gossip(
            Origin(region, router), epoch, settings, self._effects, self.replicas.remembers
        )
        self._placer.join_gossip(self.gossip)
        self._cluster_events = ClusterEvents(
            home=region,
            router=router,
            epoch=epoch,
            regions=peers,
            settings=settings,
            dice=dice,
            replicas=self.replicas,
            peers=self.peers,
            held=self.held,
            placer=self._placer,
            scheduler=self._scheduler,
            inflight=self.inflight,
            attempts=self._attempts,
            effects=self._effects,
            on_lost=self._replica_lost,
            gossip=self.gossip,
            terms=terms,
        )
        self._construct_ends()

    def _construct_ends(self) -> None:
        self.model_card = self._timeouts.model_card
        self.ownership, self.warming = self._cluster_events.ownership, self._cluster_events.warming
        self._arrivals = self._cluster_events.arrivals
        self._forwarded_queue = ForwardedQueue(self.held, self._effects)
        self.held_prefixes = HeldPrefixes(
            self.replicas, lambda: self._placer.replica_indexes, self._effects
        )
        self.model_choice = ModelChoice(
            self._settings,
            self._timeouts,
            self.held,
            self._admission,
            self._cluster_events.models,
            self._effects,
        )
        self._forwarded_requests = ForwardedRequests(
            self._settings,
            self.replicas,
            self._placer,
            self._scheduler,
            self._forwarded_queue,
            self._admission,
        )
        self._completion = Completion(
            inflight=self.inflight,
            held=self.held,
            forwarded_queue=self._forwarded_queue,
            admission=self._admission,
            attempts=self._attempts,
            placer=self._placer,
            fresh=self._cluster_events.fresh,
            effects=self._effects,
        )
        self._failed_attempts = FailedAttempts(
            settings=self._settings,
            held=self.held,
            admission=self._admission,
            attempts=self._attempts,
            completion=self._completion,
            timeouts=self._timeouts,
            scheduler=self._scheduler,
            model_choice=self.model_choice,
            effects=self._effects,
        )
        self._handlers = self.warming.among(self._event_handlers())

    def _event_handlers(self) -> dict[type, Callable[[Any, float], None]]:
        return {
            ev.RequestArrived: self._on_request,
            ev.ClientGone: self._on_client_gone,
            **self._cluster_events.handlers(),
            **self.gossip.handlers(),
            **self.held_prefixes.handlers(),
            ev.PlacedByPeer: self._on_placed_by_peer,
            ev.PrefillEnded: self._on_prefilled,
            ev.AttemptRefused: self._on_refused,
            ev.AttemptProgressed: self._on_progressed,
            ev.AnswerStarted: self._on_started,
            ev.AttemptFailed: self._on_failed,
            ev.AnswerEnded: self._on_ended,
            ev.BusLost: lambda _, now: self.replicas.bus.lost(now),
            ev.BusReturned: self._on_bus_returned,
            ev.SettingsChanged: self._on_settings,
            ev.Drain: self._on_drain,
            ev.DrainOver: lambda _, now: self._completion.drained(self.inflight.values(), now),
            ev.Tick: self._on_tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """The effects of one event, in order. `now`: seconds, never going back."""
        if self._attempts.unlearned is not None:
            self._attempts.learn()
        if now >= self.ownership.release_at:
            self.ownership.release_expired(now)
        self._handlers[type(event)](event, now)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def finish(self) -> list[fx.Effect]:
        """Learn where the last event's request went, which else the next event begins with."""
        self._attempts.learn()
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def draining(self) -> bool:
        return self._cluster_events.draining

    def models(self) -> tuple[ModelId, ...]:
        """Models that some ready replica of the mesh serves now, full or not."""
        return self.model_choice.targets.known(self._timeouts.ready_models())

    def known_models(self) -> tuple[ModelId, ...]:
        """Those, and the ones that may come back: requests for them are held, not refused."""
        return self._cluster_events.models.names

    def knows(self, name: ModelId) -> bool:
        """Whether some replica serves, or may serve (again), that model on that optional path."""
        return name in self._cluster_events.models or self.is_served(name)

    def is_served(self, name: ModelId) -> bool:
        """Whether a replica here has that name, ready or not, or one of a peer is ready for it."""
        return bool(self.replicas.serving(name)) or any(
            peer.ready(name) > 0 for _, peer in self.peers
        )

    # Requests.

    def _on_request(self, event: ev.RequestArrived, now: float) -> None:
        request = event.request
        if request.answer_inbox is not None:
            self._on_forwarded(request, request.answer_inbox, now)
            return
        if not request.shadow:
            self._arrivals.count(now)
        record = RequestRecord(request)
        self.inflight[request.key] = record
        if self._cluster_events.draining:
            self._completion.fail(record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)
        elif (forbidden := self._placer.forbidden(request, now)) is not None:
            self._attempts.decided(request, forbidden)
            self._completion.fail(record, now, Fault.RESIDENCY, forbidden.reason)
        else:
            if self.held.group_of or self.replicas.bus.lost_at is not None:
                place = self._scheduler.place_new(request, now)
            else:
                place = self._placer.place(request, (), now)
            if place.target is None:
                self._hold(record, place, now)
            else:
                self._begin(record, place, now, is_new=True)

    def _on_forwarded(self, request: Request, inbox: str, now: float) -> None:
        place = self._forwarded_requests.place(request, now, draining=self.draining)
        if isinstance(place, Refusal):
            self._completion.refuse(request, inbox, place, now)
        elif place.target is not None:
            self._begin_foreign(RequestRecord(request), place, now)
        else:
            self.inflight[request.key] = record = RequestRecord(request)
            record.decided(place)
            self._attempts.decided(request, place)
            self._failed_attempts.to_hold_queue(record, now)
            self._scheduler.joined(request, place)
            self._forwarded_queue.notify(request, now)

    def _begin(
        self, record: RequestRecord, place: PlacementResult, now: float, *, is_new: bool = False
    ) -> None:
        """Begin an attempt, unless it is too late (own: by its objective), or hand it back."""
        request = record.request
        if record.held_since is not None:
            if request.answer_inbox is not None and place.placement is Placement.PEER:
                self._completion.hand_back(record, request.answer_inbox, now)
                return
            self._admission.released(request, now)
        may_be_late = request.slo_ttft_s is not None or place.placement is not Placement.LOCAL
        if may_be_late and self._completion.shed_if_too_late(record, place, now):
            return
        self._admission.begun.count(now)
        if request.answer_inbox is None:
            self._attempts.begin(record, place, now, learn_later=is_new)
            return
        self._forwarded_queue.leave(request)
        del self.inflight[request.key]
        self._begin_foreign(record, place, now)

    def _begin_foreign(self, record: RequestRecord, place: PlacementResult, now: float) -> None:
        """Begin an attempt for a peer's request, which stays here while a prefill stage runs."""
        if place.prefill is not None:
            self.inflight[record.request.key] = record
        self._attempts.begin(record, place, now)
        if record.is_prefilling:
            self._forwarded_queue.notify(record.request, now)

    def _hold(self, record: RequestRecord, place: PlacementResult, now: float) -> None:
        """Hold a new request, or shed it, or shed another one for it."""
        completion = self._completion
        if completion.end_copy(record, now) or completion.shed_if_too_late(record, place, now):
            return
        if not completion.make_room(record, place, now):
            return
        expected = self._admission.with_expectation(record, place, now)
        record.decided(expected)
        self._attempts.decided(record.request, expected)
        self._failed_attempts.to_hold_queue(record, now)
        self._scheduler.joined(record.request, place)

    # Ends.

    def _on_client_gone(self, event: ev.ClientGone, now: float) -> None:
        record = self.inflight.get(event.key)
        if record is None:
            return
        if record.held_since is None:
            self._attempts.cancel(record)
        self._completion.end(record, now)
        self._offer(record, now)

    def _on_ended(self, event: ev.AnswerEnded, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            self._attempts.served(record, event.served, now)
            self._completion.end(record, now)
            self._offer(record, now)

    def _offer(self, record: RequestRecord, now: float) -> None:
        """Its replica may have room for a held request."""
        if self.held.group_of:
            self._scheduler.offer(record.replica, now)

    # Attempts.

    def _current(self, key: int, attempt: int) -> RequestRecord | None:
        """The request, if that attempt is under way."""
        record = self.inflight.get(key)
        is_current = record is not None and record.attempt == attempt and record.held_since is None
        return record if is_current else None

    def _on_placed_by_peer(self, event: ev.PlacedByPeer, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None and record.peer is not None:
            record.placed_by_peer(event.replica, now)

    def _on_prefilled(self, event: ev.PrefillEnded, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is None or record.prefill is None:
            return
        self._attempts.prefilled(record, event.served, now)
        decode = record.replica
        if record.is_prefilling and decode is not None:
            if decode not in self.replicas.by_name:
                self._replica_lost([record], decode, "it left during the prefill stage", now)
                return
            self._attempts.decode(record, now)
        if record.request.answer_inbox is not None:
            self._forwarded_queue.leave(record.request)
            del self.inflight[event.key]
            record.end()

    def _on_progressed(self, event: ev.AttemptProgressed, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            record.progressed(now)

    def _on_started(self, event: ev.AnswerStarted, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            record.start(now)
            self._attempts.began(record, now, shows_ttft=event.shows_ttft)
            self._offer(record, now)

    def _on_refused(self, event: ev.AttemptRefused, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None and not record.has_started:
            self._failed_attempts.on_refused(record, event, now)

    def _on_failed(self, event: ev.AttemptFailed, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            self._failed_attempts.on_failed(record, event, now)

    def _replica_lost(
        self, lost: Collection[RequestRecord], name: ReplicaId, why: str, now: float
    ) -> None:
        self._failed_attempts.replica_lost(lost, name, why, now)

    def _on_bus_returned(self, event: ev.BusReturned, now: float) -> None:
        self.replicas.bus.returned(now)
        self.gossip.siblings.bus_returned()
        for record in list(self.inflight.values()):
            if record.state is RequestState.TRIED and not record.is_handed_over:
                # Started answers show a loss by themselves.
                self._attempts.cancel(record)
                self._failed_attempts.to_hold_queue(record, now)
        self._scheduler.place_waiting(now)

    def _on_settings(self, event: ev.SettingsChanged, now: float) -> None:
        """What is under way goes on as it began; held requests are priced again at once."""
        before, self._settings = self._settings, with_changes(self._settings, event.settings)
        settings = self._settings
        self.replicas.follow(settings)
        self._placer.follow(settings, self.gossip)
        self._timeouts.follow(settings)
        self._failed_attempts.follow(settings)
        self._forwarded_requests.follow(settings)
        self.model_choice.follow(settings)
        if settings.hold_order is not before.hold_order:
            self.held.reorder(make_order(settings.hold_order, self._placer.hit_ratio))
        self.warming.follow(settings)
        self._handlers = self.warming.among(self._event_handlers())
        self._scheduler.place_waiting(now)

    def _on_drain(self, event: ev.Drain, now: float) -> None:
        """Own clients are served to the end; peers' held requests are refused."""
        self._cluster_events.drain(now)
        foreign = (request for request in self.held if request.answer_inbox is not None)
        self._completion.drained([self.inflight[request.key] for request in foreign], now)

    # Time.

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        self._cluster_events.expire(now)
        self._admission.look(now)
        for record in self._timeouts.due_for_check(self.inflight.values(), now):
            self._check(record, now)
        self._scheduler.tick(now)
        self._cluster_events.publish_digest_if_due(now)
        self.gossip.tick(now)
        self.held_prefixes.tick(now)

    def _check(self, record: RequestRecord, now: float) -> None:
        """End it, or its attempt, if its time is over."""
        if now >= record.request.deadline:
            if record.held_since is None:
                self._attempts.cancel(record)
            self._completion.fail(record, now, Fault.DEADLINE, DEADLINE_PASSED)
        elif record.held_since is not None:
            self._failed_attempts.reconsider(record)
            self.model_choice.retarget(record, now)
            if record.queued_s(now) >= self._settings.hold_s_max:
                self._hold_expired(record, now)
            elif not self._completion.shed_if_too_late(record, record.place, now):
                self._forwarded_queue.check(record.request, now)
        elif (lost := self._timeouts.lost_because(record, now)) is not None:
            self._attempts.cancel(record)
            if self._timeouts.is_left_waiting(record, now):  # another router there may place it
                self._failed_attempts.refused(record, now)
            else:
                in_prefill = record.is_prefilling
                self._failed_attempts.failed(record, lost, now, in_prefill=in_prefill)
        elif record.is_prefilling and record.request.answer_inbox is not None:
            self._forwarded_queue.check(record.request, now)

    def _hold_expired(self, record: RequestRecord, now: float) -> None:
        if (why := self._timeouts.unserved_because(record)) is not None:
            self._completion.unserved(record, why, now)
        else:
            self._completion.shed(record, None, f"held for {self._settings.hold_s_max:g} s", now)
