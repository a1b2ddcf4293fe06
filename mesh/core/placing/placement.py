"""Where a request goes: a local replica, a peer region, or nowhere yet (SkyWalker Algorithm 1).

HANDLEREQUEST of the paper, for layered policies: the available local replicas if there are any,
else the available peers, else hold. A joint policy is shown both layers at once and may prefer
to hold. A receipt of those considered comes with every answer. It lists the first few and
counts all: listing a thousand replicas for every request would cost more than placing it.
"""

from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import NamedTuple

from mesh.core.federation.peers import NO_REPLICA, PeerTable
from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.news import News
from mesh.core.placing.local_layer import LocalLayers
from mesh.core.placing.receipt import Layer, receipt
from mesh.core.placing.residency import AWAY, EXCLUDED, Residency
from mesh.core.policies import POLICIES, Makers, make_policy
from mesh.core.policies.base import (
    Ageing,
    Choice,
    FirstToken,
    Following,
    Policy,
    Sampling,
    Spot,
    Target,
)
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.region.pushing import PushingKind
from mesh.core.region.replica import Replica
from mesh.core.region.replicas import OTHER_MODEL, ReplicaTable
from mesh.core.requests.request import Request, Served
from mesh.core.settings import RouterSettings
from schemas.decision import Candidate, CandidateKind, Placement
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId

NOWHERE = RegionId("")  # home of a placer that nobody told where it is
NOT_THERE = frozenset({EXCLUDED, AWAY, OTHER_MODEL, NO_REPLICA})  # of those in a receipt
BEEN_THERE = "been there"
NO_WAY = "no known way to its origin"

PLACEMENTS = {CandidateKind.REPLICA: Placement.LOCAL, CandidateKind.PEER: Placement.PEER}


class Place(NamedTuple):
    """The outcome: `target` is a replica's or a peer's name, None when held."""

    placement: Placement
    target: str | None
    reason: str
    policy: str
    by_choice: bool = False  # held though somebody was free: others in line may be placed
    prefill_tokens: int = 0  # of the prompt, not believed to be held there
    first_token: FirstToken | None = None  # held: where soonest; placed: by a peer or SLO
    may_queue: bool = False  # it was chosen with what is pending there in view
    candidates: tuple[Candidate, ...] = ()  # the best first, at most CANDIDATES_MAX
    considered: int = 0  # all of them


class Brain:
    """One policy at work: an instance for each layer, or one for both if it is joint."""

    def __init__(self, name: str, settings: RouterSettings, dice: Random, makers: Makers) -> None:
        self.name = name
        self.local = make_policy(name, settings, dice, makers)
        self.remote = self.local if self.local.joint else make_policy(name, settings, dice, makers)
        self.sampling = self.local if isinstance(self.local, Sampling) else None

    def of(self, kind: CandidateKind) -> Policy:
        """The instance that knows this layer."""
        return self.local if kind is CandidateKind.REPLICA else self.remote


