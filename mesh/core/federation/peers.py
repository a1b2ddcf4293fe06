"""The other regions as this router sees them: round-trip time, digest, what was just sent.

A peer is available (SkyWalker 3.3 and Algorithm 1) while it has replicas that are not full and
its hold queue is at most tau. Digests are older than heartbeats by half a round trip, so what
was forwarded since the last one is counted against the replicas it said were free.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from mesh.core.federation.health import health
from mesh.core.federation.round_trips import RoundTrips
from mesh.core.settings import RouterSettings
from schemas.ids import ModelId, RegionId, RouterId
from schemas.residency import Label
from schemas.state import Digest, Health, ModelCapacity

NO_REPLICA = "no ready replica of this model"

ROUTERS_MAX = 64  # routers of one peer region that are remembered
PEERS_MAX = 256  # regions


@dataclass(slots=True)
class Peer:
    """One peer region. Several routers may speak for it; each one's digest stands by itself."""

    digests: dict[RouterId, Digest] = field(default_factory=dict)
    heard_at: dict[RouterId, float] = field(default_factory=dict)  # the same routers
    seen_at: float = float("-inf")  # any of them
    pings: RoundTrips = field(default_factory=RoundTrips)
    forwarded_at: deque[float] = field(default_factory=deque)
    refused_at: float | None = None
    within: frozenset[Label] | None = None  # only replicas that carry one of these count

    def seen_within(self, labels: frozenset[Label] | None) -> "Peer":
        """The peer as a request sees it that wants one of these labels; for one decision."""
        return self if labels is None else replace(self, within=labels)

    @property
    def rtt_s(self) -> float | None:
        """Seconds there and back, smoothed; None while unknown."""
        return self.pings.rtt_s

    @property
    def queue(self) -> int:
        """Requests held in the region, over all its routers."""
        return sum([digest.queue for digest in self.digests.values()])

    @property
    def accepting(self) -> bool:
        """Whether any of its routers takes requests."""
        return any(digest.accepting for digest in self.digests.values())

    def free(self, model: ModelId, labels: Collection[Label] | None = None) -> int:
        """Replicas that serve the model and are not full, by the latest digest.

        `labels`: only of those that carry one of them.
        """
        return max([capacity.free for capacity in self._told(model, labels)], default=0)

    def wait_s(self, model: ModelId) -> float | None:
        """Shortest wait that any of its routers told; None while none did."""
        waits = [one.wait_s for one in self._told(model, None) if one.wait_s is not None]
        return min(waits, default=None)

    def running(self, model: ModelId) -> float | None:
        """Requests running beside a newcomer; None while nobody told."""
        told = [one.running for one in self._told(model, None) if one.running is not None]
        return max(told, default=None)

    def kv_free_tokens(self, model: ModelId) -> int | None:
        """Most KV memory that one of its replicas has left; None while nobody told."""
        known = [one.kv_free_tokens for one in self._told(model, None)]
        return max([tokens for tokens in known if tokens is not None], default=None)

    @property
    def prefill(self) -> tuple[float | None, float | None]:
        """Seconds per prompt token and of every first token, of its median replica."""
        for digest in self.digests.values():
            if digest.prefill_s_per_token is not None:
                return digest.prefill_s_per_token, digest.prefill_base_s
        return None, None

    @property
    def requests_per_s(self) -> float:
        """Arrivals over all its routers."""
        return sum([digest.requests_per_s for digest in self.digests.values()])

    def ready(self, model: ModelId, labels: Collection[Label] | None = None) -> int:
        """Replicas that serve the model, full or not; `labels` as of `free`."""
        return max([capacity.ready for capacity in self._told(model, labels)], default=0)

    def _told(self, model: ModelId, labels: Collection[Label] | None) -> list[ModelCapacity]:
        kinds = [digest.models for digest in self.digests.values()]
        labels = self.within if labels is None else labels
        if labels is not None:
            kinds = [
                digest.models_by_label.get(label, digest.models)
                for digest in self.digests.values()
                for label in sorted(set(digest.residency or ()).intersection(labels))
            ]
        return [models[model] for models in kinds if model in models]


