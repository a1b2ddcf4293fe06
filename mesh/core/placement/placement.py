"""Where a request goes: a local replica, a peer region, or nowhere yet (SkyWalker Algorithm 1).

HANDLEREQUEST of the paper, for layered policies: the available local replicas if there are any,
else the available peers, else hold. A joint policy is shown both layers at once and may prefer
to hold. A receipt of those considered comes with every answer. It lists the first few and
counts all: listing a thousand replicas for every request would cost more than placing it.
"""

from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import NamedTuple

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.outgoing_prefixes import OutgoingPrefixes
from mesh.core.model.request import Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.candidates import CandidateCache
from mesh.core.placement.receipt import CandidateLayer, receipt
from mesh.core.placement.residency import AWAY, EXCLUDED, Residency
from mesh.core.policies import POLICIES, PolicyMakers, make_policy
from mesh.core.policies.base import (
    Choice,
    Destination,
    Expiring,
    FirstToken,
    Policy,
    PrefixFollowing,
    Sampling,
    Target,
)
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.peers import NO_REPLICA, PeerTable
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import OTHER_MODEL, ReplicaTable
from schemas.decision import Candidate, CandidateKind, Placement
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.settings import PushingKind

NOWHERE = RegionId("")  # home of a placer that nobody told where it is
NOT_THERE = frozenset({EXCLUDED, AWAY, OTHER_MODEL, NO_REPLICA})  # of those in a receipt

PLACEMENTS = {CandidateKind.REPLICA: Placement.LOCAL, CandidateKind.PEER: Placement.PEER}


class PlacementResult(NamedTuple):
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

    @property
    def is_local(self) -> bool:
        """Whether it goes to a replica of this region, or of one that it has adopted."""
        return self.placement is Placement.LOCAL


