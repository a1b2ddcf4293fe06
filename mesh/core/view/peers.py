"""The peer regions as this router sees them: health, round trip, digests, work just forwarded.

A peer is available (SkyWalker 3.3 and Algorithm 1) while it has replicas that are not full and its
hold queue is at most tau. A digest is half a round trip old on arrival, so what was forwarded
since is counted against the free replicas that it names.

Health is judged by the gap since the last digest: green while digests come in time, yellow when
some are missing, red when the peer gets no work. A router with nothing to do publishes fewer, and
each says when the next one comes at the latest: the gap counts from the usual time before that.
Each router judges by what it receives itself, so no rumour needs a refutation, for which SWIM has
incarnation numbers; (epoch, seq) order the digests of one router, and after a silence any new epoch
counts, whatever its host's clock shows. Source: SWIM (Das et al. 2002) 4.2; SkyWalker 3.3.

Round trips are measured by pings over the bus, the way that work goes. The median of the last few
enters a running average, so one late ping is no trend. Jitter is RFC 3550's (6.4.1); loss is
counted over the last pings.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mesh.core.model.settings import RouterSettings
from mesh.core.view.outliers import FailingPlaces
from schemas.ids import ModelId, RegionId, RouterId
from schemas.listed_replicas import ListedReplicas
from schemas.residency import Label
from schemas.state import Digest, Health, ModelCapacity, ModelCard, longer_s

RTT_WEIGHT = 0.3  # of a new median in the running average
RTT_SAMPLES = 5  # the median of so many
JITTER_WEIGHT = 1 / 16  # RFC 3550
PINGS_COUNTED = 60  # a minute of them: one lost is under two percent
LOST_DIGESTS = 2.5  # without one for the time of so many
PING_GAP_S = 1.5  # they leave once a second: where answers are further apart, something waits


@dataclass(slots=True)
class RoundTripEstimate:
    """Seconds; None until known."""

    rtt_s: float | None = None
    jitter_s: float | None = None
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=RTT_SAMPLES))
    _answered: deque[bool] = field(default_factory=lambda: deque(maxlen=PINGS_COUNTED))

    @property
    def loss_ratio(self) -> float | None:
        """Part of the last pings without an answer."""
        if not self._answered:
            return None
        return 1.0 - sum(self._answered) / len(self._answered)

    def measured(self, rtt_s: float) -> None:
        self._answered.append(True)
        if self._samples:
            change_s = abs(rtt_s - self._samples[-1])
            before_s = 0.0 if self.jitter_s is None else self.jitter_s
            self.jitter_s = before_s + JITTER_WEIGHT * (change_s - before_s)
        self._samples.append(rtt_s)
        median = sorted(self._samples)[len(self._samples) // 2]
        self.rtt_s = (
            median if self.rtt_s is None else self.rtt_s + RTT_WEIGHT * (median - self.rtt_s)
        )

    def lost(self) -> None:
        self._answered.append(False)


def health(gap_s: float, late_s: float, lost_s: float) -> Health:
    """The health by the gap since the last digest, in seconds; infinite if there was none."""
    if gap_s > lost_s:
        return Health.RED
    return Health.YELLOW if gap_s > late_s else Health.GREEN


NO_REPLICA = "no ready replica of this model"

ROUTERS_MAX = 64  # routers of one peer region that are remembered
PEERS_MAX = 256  # regions


class SeldomSent(NamedTuple):
    """What a router's digests contain now and then; the last ones hold."""

    rtt_s: Mapping[RegionId, float] = {}
    cards: Mapping[ModelId, ModelCard] = {}


NEVER_SENT = SeldomSent()