class Placer:
    """Asks the policy, over those available, and writes the receipt."""

    def __init__(
        self,
        settings: RouterSettings,
        replicas: ReplicaTable,
        peers: PeerTable,
        dice: Random,
        makers: Makers | None = None,
        home: RegionId = NOWHERE,
    ) -> None:
        self._settings = settings
        self.residency = Residency(home, settings.ground)
        self._news: News | None = None
        self._pushes_past_pending = settings.pushing.kind is not PushingKind.PENDING
        self._replicas = replicas
        self._peers = peers
        self._locals = LocalLayers(replicas, peers, self.residency, dice, settings.heartbeat_late_s)
        names = dict.fromkeys((settings.policy, *(name for _, name in settings.policy_by_priority)))
        self._brains = {
            name: Brain(name, settings, dice, POLICIES if makers is None else makers)
            for name in names
        }
        self._brain_of = {
            priority: self._brains[name] for priority, name in settings.policy_by_priority
        }
        self._brain = self._brains[settings.policy]
        # Whether any of the policies does.
        self.judges_load = any(brain.local.judges_load for brain in self._brains.values())
        policies = [one for brain in self._brains.values() for one in (brain.local, brain.remote)]
        once = {id(policy): policy for policy in policies}.values()  # a joint one is both
        self._ageing = [policy for policy in once if isinstance(policy, Ageing)]

    def join_gossip(self, gossip: Gossip) -> None:
        """Let all policies know what others tell; and tell what the main one knows, if at all."""
        self._news = gossip.news
        if gossip.news is not None:
            self._brain.local.tell(gossip.news)
        self._brain.local.share(gossip.siblings)  # first: it is the one that speaks
        for brain in self._brains.values():
            brain.remote.hear(gossip.told)
            if brain is not self._brain:
                brain.local.share(gossip.siblings)

    @property
    def index(self) -> PrefixIndex[str] | None:
        """What the main policy believes that replicas hold; None for one that follows none."""
        policy = self._brain.local
        return policy.replica_index if isinstance(policy, Following) else None

    def forbidden(self, request: Request, now: float) -> Place | None:
        """The receipt of a request that may go nowhere; None if it may go somewhere."""
        why = self.residency.forbids(request)
        if why is None:
            return None
        brain = self._brain_of.get(request.priority, self._brain)
        layers = [
            self._local_layer(brain, request, (), now, 0),
            self._peer_layer(brain, request, (), now),
        ]
        return self._held(request, brain, why, *layers)._replace(placement=Placement.SHED)

    def forbids_here(self, request: Request) -> Refusal | None:
        """What to tell a peer whose request has no place here, whoever may be free."""
        return self.residency.refuses_here(request, self._replicas)

    def place(self, request: Request, avoid: Collection[str], now: float, ahead: int = 0) -> Place:
        """Choose, without doing anything yet. Places in `avoid` failed this request before.

        `ahead`: requests that are held here and go before it.
        """
        brain = self._brain_of.get(request.priority, self._brain)
        local = self._local_layer(brain, request, avoid, now, ahead)
        if local.free and not brain.local.joint:
            return self._choose(brain, brain.local, request, local.free, now, local)
        if request.passed >= self._settings.hops_max:
            if local.free:
                return self._choose(brain, brain.local, request, local.free, now, local)
            within = self.residency.within(request)
            return self._held(request, brain, f"no local replica{within} is free", local)
        remote = self._peer_layer(brain, request, avoid, now)
        free = [*local.free, *remote.free]
        if free:
            return self._choose(brain, brain.remote, request, free, now, local, remote)
        return self._held(request, brain, self._nobody(request, local, remote), local, remote)

    def _nobody(self, request: Request, *layers: Layer) -> str:
        """Why it must wait: whoever will do is busy, or away."""
        within = self.residency.within(request)
        if within and all(why in NOT_THERE for layer in layers for _, why in layer.busy):
            return f"no replica{within} is ready, and no peer: they are away, not forbidden"
        return f"no replica and no peer{within} is free"

    def may_go(self, replica: Replica, models: Collection[ModelId], now: float) -> bool:
        """Whether a held request for one of these models may find room in that replica."""
        busy_too = self.judges_load
        return any(
            self._replicas.unavailable_because(replica, model, now, busy_too=busy_too) is None
            for model in models
        )

    @property
    def brains(self) -> int:
        """How many policies there are; each has another idea of who is available."""
        return len(self._brains)

    def brain_of(self, request: Request) -> str:
        """The policy that places requests of its class."""
        return self._brain_of.get(request.priority, self._brain).name

    def held(self, request: Request, reason: str) -> Place:
        """The receipt of a request that is held without asking anybody."""
        return self._held(request, self._brain_of.get(request.priority, self._brain), reason)

    def hit_ratio(self, request: Request) -> float:
        """Part of the prompt that some local replica is believed to hold."""
        return self._brain_of.get(request.priority, self._brain).local.hit_ratio(request)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """The request goes there; every policy learns it, whichever chose."""
        for policy in self._policies(spot.kind, request):
            policy.placed(request, spot, now)

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """Its first token has come from there."""
        for policy in self._policies(spot.kind, request):
            policy.began(request, spot, now)

    def served(self, request: Request, spot: Spot, served: Served, now: float) -> None:
        """Its whole answer has come from there."""
        for policy in self._policies(spot.kind, request):
            policy.served(request, spot, served, now)

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """Nothing came of it there."""
        for policy in self._policies(spot.kind, request):
            policy.left(request, spot, now)

    def forget_replica(self, replica: ReplicaId) -> None:
        """It is gone, or came back with an empty cache."""
        spot = Spot(CandidateKind.REPLICA, replica)
        for policy in self._policies(spot.kind):
            policy.forget(spot)

    def expire(self, now: float) -> None:
        """A tick: policies let go of what is too old."""
        for policy in self._ageing:
            policy.expire(now)

    def _policies(self, kind: CandidateKind, about: Request | None = None) -> Iterator[Policy]:
        """Whoever is to learn something; what peers may not know of a request, news don't hear.

        Here, and not in each policy, so that none can forget it.
        """
        if self._news is not None:
            self._news.is_deaf = about is not None and self.residency.is_secret(about)
        return (brain.of(kind) for brain in self._brains.values())

    def _local_layer(
        self, brain: Brain, request: Request, avoid: Collection[str], now: float, ahead: int
    ) -> Layer:
        judges_load, sampling = brain.local.judges_load, brain.sampling
        return self._locals.layer(
            request, avoid, now, ahead, sampling=sampling, busy_too=judges_load
        )

    def _peer_layer(
        self, brain: Brain, request: Request, avoid: Collection[str], now: float
    ) -> Layer:
        layer = Layer(CandidateKind.PEER)
        busy_too, wanted = brain.local.judges_load, self.residency.wanted(request)
        for region, peer in self._peers:
            rtt_s, why = peer.rtt_s, self._no_way_because(request, region)
            if request.answer_inbox is not None:
                rtt_s = self._peers.detour_s(region, request.origin)
            if why is None:
                why = self.residency.keeps_from_peer(wanted, region, peer)
            if why is None:
                why = self._peers.unavailable_because(
                    peer, request.model, now, busy_too=busy_too, labels=wanted
                )
            load = peer.queue + len(peer.forwarded_at)
            seen = peer.seen_within(wanted)
            target = Target(region, load, layer.kind, rtt_s, None, seen, peer.queue)
            if why is None and region not in avoid:
                layer.free.append(target)
            else:
                layer.busy.append((target, why or "failed before"))
        return layer

    def _no_way_because(self, request: Request, region: RegionId) -> str | None:
        """Why a peer's request can't be sent on to that region; None for one of our own."""
        if request.answer_inbox is None:
            return None
        if request.has_been_in(region):
            return BEEN_THERE
        if not self.residency.may_send_on(request, region):
            return EXCLUDED
        return NO_WAY if self._peers.detour_s(region, request.origin) is None else None

    def _choose(
        self,
        brain: Brain,
        policy: Policy,
        request: Request,
        free: Sequence[Target],
        now: float,
        *layers: Layer,
    ) -> Place:
        choice = policy.choose(request, free, now)
        target = choice.target
        if target is None:
            return self._held(request, brain, choice.reason, *layers, choice=choice)
        candidates, considered = receipt(layers, choice, request.prompt)
        return Place(
            PLACEMENTS[target.kind],
            target.name,
            choice.reason,
            brain.name,
            prefill_tokens=_prefill_tokens(request, choice),
            first_token=choice.first_token if target.peer or request.slo_ttft_s else None,
            may_queue=policy.judges_load or self._pushes_past_pending,
            candidates=candidates,
            considered=considered,
        )

    def _held(
        self,
        request: Request,
        brain: Brain,
        reason: str,
        *layers: Layer,
        choice: Choice | None = None,
    ) -> Place:
        candidates, considered = receipt(layers, choice or Choice(None, reason), request.prompt)
        chosen = choice is not None
        return Place(
            Placement.HOLD,
            None,
            reason,
            brain.name,
            by_choice=chosen,
            first_token=choice.first_token if choice is not None else None,
            candidates=candidates,
            considered=considered,
        )


def _prefill_tokens(request: Request, choice: Choice) -> int:
    if choice.held_tokens is None:
        return request.prompt.uncached_tokens(choice.matched_blocks)
    return max(1, request.prompt.tokens - choice.held_tokens)
