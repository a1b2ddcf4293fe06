"""Heartbeats, digests and leases: what they change, and what peers and agents receive.

Requests are `router.py`'s. It reads the tables that are kept here when it places a request, and
`on_lost` is called with the requests whose replica is lost.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from mesh.core.gossip.gossip import Gossip
from mesh.core.lifecycle.attempts import Attempts
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.membership.adoption import Ownership
from mesh.core.membership.handed_back import AdoptedAttempt, HandedBack, LostWatch
from mesh.core.membership.known_models import KnownModels
from mesh.core.membership.region_digest import RegionalDigest
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.model.served_names import (
    answered_names,
    beat_by_name,
    beat_of_pair,
    digest_by_name,
    model_of,
    with_adapters,
    with_keeper_names,
)
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import Placer
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.requests.record import RequestRecord
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica import replica_name_at, split_replica_name
from mesh.core.view.replica_table import ReplicaTable
from mesh.core.warming.warming import Warming
from schemas.exchange import Refusal
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest, DownReason, Heartbeat, ReplicaState

OnReplicaLost = Callable[[Collection[RequestRecord], ReplicaId, str, float], None]


class ClusterEvents:
    """Takes in heartbeats, digests and leases; publishes this region's digest."""

    def __init__(
        self,
        *,
        home: RegionId,
        router: RouterId,
        epoch: int,
        regions: tuple[RegionId, ...],
        settings: RouterSettings,
        dice: Random,
        replicas: ReplicaTable,
        peers: PeerTable,
        held: HoldQueue,
        placer: Placer,
        scheduler: QueueScheduler,
        inflight: Mapping[int, RequestRecord],
        attempts: Attempts,
        effects: list[fx.Effect],
        on_lost: OnReplicaLost,
        gossip: Gossip,
        terms: dict[RegionId, int],
    ) -> None:
        """`regions`: the peers that this one would adopt. `terms`: filled with owned regions'.

        `on_lost`: called with requests whose replica was lost, and why.
        """
        self.draining = False
        self.ownership = Ownership(
            home=home,
            router=router,
            peers=regions,
            settings=settings,
            table=peers,
            dice=dice,
            effects=effects,
            control=self,
            owned=terms,
        )
        self._home = home
        self._replicas = replicas
        self._peers = peers
        self._held = held
        self._placer = placer
        self._scheduler = scheduler
        self._digest = RegionalDigest(home, router, epoch, settings, replicas, held)
        self._inflight = inflight
        self._attempts = attempts
        self._effects = effects
        self._on_lost = on_lost
        self.models = KnownModels()
        self.arrivals = self._digest.arrivals  # clients' requests, counted by the router
        self._handed_back = HandedBack(home, settings)
        self._subscribed: set[RegionId] = set()  # regions whose heartbeats are received
        self.warming = self._make_warming(settings, gossip)
        self._digest.warm_tokens = self.warming.wanted_tokens

    def _make_warming(self, settings: RouterSettings, gossip: Gossip) -> Warming:
        return Warming(
            region=self._home,
            settings=settings,
            replicas=self._replicas,
            peers=self._peers,
            held=self._held,
            placer=self._placer,
            attempts=self._attempts,
            gossip=gossip,
            effects=self._effects,
            refuse=self._refuse,
        )

    def handlers(self) -> dict[type, Callable[[Any, float], None]]:
        return {
            ev.HeartbeatSeen: self._on_heartbeat,
            ev.DigestSeen: self._on_digest,
            ev.RttMeasured: lambda event, now: self._peers.measured(event.region, event.rtt_s, now),
            **self.ownership.handlers(),
        }

    def expire(self, now: float) -> None:
        """A tick: replicas and regions that are silent for too long are lost."""
        self._replicas.bus.tick(now)
        self.ownership.tick(now, accepting=not self.draining)
        self._replicas.adopted_by_peer = self.ownership.adopted_by(now) is not None
        for name, orphans in self._replicas.expire(now):
            self._notify_lost(name, orphans)
            # It can't be sent their decode stage; requests that it has may still be answered.
            waiting = [one for one in self._inflight.values() if one.will_decode_on(name)]
            if waiting:
                self._on_lost(waiting, name, "its heartbeats are missing", now)
        for name in self._replicas.forgotten(now):
            self._placer.forget_replica(name)
        self._peers.expire(now, self._replicas.bus.paused_s)
        for gone in self._handed_back.expire(now, self._has_live_routers, self._is_awaited):
            self._replica_gone(gone, now)
        self._subscribe_needed_heartbeats()
        self.models.expire(now)
        self._placer.expire(now)

    def publish_digest_if_due(self, now: float) -> None:
        digest = self._digest.due(
            now,
            accepting=not self.draining,
            adopted=self.ownership.adopted,
            rtt_s=self._peers.round_trips,
        )
        if digest is not None:
            self._effects.append(fx.PublishDigest(digest))

    def fresh(self, now: float) -> Digest:
        """This region's digest as of now, for a peer that is being refused."""
        adopted = self.ownership.adopted
        return self._digest.fresh(now, accepting=not self.draining, adopted=adopted)

    # Replica control of `Ownership`.

    def adopt(self, region: RegionId, now: float) -> None:
        """Receive its replicas' heartbeats, and place on them."""
        self._peers.remember(region)
        self._subscribe_needed_heartbeats()

    def hand_back(self, region: RegionId, now: float) -> None:
        """Place on its replicas no more. Attempts under way end as if the region had placed them,
        and the replicas' heartbeats are received until then."""
        ours: dict[ReplicaId, list[AdoptedAttempt]] = {}
        for record in self._inflight.values():
            if record.peer or record.replica is None:
                continue
            if split_replica_name(record.replica).region == region:
                attempt = AdoptedAttempt(record.request.key, record.attempt)
                ours.setdefault(record.replica, []).append(attempt)
                self._attempts.hand_back(record, now)
        for name in self._replicas.names_of(region):
            if (replica := self._replicas.get(name)) is not None:
                self._handed_back.keep(replica, ours.get(name, ()), now)
            self._replicas.remove(name)
            self._placer.forget_replica(name)
        self.publish_digest_if_due(now)
        self._subscribe_needed_heartbeats()

    def _as_known_here(self, beat: Heartbeat) -> Heartbeat | None:
        """The heartbeat with the names in the tables; None for a region not owned."""
        if beat.term:
            self.ownership.saw_term(beat.region, beat.term)
        if beat.loadable or beat.loading:
            self._replicas.note_on_demand(beat)
            beat = with_adapters(beat)
        if beat.paths or beat.routes:
            beat = with_keeper_names(beat_by_name(beat))
        if beat.region == self._home:
            return beat if beat.kv is None else beat_of_pair(beat, self._replicas.has_ready)
        if beat.region not in self.ownership.adopted:
            return None
        name = replica_name_at(beat.region, beat.replica, self._home)
        taken = beat.owner_taken if beat.owner == self._home else {}
        # Without a part in pairs, it answers whole requests only, for the models that it names.
        return replace(beat, replica=name, taken=taken, kv=None)

    def _subscribe_needed_heartbeats(self) -> None:
        """Subscribe to peers' heartbeats, which cross their links, only while they are needed."""
        wanted = {*self.ownership.adopted, *self._handed_back.regions}
        for region in sorted(wanted ^ self._subscribed):
            self._effects.append(fx.HearReplicas(region, region in wanted))
        self._subscribed = wanted

    def _has_live_routers(self, region: RegionId) -> bool:
        peer = self._peers.get(region)
        return peer is not None and bool(peer.digests)

    def _is_awaited(self, attempt: AdoptedAttempt) -> bool:
        record = self._inflight.get(attempt.key)
        if record is None or record.held_since is not None:
            return False
        return record.attempt == attempt.attempt

    def _replica_gone(self, gone: LostWatch, now: float) -> None:
        self._notify_lost(gone.name, gone.orphans)
        lost = [self._inflight[attempt.key] for attempt in gone.ours if self._is_awaited(attempt)]
        for record in lost:
            self._attempts.cancel(record)
        self._on_lost(lost, gone.name, gone.why, now)

    def _on_heartbeat(self, event: ev.HeartbeatSeen, now: float) -> None:
        if self._handed_back.watched:
            gone = self._handed_back.seen(event.heartbeat, now)
            if gone is not None:
                self._replica_gone(gone, now)
        beat = self._as_known_here(event.heartbeat)
        if beat is None:
            return
        change = self._replicas.see(beat, now)
        if beat.results is not None or self._replicas.failing:
            self._told(beat, now)
        if beat.state is not ReplicaState.GONE:
            self.models.see(answered_names(beat) if beat.routes else beat.models, now)
        if change.restarted:
            self._placer.forget_replica(beat.replica)
            self._notify_lost(beat.replica, change.orphans)
            there = [one for one in self._inflight.values() if one.needs(beat.replica)]
            self._on_lost(there, beat.replica, "the agent restarted or left", now)
        if self._held.group_of:
            self._scheduler.offer(beat.replica, now)
        if change.changed:
            self._replica_changed(beat, now)

    def _told(self, beat: Heartbeat, now: float) -> None:
        """What its agent says of answers, if it is the last heartbeat of one that is here."""
        known = self._replicas.get(beat.replica)
        has_one_model = len(set(map(model_of, beat.models))) == 1
        if known is not None and known.heartbeat is beat and has_one_model:
            self._replicas.failing.told(beat.replica, beat.results, now)

    def _replica_changed(self, beat: Heartbeat, now: float) -> None:
        if beat.down_reason == DownReason.ASLEEP:  # its memory is given back, cache and all
            for index in self._placer.replica_indexes:
                index.leave_until(beat.replica, now)
        self.publish_digest_if_due(now)

    def _on_digest(self, event: ev.DigestSeen, now: float) -> None:
        digest = digest_by_name(event.digest) if event.digest.models_by_path else event.digest
        self._peers.see(digest, now)
        self.ownership.digest_seen(digest, now)
        self.models.see(digest.models, now)
        if self._held.group_of:
            self._scheduler.digest_arrived(digest, now)

    def drain(self, now: float) -> None:
        """Accept no new requests from now on."""
        self.draining = True
        self.publish_digest_if_due(now)

    def _refuse(self, request: Request, inbox: str, why: Refusal, now: float) -> None:
        self._effects.append(fx.RefusePeer(request.key, inbox, why, self.fresh(now)))

    def _notify_lost(self, name: ReplicaId, orphans: tuple[str, ...]) -> None:
        region, replica = split_replica_name(name)
        self._effects.extend(fx.TellLost(inbox, replica, region) for inbox in orphans)
