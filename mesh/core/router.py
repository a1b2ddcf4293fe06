"""RouterCore: the life of every request, as events in and effects out.

Theory of operation. A client's request is held, tried, started, ended (`inflight.py`). It is
tried on a local replica or through a peer; whatever goes wrong before its client has seen a
byte (refusal, loss, error) leads to another try or to one clear error, and after that byte only
to an error event. A peer's request is placed on a local replica, held among ours (`guests.py`) or
refused, or sent on; its answer goes straight to the asking router, so once it is placed nothing of
it is kept here but a note to tell that router if the replica is lost.

Every client's request ends in exactly one of: AnswerEnded or ClientGone (from outside), Fail or
PassEngineError (from here). Attempts are numbered; events of an attempt that is not the current
one change nothing.
"""

from collections.abc import Callable, Collection
from random import Random
from typing import Any

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.federation.foreign import ForeignWork
from mesh.core.federation.guests import Guests
from mesh.core.federation.peers import PeerTable
from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.told import Origin
from mesh.core.placing.placement import Place, Placer
from mesh.core.policies import Makers
from mesh.core.region.fleet import Fleet
from mesh.core.region.replicas import ReplicaTable
from mesh.core.requests.attempts import Attempts
from mesh.core.requests.ends import SHUTTING_DOWN, Ends
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.outlook import DEADLINE_PASSED, Outlook
from mesh.core.requests.request import Request
from mesh.core.requests.retries import is_worth_another, note_status
from mesh.core.settings import RouterSettings
from mesh.core.waiting.admission import Admission
from mesh.core.waiting.hold_queue import HoldQueue
from mesh.core.waiting.line import Line
from schemas.exchange import HOPS_MAX, Refusal
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, RouterId