@dataclass(slots=True)
class Peer:
    """One peer region, by the last digest of each of its routers."""

    digests: dict[RouterId, Digest] = field(default_factory=dict)  # as they came
    # From when on the silence of each of these counts: later than its last digest where that says
    # that the next one will come later than usual. And of all of them together.
    silent_from: dict[RouterId, float] = field(default_factory=dict)
    all_silent_from: float = float("-inf")
    seldom_sent: dict[RouterId, SeldomSent] = field(default_factory=dict)  # by the same routers
    seen_at: float = float("-inf")  # the latest arrival
    pings: RoundTripEstimate = field(default_factory=RoundTripEstimate)
    answered_at: float | None = None  # when the last answer to a ping arrived; None: none has
    answers_since: float = float("-inf")  # since when they come without a longer gap
    forwarded_at: deque[float] = field(default_factory=deque)
    refused_at: float | None = None
    within: frozenset[Label] | None = None  # only replicas that carry one of these count

    def seen_within(self, labels: frozenset[Label] | None) -> "Peer":
        """The peer for one decision about a request that requires one of these labels."""
        return self if labels is None else replace(self, within=labels)

    @property
    def rtt_s(self) -> float | None:
        """Seconds there and back, smoothed; None while unknown."""
        return self.pings.rtt_s

    def may_be_late(self, now: float) -> bool:
        """Whether what was sent there may still wait in the link: digests come, and answers to
        pings, which travel behind it, do not."""
        if self.answered_at is None or not self.digests:
            return False
        return now - self.answered_at > PING_GAP_S

    @property
    def queue(self) -> int:
        return sum([digest.queue for digest in self.digests.values()])

    @property
    def accepting(self) -> bool:
        return any(digest.accepting for digest in self.digests.values())

    def free(self, model: ModelId, labels: Collection[Label] | None = None) -> int:
        """Replicas that serve the model and are not full, by the latest digest.

        `labels`: only of those that carry one of them.
        """
        return max([capacity.free for capacity in self._capacities(model, labels)], default=0)

    def wait_s(self, model: ModelId) -> float | None:
        """Shortest wait by its routers' digests; None while unknown."""
        waits = [one.wait_s for one in self._capacities(model, None) if one.wait_s is not None]
        return min(waits, default=None)

    def load_s(self, model: ModelId) -> float:
        """Shortest time to load that adapter there; 0 where a replica has it, and of a model."""
        return min([one.load_s or 0.0 for one in self._capacities(model, None)], default=0.0)

    def running(self, model: ModelId) -> float | None:
        """Requests running beside a newcomer; None while unknown."""
        known = [one.running for one in self._capacities(model, None) if one.running is not None]
        return max(known, default=None)

    def kv_free_tokens(self, model: ModelId) -> int | None:
        """Most KV memory that one of its replicas has left; None while unknown."""
        known = [one.kv_free_tokens for one in self._capacities(model, None)]
        return max([tokens for tokens in known if tokens is not None], default=None)

    def listed(self, model: ModelId) -> tuple[ListedReplicas, tuple[int, ...]] | None:
        """Replicas that its digests list, and the places of those that serve the model, by the
        router heard last; None if none is listed."""
        for digest in reversed(self.digests.values()):
            for capacity in self._capacities_of(digest, model, self.within):
                if capacity.listed:
                    return digest.replicas, capacity.listed
        return None

    @property
    def prefill(self) -> tuple[float | None, float | None]:
        """Seconds per prompt token and of every first token, of its median replica."""
        for digest in self.digests.values():
            if digest.prefill_s_per_token is not None:
                return digest.prefill_s_per_token, digest.prefill_base_s
        return None, None

    @property
    def requests_per_s(self) -> float:
        return sum([digest.requests_per_s for digest in self.digests.values()])

    def ready(self, model: ModelId, labels: Collection[Label] | None = None) -> int:
        """Replicas that serve the model, full or not; `labels` as of `free`."""
        return max([capacity.ready for capacity in self._capacities(model, labels)], default=0)

    def _capacities(self, model: ModelId, labels: Collection[Label] | None) -> list[ModelCapacity]:
        labels = self.within if labels is None else labels
        return [
            capacity
            for digest in self.digests.values()
            for capacity in self._capacities_of(digest, model, labels)
        ]

    @staticmethod
    def _capacities_of(
        digest: Digest, model: ModelId, labels: Collection[Label] | None
    ) -> list[ModelCapacity]:
        kinds = [digest.models]
        if labels is not None:
            kinds = [
                digest.models_by_label.get(label, digest.models)
                for label in sorted(set(digest.residency or ()).intersection(labels))
            ]
        return [models[model] for models in kinds if model in models]


