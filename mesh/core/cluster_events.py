"""The fleet's part of a router: who speaks of replicas and regions, and what peers are told.

Requests live in `router.py`. What they must know of the fleet comes to them in two ways: the
tables are read when a request is placed, and `lost` is called for those whose replica is gone.

Which models the mesh is known to serve: who served a minute ago is late, not unknown.

A model whose only replica restarts must not turn into "no such model" (clients do not try
those again), so names outlive their replicas for a while; requests for them are held meanwhile.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from mesh.core.gossip.gossip import Gossip
from mesh.core.lifecycle.attempts import Attempts
from mesh.core.lifecycle.hold_queue import HoldQueue
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.membership.adoption import Ownership
from mesh.core.membership.handed_back import AdoptedAttempt, HandedBack, HandedBackAttempt
from mesh.core.membership.region_digest import RegionalDigest
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.replica_names import replica_name_at, split_replica_name
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import Placer
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from mesh.core.warming.warming import Warming
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat, ReplicaState

KEPT_S = 120.0  # an engine that loads its weights anew takes about a minute
MODELS_MAX = 4096


class KnownModels:
    """Names of models, each with when it was last heard of."""

    def __init__(self) -> None:
        self._heard_at: dict[ModelId, float] = {}

    def hear(self, models: Iterable[ModelId], now: float) -> None:
        """Somebody serves these."""
        for model in models:
            if model in self._heard_at or len(self._heard_at) < MODELS_MAX:
                self._heard_at[model] = now

    def expire(self, now: float) -> None:
        """Forget what nobody has served for KEPT_S."""
        for model, heard_at in list(self._heard_at.items()):
            if now - heard_at > KEPT_S:
                del self._heard_at[model]

    def known(self) -> tuple[ModelId, ...]:
        """All of them, by name."""
        return tuple(sorted(self._heard_at))


OnReplicaLost = Callable[[Collection[RequestRecord], str, float], None]


class ClusterEvents:
    """Hears heartbeats and digests, ages what was heard, and tells this region's own digest."""

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
        line: QueueScheduler,
        inflight: Mapping[int, RequestRecord],
        attempts: Attempts,
        effects: list[fx.Effect],
        lost: OnReplicaLost,
        gossip: Gossip,
    ) -> None:
        """`regions`: the peers that this one would adopt.

        `lost`: what becomes of requests whose replica was lost, for the reason given.
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
            hands=self,
        )
        self._home = home
        self._replicas = replicas
        self._peers = peers
        self._held = held
        self._placer = placer
        self._scheduler = line
        self._digest = RegionalDigest(home, router, epoch, settings)
        self._inflight = inflight
        self._attempts = attempts
        self._effects = effects
        self._on_lost = lost
        self._models = KnownModels()
        self._handed_back = HandedBack(home, settings)
        self._subscribed: set[RegionId] = set()  # regions whose replicas we listen to
        self.warming = self._warming(settings, gossip)
        self._digest.warm_tokens = self.warming.wanted_tokens

    def _warming(self, settings: RouterSettings, gossip: Gossip) -> Warming:
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
        """Who hears which event, for the router's table."""
        return {
            ev.HeartbeatSeen: self._on_heartbeat,
            ev.DigestSeen: self._on_digest,
            ev.RttMeasured: lambda event, now: self._peers.measured(event.region, event.rtt_s),
            **self.ownership.handlers(),
        }

    def known_models(self) -> tuple[ModelId, ...]:
        """Models that are served, or were until a short while ago."""
        return self._models.known()

    def arrived(self, now: float) -> None:
        """Count one client's request, for the digest."""
        self._digest.arrived(now)

    def expire(self, now: float) -> None:
        """A tick: whoever fell silent is lost, be it a replica or a region."""
        self._replicas.bus.tick(now)
        self.ownership.tick(now, accepting=not self.draining)
        self._replicas.adopted_by_peer = self.ownership.adopted_by(now) is not None
        for name, orphans in self._replicas.expire(now):
            self._notify_lost(name, orphans)
        for name in self._replicas.forgotten(now):
            self._placer.forget_replica(name)
        self._peers.expire(now, self._replicas.bus.paused_s)
        for gone in self._handed_back.expire(now, self._has_live_routers, self._is_awaited):
            self._replica_gone(gone, now)
        self._subscribe_needed_heartbeats()
        self._models.expire(now)
        self._placer.expire(now)

    def publish_digest_if_due(self, now: float) -> None:
        """Say how this region is, if it is time to."""
        digest = self._digest.due(
            self._replicas,
            self._held,
            not self.draining,
            now,
            adopted=self.ownership.adopted,
            rtt_s=self._peers.round_trips,
        )
        if digest is not None:
            self._effects.append(fx.PublishDigest(digest))

    def fresh(self, now: float) -> Digest:
        """This region's state at this moment, for a peer that is being refused."""
        return self._digest.fresh(
            self._replicas,
            self._held,
            not self.draining,
            now,
            adopted=self.ownership.adopted,
        )

    # The hands of ownership.

    def adopt(self, region: RegionId, now: float) -> None:
        """From now on its heartbeats count."""
        self._peers.remember(region)
        self._subscribe_needed_heartbeats()

    def hand_back(self, region: RegionId, now: float) -> None:
        """Place nothing there any more. What is under way is left to end as a peer's would, and
        its replicas are heard until then."""
        ours: dict[ReplicaId, list[AdoptedAttempt]] = {}
        for record in self._inflight.values():
            if record.adopted_from == region and record.replica is not None:
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
        """The heartbeat as our tables know its replica; None if it is not for us to place on."""
        if beat.term:
            self.ownership.saw_term(beat.region, beat.term)
        if beat.region == self._home:
            return beat
        if beat.region not in self.ownership.adopted:
            return None
        name = replica_name_at(beat.region, beat.replica, self._home)
        taken = beat.owner_taken if beat.owner == self._home else {}
        return replace(beat, replica=name, taken=taken)

    def _subscribe_needed_heartbeats(self) -> None:
        """Heartbeats of peers' replicas cross their links while somebody here needs them."""
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

    def _replica_gone(self, gone: HandedBackAttempt, now: float) -> None:
        self._notify_lost(gone.name, gone.orphans)
        lost = [self._inflight[attempt.key] for attempt in gone.ours if self._is_awaited(attempt)]
        for record in lost:
            self._attempts.cancel(record)
        self._on_lost(lost, gone.why, now)

    def _on_heartbeat(self, event: ev.HeartbeatSeen, now: float) -> None:
        if (gone := self._handed_back.hear(event.heartbeat, now)) is not None:
            self._replica_gone(gone, now)
        beat = self._as_known_here(event.heartbeat)
        if beat is None:
            return
        news = self._replicas.see(beat, now)
        if beat.state is not ReplicaState.GONE:
            self._models.hear(beat.models, now)
        if news.restarted:
            self._placer.forget_replica(beat.replica)
            self._notify_lost(beat.replica, news.orphans)
            there = [one for one in self._inflight.values() if one.is_at(beat.replica)]
            self._on_lost(there, "the agent restarted or left", now)
        self._scheduler.offer(beat.replica, now)
        if news.changed:
            self.publish_digest_if_due(now)

    def _on_digest(self, event: ev.DigestSeen, now: float) -> None:
        self._peers.see(event.digest, now)
        self.ownership.hear_digest(event.digest, now)
        self._models.hear(event.digest.models, now)
        if len(self._held) and event.digest.replicas_free:
            self._scheduler.place_waiting(now)

    def drain(self, now: float) -> None:
        """Nothing new from now on."""
        self.draining = True
        self.publish_digest_if_due(now)

    def _refuse(self, request: Request, inbox: str, why: Refusal, now: float) -> None:
        self._effects.append(fx.RefusePeer(request.key, inbox, why, self.fresh(now)))

    def _notify_lost(self, name: ReplicaId, orphans: tuple[str, ...]) -> None:
        region, replica = split_replica_name(name)
        self._effects.extend(fx.TellLost(inbox, replica, region) for inbox in orphans)