class RouterCore:
    """Decides; never does. Same events, same times, same seed: same effects."""

    def __init__(
        self,
        *,
        region: RegionId,
        router: RouterId,
        epoch: int,
        settings: RouterSettings,
        dice: Random,
        makers: Makers | None = None,
        peers: tuple[RegionId, ...] = (),
    ) -> None:
        """`makers`: the policies there are, if not those of `mesh.core.policies`.

        `peers`: regions that this one adopts when they lose their routers, and that adopt it.
        """
        self.region = region
        self.replicas = ReplicaTable(router, settings)
        self.peers = PeerTable(settings, region)
        self.inflight: dict[int, Inflight] = {}
        self._settings = settings
        self._effects: list[fx.Effect] = []
        self._placer = Placer(settings, self.replicas, self.peers, dice, makers, region)
        self.held = HoldQueue(settings.hold_max, settings.hold_order.turns(self._placer.hit_ratio))
        self._line = Line(self.held, self.inflight, self.replicas, self._placer, self._begin)
        self._guests = Guests(self.held, self._effects)
        self._attempts = Attempts(
            region=region,
            replicas=self.replicas,
            peers=self.peers,
            placer=self._placer,
            effects=self._effects,
            term=lambda region: self.ownership.term(region),
        )
        self._outlook = Outlook(self.replicas, self.peers, settings, self._placer.residency)
        self.model_card = self._outlook.model_card
        self.gossip = Gossip(
            Origin(region, router), epoch, settings, self._effects, self.replicas.remembers
        )
        self._placer.join_gossip(self.gossip)
        self._fleet = self._make_fleet(router, epoch, peers, dice)
        self.ownership, self.warming = self._fleet.ownership, self._fleet.warming
        self._admission = Admission(self.held, self.inflight, settings, dice, self._outlook.serving)
        self._foreign = ForeignWork(
            settings, self.replicas, self._placer, self._line, self._guests, self._admission
        )
        self._ends = Ends(
            inflight=self.inflight,
            held=self.held,
            guests=self._guests,
            admission=self._admission,
            attempts=self._attempts,
            placer=self._placer,
            fresh=self._fleet.fresh,
            effects=self._effects,
        )
        self._handlers = self.warming.among(self._table())

    def _make_fleet(
        self, router: RouterId, epoch: int, peers: tuple[RegionId, ...], dice: Random
    ) -> Fleet:
        return Fleet(
            home=self.region,
            router=router,
            epoch=epoch,
            regions=peers,
            settings=self._settings,
            dice=dice,
            replicas=self.replicas,
            peers=self.peers,
            held=self.held,
            placer=self._placer,
            line=self._line,
            inflight=self.inflight,
            attempts=self._attempts,
            effects=self._effects,
            lost=self._replica_lost,
            gossip=self.gossip,
        )

    def _table(self) -> dict[type, Callable[[Any, float], None]]:
        """Who hears which event."""
        return {
            ev.RequestArrived: self._on_request,
            ev.ClientGone: self._on_client_gone,
            **self._fleet.handlers(),
            **self.gossip.handlers(),
            ev.PlacedByPeer: self._on_placed_by_peer,
            ev.AttemptRefused: self._on_refused,
            ev.AttemptProgressed: self._on_progressed,
            ev.AnswerStarted: self._on_started,
            ev.AttemptFailed: self._on_failed,
            ev.AnswerEnded: self._on_ended,
            ev.BusLost: lambda _, now: self.replicas.bus.lost(now),
            ev.BusReturned: self._on_bus_returned,
            ev.Drain: self._on_drain,
            ev.DrainOver: lambda _, now: self._ends.drained(self.inflight.values(), now),
            ev.Tick: self._on_tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """What to do about one event, in order. `now`: seconds, never going back."""
        self.ownership.lapse(now)
        self._handlers[type(event)](event, now)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._fleet.draining

    def models(self) -> tuple[ModelId, ...]:
        """Models that some ready replica of the mesh serves at this moment, full or not."""
        return self._outlook.ready_models()

    def known_models(self) -> tuple[ModelId, ...]:
        """Those, and the ones that may come back: requests for them are held, not refused."""
        return self._fleet.known_models()

    # Requests.

    def _on_request(self, event: ev.RequestArrived, now: float) -> None:
        request = event.request
        if request.answer_inbox is not None:
            self._on_guest(request, request.answer_inbox, now)
            return
        self._fleet.arrived(now)
        record = Inflight(request)
        self.inflight[request.key] = record
        if self.draining:
            self._ends.fail(record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)
        elif (forbidden := self._placer.forbidden(request, now)) is not None:
            self._attempts.decided(request, forbidden)
            self._ends.fail(record, now, Fault.RESIDENCY, forbidden.reason)
        else:
            place = self._line.place_newcomer(request, now)
            go = self._hold if place.target is None else self._begin
            go(record, place, now)

    def _on_guest(self, request: Request, inbox: str, now: float) -> None:
        place = self._foreign.place(request, now, draining=self.draining)
        if isinstance(place, Refusal):
            self._ends.refuse(request, inbox, place, now)
        elif place.target is not None:
            self._attempts.begin_for_peer(request, inbox, place, now)
        else:
            self.inflight[request.key] = record = Inflight(request)
            record.place = place
            self._back_in_line(record, now)
            self._line.joined(request, place)
            self._guests.wait(request, now)

    def _begin(self, record: Inflight, place: Place, now: float) -> None:
        """Try it there, unless that would be too late for it."""
        if record.held_since is not None:
            self._admission.released(record.request, now)
        if self._ends.shed_if_too_late(record, place, now):
            return
        self._admission.begun(now)
        if (inbox := record.request.answer_inbox) is None:
            self._attempts.begin(record, place, now)
            return
        self._guests.leave(record.request)
        del self.inflight[record.request.key]
        held_s = record.waited_s(now)
        self._attempts.begin_for_peer(record.request, inbox, place, now, held_s)

    def _hold(self, record: Inflight, place: Place, now: float) -> None:
        """A new request must wait, or be shed, or another one for it."""
        if self._ends.shed_if_too_late(record, place, now):
            return
        if self.held.is_full:
            last = self.held.newest_below(record.request.priority)
            if last is None:
                self._ends.shed(record, place, f"{place.reason}, and the hold queue is full", now)
                return
            why = f"the hold queue is full, and {record.request.priority} goes before"
            self._ends.shed(self.inflight[last.key], None, why, now)
        record.place = self._admission.foretold(record, place, now)
        self._attempts.decided(record.request, record.place)
        self._back_in_line(record, now)
        self._line.joined(record.request, place)

    def _back_in_line(self, record: Inflight, now: float) -> None:
        """No attempt is under way: it waits at its place by class and arrival."""
        self._attempts.leave(record, now)
        record.hold(now)
        self.held.put(record.request, comes_back=record.attempt > 0)
        self._admission.waits(record.request, now)

    # Ends.

    def _on_client_gone(self, event: ev.ClientGone, now: float) -> None:
        record = self.inflight.get(event.key)
        if record is None:
            return
        if record.held_since is None:
            self._attempts.cancel(record)
        self._ends.end(record, now)
        self._line.offer(record.replica, now)

    def _on_ended(self, event: ev.AnswerEnded, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            self._attempts.served(record, event.served, now)
            self._ends.end(record, now)
            self._line.offer(record.replica, now)

    # Attempts.

    def _current(self, key: int, attempt: int) -> Inflight | None:
        """The request, if that attempt is the one under way."""
        record = self.inflight.get(key)
        if record is None or record.attempt != attempt or record.held_since is not None:
            return None
        return record

    def _on_placed_by_peer(self, event: ev.PlacedByPeer, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None and record.peer is not None:
            record.replica, record.heard_at = event.replica, now

    def _on_progressed(self, event: ev.AttemptProgressed, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            record.heard_at = now
            record.lines = max(record.lines, min(event.hops, HOPS_MAX))

    def _on_started(self, event: ev.AnswerStarted, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is not None:
            record.started, record.heard_at = True, now
            self._attempts.began(record, now)
            self._line.offer(record.replica, now)

    def _on_refused(self, event: ev.AttemptRefused, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is None or record.started:
            return
        if event.reason == Refusal.BAD_WORK:
            self._ends.fail(
                record, now, Fault.ENGINE_FAILED, "the replica could not read the request"
            )
            return
        said_by_another = event.replica is None and event.region not in (self.region, record.peer)
        self._attempts.rest(record, now, event.region if said_by_another else None)
        self._not_taken(record, now)
        self._line.try_all(now)

    def _not_taken(self, record: Inflight, now: float) -> None:
        """Nothing was begun there: back in line, and others are asked first."""
        record.refusals += 1
        if record.peer is not None:
            record.shun(record.peer, now)
        if record.refusals >= self._settings.refusals_max:
            self._ends.shed(record, None, f"refused {record.refusals} times", now)
        elif not self._ends.shed_if_too_late(record, None, now):
            self._back_in_line(record, now)

    def _on_failed(self, event: ev.AttemptFailed, now: float) -> None:
        record = self._current(event.key, event.attempt)
        if record is None:
            return
        if now >= record.request.deadline:  # the agent has a clock too, and may be first
            self._ends.fail(record, now, Fault.DEADLINE, DEADLINE_PASSED)
            return
        note_status(record, event.status)
        whole_place = record.peer is None or record.replica is None
        if whole_place and event.status is None:
            self._attempts.rest(record, now)
        self._attempt_failed(record, event.detail, now)
        self._line.try_all(now)

    def _attempt_failed(
        self, record: Inflight, detail: str, now: float, *, same_again: bool = False
    ) -> None:
        """Back in line if another attempt may help; the caller lets those in line try.

        `same_again`: where it was, somebody new is now.
        """
        if record.started:
            self._ends.fail(record, now, Fault.ENGINE_FAILED, detail)
            return
        record.failures += 1
        place = record.peer or record.replica
        if place is not None and not same_again:
            record.avoid |= {place}
        hope = same_again or self._outlook.others_serve(record)
        if hope and is_worth_another(record, self._settings.failures_max):
            self._back_in_line(record, now)
        elif record.engine_status is not None:
            self._ends.end(record, now)
            self._effects.append(fx.PassEngineError(record.request.key))
        else:
            self._ends.fail(record, now, Fault.ENGINE_FAILED, detail)

    def _replica_lost(self, lost: Collection[Inflight], why: str, now: float) -> None:
        """The agent that had these is no more; whoever speaks under its name is another."""
        for record in lost:
            detail = f"replica {record.replica} was lost: {why}"
            self._attempt_failed(record, detail, now, same_again=True)
        self._line.try_all(now)

    def _on_bus_returned(self, event: ev.BusReturned, now: float) -> None:
        self.replicas.bus.returned(now)
        self.gossip.siblings.bus_returned()
        for record in list(self.inflight.values()):
            if record.is_tried:  # begun answers show a loss by their numbering or silence
                self._attempts.cancel(record)
                self._back_in_line(record, now)
        self._line.try_all(now)

    def _on_drain(self, event: ev.Drain, now: float) -> None:
        """Own clients are served to the end; peers' who wait here are better off elsewhere."""
        self._fleet.drain(now)
        guests = (request for request in self.held if request.answer_inbox is not None)
        self._ends.drained([self.inflight[request.key] for request in guests], now)

    # Time.

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        self._fleet.expire(now)
        self._admission.look(now)
        for record in self._outlook.doubtful(self.inflight.values(), now):
            self._check(record, now)
        self._line.try_all(now)
        self._fleet.tell_peers(now)
        self.gossip.tick(now)

    def _check(self, record: Inflight, now: float) -> None:
        """Has this request's time, or its attempt's, run out?"""
        if now >= record.request.deadline:
            if record.held_since is None:
                self._attempts.cancel(record)
            self._ends.fail(record, now, Fault.DEADLINE, DEADLINE_PASSED)
        elif record.held_since is not None:
            if now - record.held_since >= self._settings.hold_s_max:
                self._hold_expired(record, now)
            elif not self._ends.shed_if_too_late(record, record.place, now):
                self._guests.check(record.request, now)
        elif (lost := self._outlook.lost_because(record, now)) is not None:
            self._attempts.cancel(record)
            if self._outlook.is_left_waiting(record, now):  # another router there may be well
                self._not_taken(record, now)
            else:
                self._attempt_failed(record, lost, now)

    def _hold_expired(self, record: Inflight, now: float) -> None:
        if (why := self._outlook.unserved_because(record)) is not None:
            self._ends.unserved(record, why, now)
        else:
            self._ends.shed(record, None, f"held for {self._settings.hold_s_max:g} s", now)