class PeerTable:
    """All known peers."""

    def __init__(self, settings: RouterSettings, home: RegionId) -> None:
        self._settings = settings
        self.by_region: dict[RegionId, Peer] = {}
        self.failing = FailingPlaces()
        # The last digest of a router that needs this region's at the usual pace: it has just
        # started, or does not read when the next one comes.
        self.hurry_at = float("-inf")
        # Seconds to a replica there and back; 0.0 at home, absent while unknown.
        self.rtt_s: dict[RegionId, float] = {home: 0.0}

    def __iter__(self) -> Iterator[tuple[RegionId, Peer]]:
        return iter(self.by_region.items())

    def get(self, region: RegionId) -> Peer | None:
        return self.by_region.get(region)

    def round_trips(self) -> dict[RegionId, float]:
        return {name: peer.rtt_s for name, peer in self if peer.rtt_s is not None}

    def remember(self, region: RegionId) -> None:
        """Make it known without a digest: its requests may be handed back to it."""
        self._known(region)

    def measured(self, region: RegionId, rtt_s: float | None, now: float | None = None) -> None:
        """A ping was answered (`now`: that moment, where it counts), or was not: None."""
        peer = self._known(region)
        if peer is None:
            return
        if rtt_s is None:
            peer.pings.lost()
        else:
            peer.pings.measured(rtt_s)
            if now is not None:
                if peer.answered_at is None or now - peer.answered_at > PING_GAP_S:
                    peer.answers_since = now
                peer.answered_at = now
        if peer.rtt_s is not None:
            self.rtt_s[region] = peer.rtt_s

    def health(self, peer: Peer, now: float) -> Health:
        """Its health, by the gap since the last digest of any of its routers."""
        gap_s = now - peer.all_silent_from
        return health(gap_s, self._settings.digest_late_s, self._settings.digest_lost_s)

    def see(self, digest: Digest, now: float) -> bool:
        """Take in a digest; older ones of the same router are ignored. Says whether the link lost
        some before it: they were late, and there is a gap in their numbers. Such a gap alone may be
        digests that other regions were sent with refusals."""
        peer = self._known(digest.region)
        if peer is None:
            return False
        known = peer.digests.get(digest.router)
        if known is not None and (digest.epoch, digest.seq) <= (known.epoch, known.seq):
            return False
        if known is None and len(peer.digests) >= ROUTERS_MAX:
            return False
        if known is None:
            are_lost = not peer.digests and peer.seen_at > float("-inf")
        else:
            silent_s = now - peer.silent_from[digest.router]
            late_s = silent_s - LOST_DIGESTS * self._settings.digest_s
            are_lost = late_s > 0 and digest.seq > known.seq + 1
        if known is None or digest.rtt_s or digest.cards:
            rtt_s, cards = peer.seldom_sent.get(digest.router, NEVER_SENT)
            sent = SeldomSent(digest.rtt_s or rtt_s, digest.cards or cards)
            peer.seldom_sent[digest.router] = sent
        if digest.next_within_s is None or known is None or known.epoch != digest.epoch:
            self.hurry_at = now
        silent_from = now + longer_s(digest.next_within_s, self._settings.digest_s)
        peer.digests.pop(digest.router, None)  # the one heard last is the last
        peer.digests[digest.router], peer.silent_from[digest.router] = digest, silent_from
        peer.all_silent_from = max(peer.all_silent_from, silent_from)
        peer.seen_at, peer.refused_at = now, None
        # The digest left half a round trip ago: what was forwarded since can't be in it.
        away_s = self._settings.digest_lost_s if peer.rtt_s is None else peer.rtt_s
        while peer.forwarded_at and peer.forwarded_at[0] < now - away_s:
            peer.forwarded_at.popleft()
        return are_lost

    def forwarded(self, region: RegionId, now: float) -> None:
        """Count a request that is being sent there."""
        self.by_region[region].forwarded_at.append(now)

    def refused(self, region: RegionId, now: float) -> None:
        """It had no free replica: not available until its next digest."""
        if (peer := self.by_region.get(region)) is not None:
            peer.refused_at = now

    def expire(self, now: float, paused_s: Callable[[float], float] = lambda since: 0.0) -> None:
        """Drop digests of silent routers: their queues and models are unknown again.

        `paused_s`: of the seconds since a time, those in which this process was suspended.
        """
        lost_s = self._settings.digest_lost_s
        if self.failing.places:
            self.failing.expire(now)
        for peer in self.by_region.values():
            for router, since in list(peer.silent_from.items()):
                if now - since > lost_s and now - since - paused_s(since) > lost_s:
                    del peer.digests[router], peer.silent_from[router], peer.seldom_sent[router]
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
        queue_max: int | None = None,
    ) -> str | None:
        """Why this peer may not be given a request now, or None if it may.

        `busy_too`: the policy judges by itself what is too busy. `labels`: only replicas that
        carry one of these count. `queue_max`: the longest hold queue, if less than the setting.
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
        if queue_max is not None and peer.queue > queue_max:
            return "queue"
        if peer.free(model, labels) <= len(peer.forwarded_at):
            return "full"
        return None

    def _known(self, region: RegionId) -> Peer | None:
        """The peer of that name, added if it is new; None if there are too many."""
        if region not in self.by_region and len(self.by_region) < PEERS_MAX:
            self.by_region[region] = Peer()
        return self.by_region.get(region)