class PolicyPair:
    """One policy at work: an instance for each layer, or one for both if it is joint."""

    def __init__(
        self, name: str, settings: RouterSettings, dice: Random, makers: PolicyMakers
    ) -> None:
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
        makers: PolicyMakers | None = None,
        home: RegionId = NOWHERE,
    ) -> None:
        self._settings = settings
        self.residency = Residency(home, settings.ground)
        self._outgoing: OutgoingPrefixes | None = None
        # What the main policy estimates that replicas hold; None for one that follows no prefixes.
        self.index: PrefixIndex[str] | None = None
        self._pushes_past_pending = settings.pushing.kind is not PushingKind.PENDING
        self._replicas = replicas
        self._peers = peers
        self._locals = CandidateCache(
            replicas, peers, self.residency, dice, settings.heartbeat_late_s
        )
        names = dict.fromkeys((settings.policy, *(name for _, name in settings.policy_by_priority)))
        self._pairs = {
            name: PolicyPair(name, settings, dice, POLICIES if makers is None else makers)
            for name in names
        }
        self._pair_by_priority = {
            priority: self._pairs[name] for priority, name in settings.policy_by_priority
        }
        self._main_pair = self._pairs[settings.policy]
        # Whether any of the policies does.
        self.judges_load = any(brain.local.judges_load for brain in self._pairs.values())
        policies = [one for brain in self._pairs.values() for one in (brain.local, brain.remote)]
        once = {id(policy): policy for policy in policies}.values()  # a joint one is both
        self._ageing = [policy for policy in once if isinstance(policy, Expiring)]

    def join_gossip(self, gossip: Gossip) -> None:
        """Feed all policies' indexes with what other routers announce; announce the main one's."""
        self._outgoing = gossip.outgoing
        main = self._main_pair
        for pair in (main, *(one for one in self._pairs.values() if one is not main)):
            if isinstance(pair.local, PrefixFollowing):
                index = pair.local.indexes[CandidateKind.REPLICA]
                if pair is main:
                    self.index, index.outgoing = index, gossip.outgoing
                gossip.siblings.join(index)  # the first that joins is the one that is sent
            if isinstance(pair.remote, PrefixFollowing):
                pair.remote.indexes[CandidateKind.PEER].announced = gossip.remote

    def forbidden(self, request: Request, now: float) -> PlacementResult | None:
        """The receipt of a request that may go nowhere; None if it may go somewhere."""
        why = self.residency.forbids(request)
        if why is None:
            return None
        brain = self._pair_by_priority.get(request.priority, self._main_pair)
        layers = [
            self._local_layer(brain, request, (), now, 0),
            self._peer_layer(brain, request, (), now),
        ]
        return self._held(request, brain, why, *layers)._replace(placement=Placement.SHED)

    def forbids_here(self, request: Request) -> Refusal | None:
        """What to tell a peer whose request has no place here, whoever may be free."""
        return self.residency.refuses_here(request, self._replicas)

    def place(
        self, request: Request, avoid: Collection[str], now: float, ahead: int = 0
    ) -> PlacementResult:
        """Choose, without doing anything yet. Places in `avoid` failed this request before.

        `ahead`: requests that are held here and go before it.
        """
        brain = self._pair_by_priority.get(request.priority, self._main_pair)
        local = self._local_layer(brain, request, avoid, now, ahead)
        if local.free and not brain.local.joint:
            return self._choose(brain, brain.local, request, local.free, now, local)
        if request.answer_inbox is not None or not self._settings.hops_max:
            if local.free:
                return self._choose(brain, brain.local, request, local.free, now, local)
            within = self.residency.within(request)
            return self._held(request, brain, f"no local replica{within} is free", local)
        remote = self._peer_layer(brain, request, avoid, now)
        free = [*local.free, *remote.free]
        if free:
            return self._choose(brain, brain.remote, request, free, now, local, remote)
        return self._held(request, brain, self._nobody(request, local, remote), local, remote)

    def _nobody(self, request: Request, *layers: CandidateLayer) -> str:
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
    def policy_count(self) -> int:
        """How many policies there are; each has another idea of who is available."""
        return len(self._pairs)

    def policy_name(self, request: Request) -> str:
        """The policy that places requests of its class."""
        return self._pair_by_priority.get(request.priority, self._main_pair).name

    def held(self, request: Request, reason: str) -> PlacementResult:
        """The receipt of a request that is held without asking anybody."""
        return self._held(
            request, self._pair_by_priority.get(request.priority, self._main_pair), reason
        )

    def hit_ratio(self, request: Request) -> float:
        """Part of the prompt that some local replica is believed to hold."""
        return self._pair_by_priority.get(request.priority, self._main_pair).local.hit_ratio(
            request
        )

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """The request goes there; every policy learns it, whichever chose."""
        for policy in self._policies(spot.kind, request):
            policy.placed(request, spot, now)

    def began(self, request: Request, spot: Destination, now: float) -> None:
        """Its first token has come from there."""
        for policy in self._policies(spot.kind, request):
            policy.began(request, spot, now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        """Its whole answer has come from there."""
        for policy in self._policies(spot.kind, request):
            policy.served(request, spot, served, now)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        """Nothing came of it there."""
        for policy in self._policies(spot.kind, request):
            policy.left(request, spot, now)

    def forget_replica(self, replica: ReplicaId) -> None:
        """It is gone, or came back with an empty cache."""
        spot = Destination(CandidateKind.REPLICA, replica)
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
        if self._outgoing is not None:
            self._outgoing.is_paused = about is not None and self.residency.is_secret(about)
        return (brain.of(kind) for brain in self._pairs.values())

    def _local_layer(
        self, brain: PolicyPair, request: Request, avoid: Collection[str], now: float, ahead: int
    ) -> CandidateLayer:
        judges_load, sampling = brain.local.judges_load, brain.sampling
        return self._locals.layer(
            request, avoid, now, ahead, sampling=sampling, busy_too=judges_load
        )

    def _peer_layer(
        self, brain: PolicyPair, request: Request, avoid: Collection[str], now: float
    ) -> CandidateLayer:
        layer = CandidateLayer(CandidateKind.PEER)
        busy_too, wanted = brain.local.judges_load, self.residency.wanted(request)
        for region, peer in self._peers:
            why = self.residency.keeps_from_peer(wanted, region, peer)
            if why is None:
                why = self._peers.unavailable_because(
                    peer, request.model, now, busy_too=busy_too, labels=wanted
                )
            load = peer.queue + len(peer.forwarded_at)
            seen = peer.seen_within(wanted)
            target = Target(region, load, layer.kind, peer.rtt_s, None, seen, peer.queue)
            if why is None and region not in avoid:
                layer.free.append(target)
            else:
                layer.busy.append((target, why or "failed before"))
        return layer

    def _choose(
        self,
        brain: PolicyPair,
        policy: Policy,
        request: Request,
        free: Sequence[Target],
        now: float,
        *layers: CandidateLayer,
    ) -> PlacementResult:
        choice = policy.choose(request, free, now)
        target = choice.target
        if target is None:
            return self._held(request, brain, choice.reason, *layers, choice=choice)
        candidates, considered = _listed(request, layers, choice)
        return PlacementResult(
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
        brain: PolicyPair,
        reason: str,
        *layers: CandidateLayer,
        choice: Choice | None = None,
    ) -> PlacementResult:
        candidates, considered = _listed(request, layers, choice or Choice(None, reason))
        chosen = choice is not None
        return PlacementResult(
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


def _listed(
    request: Request, layers: Sequence[CandidateLayer], choice: Choice
) -> tuple[tuple[Candidate, ...], int]:
    """What the receipt lists; nothing if nobody reads it, for listing costs as much as pricing."""
    if not request.wants_receipt:
        return (), 0
    return receipt(layers, choice, request.prompt)