class PeerTable:
    """All peers that were heard of."""

    def __init__(self, settings: RouterSettings, home: RegionId | None = None) -> None:
        self._settings = settings
        self._home = home
        self._peers: dict[RegionId, Peer] = {}

    def __iter__(self) -> Iterator[tuple[RegionId, Peer]]:
        return iter(self._peers.items())

    def get(self, region: RegionId) -> Peer | None:
        """The peer of that name, if it was heard of."""
        return self._peers.get(region)

    def rtt_s(self, region: RegionId) -> float | None:
        """Seconds to a replica there and back; 0.0 at home, None while unknown."""
        if self._home is None or region == self._home:
            return 0.0
        peer = self._peers.get(region)
        return None if peer is None else peer.rtt_s

    def detour_s(self, region: RegionId, origin: RegionId) -> float | None:
        """What it costs to send another region's request on instead of serving it here: half a
        round trip there, and half of one from there to its origin instead of from here, as the
        answer goes straight. None where that region does not say that it knows the way."""
        peer, asker = self._peers.get(region), self._peers.get(origin)
        if peer is None or peer.rtt_s is None:
            return None
        told = [digest.rtt_s[origin] for digest in peer.digests.values() if origin in digest.rtt_s]
        if not told:
            return None
        saved_s = 0.0 if asker is None or asker.rtt_s is None else asker.rtt_s
        return max(0.0, (peer.rtt_s + min(told) - saved_s) / 2)

    def round_trips(self) -> dict[RegionId, float]:
        """Seconds to every peer that was measured."""
        return {name: peer.rtt_s for name, peer in self._peers.items() if peer.rtt_s is not None}

    def remember(self, region: RegionId) -> None:
        """Work may be handed over to it, whether it was heard of or not."""
        self._known(region)

    def measured(self, region: RegionId, rtt_s: float | None) -> None:
        """Take in one ping; None if no answer came to it."""
        peer = self._known(region)
        if peer is None:
            return
        if rtt_s is None:
            peer.pings.lost()
        else:
            peer.pings.measured(rtt_s)

    def health(self, peer: Peer, now: float) -> Health:
        """How alive it is, by the gap since any of its routers spoke."""
        gap_s = now - peer.seen_at
        return health(gap_s, self._settings.digest_late_s, self._settings.digest_lost_s)

    def see(self, digest: Digest, now: float) -> None:
        """Take in a digest; older ones of the same router are ignored."""
        peer = self._known(digest.region)
        if peer is None:
            return
        known = peer.digests.get(digest.router)
        if known is not None and (digest.epoch, digest.seq) <= (known.epoch, known.seq):
            return
        if known is None and len(peer.digests) >= ROUTERS_MAX:
            return
        if known is not None and not (digest.rtt_s and digest.cards):
            # Told now and then: the last ones hold.
            digest = replace(
                digest, rtt_s=digest.rtt_s or known.rtt_s, cards=digest.cards or known.cards
            )
        peer.digests[digest.router], peer.heard_at[digest.router] = digest, now
        peer.seen_at, peer.refused_at = now, None
        # The digest left half a round trip ago: what was forwarded since can't be in it. An
        # unknown round trip is not a short one.
        rtt_s = self._settings.digest_lost_s if peer.rtt_s is None else peer.rtt_s
        while peer.forwarded_at and peer.forwarded_at[0] < now - rtt_s:
            peer.forwarded_at.popleft()

    def forwarded(self, region: RegionId, now: float) -> None:
        """Count a request that is being sent there."""
        self._peers[region].forwarded_at.append(now)

    def refused(self, region: RegionId, now: float) -> None:
        """It had nobody free: not available until its next digest."""
        if (peer := self._peers.get(region)) is not None:
            peer.refused_at = now

    def expire(self, now: float, stood_s: Callable[[float], float] = lambda since: 0.0) -> None:
        """Forget what routers said that fell silent: their queues and models are unknown again.

        `stood_s`: seconds since a time that are nobody's silence, as this router stood still.
        """
        lost_s = self._settings.digest_lost_s
        for peer in self._peers.values():
            for router, heard_at in list(peer.heard_at.items()):
                if now - heard_at > lost_s and now - heard_at - stood_s(heard_at) > lost_s:
                    del peer.digests[router], peer.heard_at[router]
            if not peer.digests:
                peer.forwarded_at.clear()

    def unavailable_because(
        self,
        peer: Peer,
        model: ModelId,
        now: float,
        *,
        busy_too: bool = False,
        labels: Collection[Label] | None = None,
    ) -> str | None:
        """Why this peer should not be asked now, or None if it may be.

        `busy_too`: whoever asks judges by itself what is too busy. `labels`: only replicas that
        carry one of these count.
        """
        if self.health(peer, now) is Health.RED:
            return "silent"
        if not peer.accepting:
            return "draining"
        if not peer.ready(model, labels):
            return NO_REPLICA
        if peer.refused_at is not None:
            return "refused"
        if busy_too:
            return None
        if peer.queue > self._settings.peer_queue_max:
            return "queue"
        if peer.free(model, labels) <= len(peer.forwarded_at):
            return "full"
        return None

    def _known(self, region: RegionId) -> Peer | None:
        """The peer of that name, from now on; None if there are too many."""
        if region not in self._peers and len(self._peers) < PEERS_MAX:
            self._peers[region] = Peer()
        return self._peers.get(region)
