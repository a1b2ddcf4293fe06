"""Warming up: idle replicas compute hot prefixes before clients request them.

GORGO leaves this open (section 8): "proactively replicating or warming high-value prefixes in
anticipation of demand shifts". Three things must coincide:

* *text*: gossip carries hashes, which can't be computed. So a router keeps the beginnings that many
  of its own clients' prompts share (`hot_prefixes.py`), and sends no others;
* *need*: the region's own demand rises, and fewer replicas hold the prefix than its share of the
  requests comes to. A region that needs more than its own clients have brought publishes in its
  digest how many tokens it would take, and peers send what it lacks;
* *idle time*: a replica without work, with spare memory, and prefill seconds saved
  (`idle_replicas.py`). The region that computes decides and spends.

A warm-up is a request for one token, dispatched like any other, with a receipt, to a place that
carries its labels; it is never held, retried or forwarded twice. It gives way: as soon as a request
is held, or its replica gets other work, it is cancelled; what engines have computed by then stays
in their caches. It is forgotten like any other prompt.

`among` wraps the router's event handlers, so that a router without a share of idle time runs
exactly as if warming did not exist.

Reads: digest, draining, gossip, held, peers, placer, region, replicas, settings.
Writes: digest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from mesh.core.lifecycle import attempts, ends
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import NOTHING_REPORTED, Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from mesh.core.view.peers import Peer
from mesh.core.warming.hot_prefixes import DemandTrend, HotPrefix, HotPrefixes
from mesh.core.warming.idle_replicas import POLICY, IdleReplicas
from schemas.decision import Placement
from schemas.exchange import Priority, Refusal
from schemas.ids import RegionId, ReplicaId, RequestId

LOOK_S = 0.25  # between two looks for something to warm
HOTTEST_MAX = 32  # examined each time
UNDER_WAY_MAX = 16  # of this router, here and at peers
DEADLINE_S = 60.0
OFFERED_MAX = 65_536

Handler = Callable[[RouterState, Any, float], None]
EventHandlers = Mapping[type, Handler]


@dataclass(slots=True)
class WarmingCounts:
    """Since the start."""

    begun: int = 0
    ended: int = 0
    stopped: int = 0  # peers' included
    failed: int = 0
    peer_requests: int = 0  # of peers, placed here


@dataclass(frozen=True, slots=True)
class ForwardedWarmUp:
    """A peer's warm-up on a replica of this region."""

    inbox: str
    until: float
    hashes: tuple[int, ...]
    began_at: float


class Warming:
    """One router's warming; without a share of idle time it does nothing."""

    def __init__(self, state: RouterState) -> None:
        """Raises ValueError if it is on and the policy has no prefix index."""
        self.counts = WarmingCounts()
        self._state = state
        settings = state.settings
        self._idle = IdleReplicas(settings, state.replicas, state.placer)
        self.budget = self._idle.budget
        self.hot = HotPrefixes(settings.warm_bytes_max, settings.warm_trend_s)
        self._trend = DemandTrend(settings.warm_trend_s)
        self._last_key = 0
        self._looked_at = float("-inf")
        self._under_way: dict[int, RequestRecord] = {}
        self._foreign: dict[ReplicaId, ForwardedWarmUp] = {}
        self._offered: dict[tuple[RegionId, int], float] = {}
        state.digest.warm_tokens = self.wanted_tokens

    def follow(self, settings: RouterSettings) -> None:
        """Warm by these from now on; `among` gives the handlers anew. What is under way goes on."""
        self._idle.follow(settings)

    @property
    def is_on(self) -> bool:
        return self._state.settings.warm_idle_share > 0.0

    @property
    def tokens(self) -> int:
        """Prompt tokens of warm-ups placed here, own and peers'."""
        return self._idle.tokens

    @property
    def under_way(self) -> int:
        """This router's warm-ups that have not ended."""
        return len(self._under_way)

    def among(self, handlers: EventHandlers) -> EventHandlers:
        """The router's handlers, with what warming adds to them."""
        if not self.is_on and not self._under_way and not self._foreign:
            return handlers
        kept: EventHandlers = {ev.PrefixKept: lambda state, event, now: self._on_kept(event)}
        all_of = {**handlers, **kept}
        first = {kind: self._and_give_way(handler) for kind, handler in all_of.items()}
        on_request, on_tick, on_drain = (
            first[kind] for kind in (ev.RequestArrived, ev.Tick, ev.Drain)
        )

        def request(state: RouterState, event: ev.RequestArrived, now: float) -> None:
            if event.request.warm and event.request.answer_inbox is not None:
                self._on_forwarded(event.request, event.request.answer_inbox, now)
            else:
                self._arrived(event.request, now)
                on_request(state, event, now)

        def tick(state: RouterState, event: ev.Tick, now: float) -> None:
            on_tick(state, event, now)
            self._on_tick(now)

        def drain(state: RouterState, event: ev.Drain, now: float) -> None:
            on_drain(state, event, now)
            self._stop_all(now)

        ours: dict[type, Callable[[Any, RequestRecord, float], None]] = {
            ev.PlacedByPeer: self._on_placed,
            ev.AttemptRefused: self._on_failed,
            ev.AttemptProgressed: self._on_progressed,
            ev.AttemptFailed: self._on_failed,
            ev.AnswerEnded: self._on_ended,
        }
        by_key = {kind: self._by_key(own, first[kind]) for kind, own in ours.items()}
        return {**first, **by_key, ev.RequestArrived: request, ev.Tick: tick, ev.Drain: drain}

    def wanted_tokens(self, now: float) -> int | None:
        """Tokens of peers' warm-ups that this region would take now; None for none."""
        if not self._may_warm(now) or not self._trend.rises(now):
            return None
        return self._idle.affordable_tokens(now)

    def _may_warm(self, now: float) -> bool:
        """Whether it is on, the bus is connected, and no request is held."""
        if not self.is_on or self._state.draining or self._state.replicas.bus.is_away(now):
            return False
        return not len(self._state.held)

    def _by_key(self, own: Callable[[Any, RequestRecord, float], None], others: Handler) -> Handler:
        """Keys below 0 are warm-ups."""

        def handler(state: RouterState, event: Any, now: float) -> None:
            if event.key >= 0:
                others(state, event, now)
            elif (record := self._under_way.get(event.key)) is not None:
                own(event, record, now)

        return handler

    def _and_give_way(self, handler: Handler) -> Handler:
        def then_give_way(state: RouterState, event: Any, now: float) -> None:
            handler(state, event, now)
            if self._under_way or self._foreign:
                self._give_way(now)

        return then_give_way

    def _arrived(self, request: Request, now: float) -> None:
        if request.answer_inbox is not None:
            return  # its own router keeps its text
        self._trend.arrived(now)
        if (kept := self.hot.saw(request, now)) is not None:
            self._state.emit(fx.KeepPrefix(request.key, kept.name, len(kept.prompt.hashes)))
        self._drop()

    def _on_kept(self, event: ev.PrefixKept) -> None:
        self.hot.keep(event.prefix, event.body_bytes)
        self._drop()

    def _drop(self) -> None:
        self._state.effects.extend(fx.DropPrefix(name) for name in self.hot.dropped)
        self.hot.dropped.clear()

    def _on_placed(self, event: ev.PlacedByPeer, record: RequestRecord, now: float) -> None:
        record.placed_by_peer(event.replica, now)

    def _on_progressed(
        self, event: ev.AttemptProgressed, record: RequestRecord, now: float
    ) -> None:
        record.progressed(now)

    def _on_failed(
        self, event: ev.AttemptRefused | ev.AttemptFailed, record: RequestRecord, now: float
    ) -> None:
        self.counts.failed += 1
        if isinstance(event, ev.AttemptFailed) and event.status is not None:
            self.hot.bar(record.request.prompt.hashes[-1])  # its engine can't compute it
            self._drop()
        self._close(record, now)

    def _on_ended(self, event: ev.AnswerEnded, record: RequestRecord, now: float) -> None:
        served = event.served or NOTHING_REPORTED
        attempts.began(self._state, record, now, shows_ttft=True)
        # Answers of one token must not count for the usual length.
        attempts.served(
            self._state, record, Served(served.prompt_tokens, served.cached_tokens), now
        )
        self.counts.ended += 1
        self._close(record, now)

    def _close(self, record: RequestRecord, now: float) -> None:
        del self._under_way[record.request.key]
        attempts.leave(self._state, record, now)
        self._state.emit(fx.CloseWarmUp(record.request.key))

    def _on_tick(self, now: float) -> None:
        self._end_late(now)
        idle = self._idle.look(self._state.gossip.routers, now)
        if not self._may_warm(now) or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        hottest = self.hot.hottest(HOTTEST_MAX, now)
        if idle and self._has_room() and self._trend.rises(now):
            self._warm_here(hottest, now)
        for region, peer in self._state.peers:
            if self._has_room():
                self._warm_there(region, peer, hottest, now)

    def _has_room(self) -> bool:
        return len(self._under_way) < UNDER_WAY_MAX

    def _end_late(self, now: float) -> None:
        for record in list(self._under_way.values()):
            if now >= record.request.deadline:
                self._stop(record, now)
        for name, foreign in list(self._foreign.items()):
            if now >= foreign.until:
                del self._foreign[name]

    # Giving way.

    def _give_way(self, now: float) -> None:
        """Stop warm-ups if a request is held, and those on a replica that just got other work."""
        if len(self._state.held):
            for record in [one for one in self._under_way.values() if one.peer is None]:
                self._stop(record, now)
            for name in list(self._foreign):
                self._stop_foreign(name, now)
            return
        for effect in list(self._state.effects):
            if isinstance(effect, fx.Dispatch) and effect.region is None:
                for record in list(self._under_way.values()):
                    if record.peer is None and record.replica == effect.replica:
                        self._stop(record, now)
                self._stop_foreign(effect.replica, now)

    def _stop_all(self, now: float) -> None:
        for record in list(self._under_way.values()):
            self._stop(record, now)
        for name in list(self._foreign):
            self._stop_foreign(name, now)

    def _stop(self, record: RequestRecord, now: float) -> None:
        self.counts.stopped += 1
        attempts.cancel(self._state, record)
        self._close(record, now)

    def _stop_foreign(self, name: ReplicaId, now: float) -> None:
        foreign = self._foreign.pop(name, None)
        if foreign is not None and now < foreign.until:
            self.counts.stopped += 1
            self._idle.forget(name, foreign.hashes, foreign.began_at)
            self._state.emit(fx.StopForwarded(foreign.inbox, name))

    # Beginning.

    def _warm_here(self, hottest: Sequence[HotPrefix], now: float) -> None:
        """Place the hottest prefix that fewer replicas hold than its share of requests."""
        for kept in hottest:
            request = self._request(kept, now)
            serving = self._idle.serving(request)
            lacking = [one for one in serving if not self._idle.holds(one, kept.name)]
            wanted = max(1, ceil(self.hot.share(kept, now) * len(serving)))
            if len(serving) - len(lacking) >= wanted:
                continue
            place = self._idle.place(request, lacking, now)
            if place is not None:
                self._begin(request, place, now)
                return

    def _warm_there(
        self, region: RegionId, peer: Peer, hottest: Sequence[HotPrefix], now: float
    ) -> None:
        """Send the hottest prefix that a peer would take and lacks; one at a time."""
        takes = max((one.warm_tokens or 0 for one in peer.digests.values()), default=0)
        if not takes or any(record.peer == region for record in self._under_way.values()):
            return
        if not self._state.settings.hops_max:  # no request leaves the region
            return
        for kept in hottest:
            offered_at = self._offered.get((region, kept.name), float("-inf"))
            if (
                kept.prompt.tokens > takes
                or now - offered_at < self._state.settings.warm_trend_s
                or not self._state.gossip.remote.lacks(region, kept.name)
            ):
                continue
            request = self._request(kept, now)
            wanted = self._state.placer.residency.wanted(request)
            if self._state.placer.residency.takes_peer(wanted, region, peer) and (
                self._state.peers.unavailable_because(peer, kept.model, now, labels=wanted) is None
            ):
                self._offer(region, kept.name, now)
                place = PlacementResult(Placement.PEER, region, "warm: it asks for it", POLICY)
                self._begin(request, place, now)
                return

    def _offer(self, region: RegionId, name: int, now: float) -> None:
        self._offered.pop((region, name), None)
        self._offered[region, name] = now
        if len(self._offered) > OFFERED_MAX:
            del self._offered[next(iter(self._offered))]

    def _on_forwarded(self, request: Request, inbox: str, now: float) -> None:
        """A peer's warm-up: placed at once, or refused."""
        why = self._state.placer.forbids_here(request) or Refusal.NOT_IDLE
        place = None
        if self.wanted_tokens(now) is not None and request.prompt.hashes:
            serving = self._idle.serving(request)
            held = any(self._idle.holds(one, request.prompt.hashes[-1]) for one in serving)
            place = None if held else self._idle.place(request, serving, now)
        if place is None or place.target is None:
            ends.refuse(self._state, request, inbox, why, now)
            return
        until = min(request.deadline, now + DEADLINE_S)
        foreign = ForwardedWarmUp(inbox, until, request.prompt.hashes, now)
        self._foreign[ReplicaId(place.target)] = foreign
        self.counts.peer_requests += 1
        attempts.begin(self._state, RequestRecord(request), place, now)

    def _begin(self, request: Request, place: PlacementResult, now: float) -> None:
        self._last_key = request.key
        record = RequestRecord(request)
        self._under_way[request.key] = record
        self.counts.begun += 1
        self._state.emit(fx.OpenWarmUp(request, request.prompt.hashes[-1]))
        attempts.begin(self._state, record, place, now)

    def _request(self, kept: HotPrefix, now: float) -> Request:
        return Request(
            key=self._last_key - 1,
            request_id=RequestId(f"warm-{-self._last_key + 1}"),
            model=kept.model,
            prompt=kept.prompt,
            arrived_at=now,
            deadline=now + DEADLINE_S,
            hops=0,
            origin=self._state.region,
            priority=Priority.LOW,
            residency=kept.residency,
            warm=True,
        )
