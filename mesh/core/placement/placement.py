"""Where a request goes: a local replica, a peer region, or nowhere yet (SkyWalker Algorithm 1).

HANDLEREQUEST of the paper, for layered policies: the available local replicas if there are any,
else the available peers, else hold. A joint policy gets both layers at once and may prefer to
hold. Every result has a receipt, which lists the first few candidates and counts all: listing a
thousand replicas per request would cost more than placing it.
"""

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.publisher import OutgoingPrefixes
from mesh.core.model.request import Request, Served
from mesh.core.model.served_names import model_of
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.candidates import CandidateCache, CandidateLayer, of_loaded
from mesh.core.placement.pairs import Pairs, PrefillChoice, choice_of
from mesh.core.placement.receipt import UnlistedCandidates, receipt, unlisted
from mesh.core.placement.residency import AWAY, EXCLUDED, Residency
from mesh.core.policies import POLICIES, PolicyMakers, make_policy
from mesh.core.policies.base import (
    CacheEstimate,
    Choice,
    Destination,
    Expiring,
    FirstToken,
    PairPricing,
    Policy,
    PrefixFollowing,
    QueueComparing,
    Sampling,
    Succeeding,
    Target,
)
from mesh.core.prefixes.prefix_index import NEVER, PrefixIndex
from mesh.core.view.peers import NO_REPLICA, PeerTable
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import OTHER_MODEL, ReplicaTable
from schemas.decision import Candidate, CandidateKind, Placement
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.settings import PushingKind
from schemas.state import ReplicaState

READY = ReplicaState.READY.value
# Reasons in a receipt that a place is down, not busy.
NOT_READY = frozenset({EXCLUDED, AWAY, OTHER_MODEL, NO_REPLICA, *ReplicaState} - {READY})

NONE: frozenset[str] = frozenset()  # places
NO_RECEIPT: tuple[tuple[Candidate, ...], int] = (), 0


class PlacementResult(NamedTuple):
    """The decision: `target` is a replica's or a peer's name, None when held."""

    placement: Placement
    target: str | None
    reason: str
    policy: str
    by_choice: bool = False  # held though a place was available: others held may be placed
    prefill_tokens: int = 0  # of the prompt, estimated not to be cached there
    first_token: FirstToken | None = None  # held: the soonest; placed: at a peer, or with objective
    may_queue: bool = False  # the policy chose it knowing what is pending there
    candidates: tuple[Candidate, ...] = ()  # the best first, at most CANDIDATES_MAX
    considered: int = 0  # all of them
    unlisted: UnlistedCandidates | None = None  # instead, where the request wants no receipt
    prefill: PrefillChoice | None = None  # on a pair: where the prompt is computed


class PolicyPair:
    """One policy: an instance for each layer, or one for both if it is joint."""

    def __init__(
        self, name: str, settings: RouterSettings, dice: Random, makers: PolicyMakers
    ) -> None:
        self.name = name
        self.local = make_policy(name, settings, dice, makers)
        self.remote = self.local if self.local.joint else make_policy(name, settings, dice, makers)
        self.sampling = self.local if isinstance(self.local, Sampling) else None
        self.compares_queues = isinstance(self.local, QueueComparing) and self.local.compares_queues
        self.prices_pairs = isinstance(self.local, PairPricing)

    @property
    def indexes(self) -> list[PrefixIndex[str]]:
        """Of replicas and of peers, as far as it follows prefixes; each fed by its own layer."""
        layers = (self.local, CandidateKind.REPLICA), (self.remote, CandidateKind.PEER)
        return [
            policy.indexes[kind] for policy, kind in layers if isinstance(policy, PrefixFollowing)
        ]

    def go_on_from(self, earlier: "PolicyPair", *, copied: bool) -> None:
        """Know what another pair has learned, as far as both learn it; see `PrefixIndex`."""
        for index, before in zip(self.indexes, earlier.indexes, strict=False):
            index.go_on_from(before, copied=copied)
        if isinstance(self.local, Succeeding):
            self.local.go_on_from(earlier.local, copied=copied)


class Placer:
    """Places requests by their class's policy, and feeds all policies with what comes of it."""

    def __init__(
        self,
        settings: RouterSettings,
        replicas: ReplicaTable,
        peers: PeerTable,
        dice: Random,
        makers: PolicyMakers | None,
        home: RegionId,
        gossip: Gossip | None = None,
    ) -> None:
        """`gossip`: feeds the policies' indexes, and publishes the main one's."""
        self.residency = Residency(home, settings.ground)
        self._gossip = gossip
        self._outgoing: OutgoingPrefixes | None = None if gossip is None else gossip.outgoing
        # The main policy's estimate of what replicas hold; None if it has no index.
        self.index: PrefixIndex[str] | None = None
        self._replicas = replicas
        self._candidates = CandidateCache(
            replicas, peers, self.residency, dice, settings.heartbeat_late_s
        )
        self._pairings = Pairs(replicas, self.residency, dice)
        self._dice = dice
        self._makers = POLICIES if makers is None else makers
        self._pairs: dict[str, PolicyPair] = {}
        self._use(settings)
        self._join_gossip()

    def follow(self, settings: RouterSettings) -> None:
        """Place by these from now on. A policy that stays keeps what it has learned; a new one goes
        on from one of its kind or, for prefixes, from the main one before it."""
        before, main = self._pairs, self._main_pair
        self._use(settings)
        if [*before] == [*self._pairs] and main is self._main_pair:
            return
        self._leave_gossip(before.values())
        in_use = set(self._pairs)  # those whose knowledge must be copied
        for name, pair in self._pairs.items():
            if name not in before:
                same_kind = (one for one in before.values() if type(one.local) is type(pair.local))
                earlier = next(same_kind, main)
                pair.go_on_from(earlier, copied=earlier.name in in_use)
                in_use.add(earlier.name)
        self._join_gossip()
        if self._outgoing is not None:
            index = self.index
            self._outgoing.keep_only(lambda block: index is not None and block in index)

    def _leave_gossip(self, pairs: Collection[PolicyPair]) -> None:
        self.index = None
        if self._gossip is not None:
            self._gossip.siblings.leave_all()
        for pair in pairs:
            for index in pair.indexes:
                index.outgoing = index.announced = None

    def _use(self, settings: RouterSettings) -> None:
        self._pushes_past_pending = settings.pushing.kind is not PushingKind.PENDING
        self._may_forward = self._candidates.may_forward = settings.hops_max > 0
        before = self._pairs
        by_model = {rule.name: rule.policy for rule in settings.models if rule.policy is not None}
        by_priority = dict(settings.policy_by_priority)
        names = dict.fromkeys((settings.policy, *by_priority.values(), *by_model.values()))
        self._pairs = {
            name: before.get(name) or PolicyPair(name, settings, self._dice, self._makers)
            for name in names
        }
        self._pair_by_priority = {key: self._pairs[name] for key, name in by_priority.items()}
        self._pair_by_model = {key: self._pairs[name] for key, name in by_model.items()}
        self._main_pair = self._pairs[settings.policy]
        self.judges_load = any(pair.local.judges_load for pair in self._pairs.values())
        self._local_policies = [pair.local for pair in self._pairs.values()]
        self._remote_policies = [pair.remote for pair in self._pairs.values()]
        self._following = [one for one in self._local_policies if isinstance(one, PrefixFollowing)]
        policies = [*self._local_policies, *self._remote_policies]
        once = {id(policy): policy for policy in policies}.values()  # a joint one is both
        self._expiring = [policy for policy in once if isinstance(policy, Expiring)]

    def _join_gossip(self) -> None:
        """Feed all policies' indexes with other routers' prefixes; publish the main one's."""
        gossip = self._gossip
        if gossip is None:
            return
        main = self._main_pair
        for pair in (main, *(one for one in self._pairs.values() if one is not main)):
            if isinstance(pair.local, PrefixFollowing):
                index = pair.local.indexes[CandidateKind.REPLICA]
                if pair is main:
                    self.index, index.outgoing = index, gossip.outgoing
                gossip.siblings.join(index)  # the first that joins is published
            if isinstance(pair.remote, PrefixFollowing):
                pair.remote.indexes[CandidateKind.PEER].announced = gossip.remote

    @property
    def replica_indexes(self) -> list[PrefixIndex[str]]:
        """Of all policies that follow prefixes: what replicas are estimated to hold."""
        return [policy.indexes[CandidateKind.REPLICA] for policy in self._following]

    def forbidden(self, request: Request, now: float) -> PlacementResult | None:
        """The receipt of a request that no region may serve; None if some may."""
        if not request.residency and not self.residency.is_confined:
            return None
        why = self.residency.forbids(request)
        if why is None:
            return None
        pair = self._pair_of(request)
        local = self._local_layer(pair, request, (), now, 0)
        remote = self._candidates.of_peers(request, (), now, busy_too=pair.local.judges_load)
        return self._held(request, pair, why, local, remote)._replace(placement=Placement.SHED)

    def forbids_here(self, request: Request) -> Refusal | None:
        """The refusal of a peer's request that no replica here may serve, free or not."""
        why = self.residency.refuses_here(request, self._replicas)
        never = why is None and self._pairings.are_all_for(request)
        return Refusal.WRONG_MODEL if never else why

    def place(
        self,
        request: Request,
        avoid: Collection[str],
        now: float,
        ahead: int = 0,
        queue: int = 1,
        *,
        is_held: bool = False,
        kept_from: frozenset[str] = NONE,
    ) -> PlacementResult:
        """Choose a place; changes no state. Places in `avoid` failed this request before, replicas
        in `kept_from` are kept for other tenants.

        `ahead`: requests that are held here and go before it. `queue`: all that look for a place
        here, held ones and this one. `is_held`: it is one of them; of a peer's request, a peer is
        chosen if it is to be handed back, for a region that serves it sooner than a replica here.
        """
        pair = self._pair_of(request)
        local = self._local_layer(pair, request, avoid, now, ahead, kept_from)
        if local.free and not pair.local.joint:
            return self._choose(pair, pair.local, request, local.free, now, local)
        kind = request.kind
        goes_back = is_held and not kind.ends_here and pair.local.judges_load and bool(local.free)
        if not (self._may_forward and (kind.may_leave or goes_back)):
            if local.free:
                return self._choose(pair, pair.local, request, local.free, now, local)
            within, what = self.residency.within(request), _lacks(local)
            return self._held(request, pair, f"no local replica{within} is {what}", local)
        judges_load = pair.local.judges_load
        queue_max = queue if pair.compares_queues else None
        remote = self._candidates.of_peers(
            request, avoid, now, busy_too=judges_load, queue_max=queue_max
        )
        free = [*local.free, *remote.free]
        if free:
            return self._choose(pair, pair.remote, request, free, now, local, remote)
        return self._held(request, pair, self._none_free(request, local, remote), local, remote)

    def _none_free(self, request: Request, *layers: CandidateLayer) -> str:
        """Why it must wait: all places that may serve it are busy, or away."""
        within = self.residency.within(request)
        if (what := _lacks(*layers)) == READY:
            not_forbidden = ": they are away, not forbidden" if within else " has one"
            return f"no replica{within} is ready, and no peer{not_forbidden}"
        return f"no replica and no peer{within} is {what}"

    def _pair_of(self, request: Request) -> PolicyPair:
        """By its model, or else by its class."""
        if self._pair_by_model:
            pair = self._pair_by_model.get(model_of(request.model))
            if pair is not None:
                return pair
        return self._pair_by_priority.get(request.priority, self._main_pair)

    def may_go(self, replica: Replica, models: Collection[ModelId], now: float) -> bool:
        """Whether that replica may have room for a held request for one of these models."""
        busy_too = self.judges_load
        return any(
            self._replicas.unavailable_because(replica, model, now, busy_too=busy_too) is None
            for model in models
        )

    @property
    def policy_count(self) -> int:
        return len(self._pairs)

    def policy_name(self, request: Request) -> str:
        """The policy that places its requests."""
        return self._pair_of(request).name

    def held(self, request: Request, reason: str) -> PlacementResult:
        """The receipt of a request that is held without any candidate."""
        return self._held(request, self._pair_of(request), reason)

    def hit_ratio(self, request: Request) -> float:
        """Part of the prompt that some local replica is estimated to hold."""
        return self._pair_of(request).local.hit_ratio(request)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """The request goes there; all policies learn it, whichever chose.

        Its prefix is not noted for publication if some peer may not know of it: here, and not in
        each policy, so that none can forget it.
        """
        if self._outgoing is not None:
            is_labelled = request.residency or self.residency.is_confined
            self._outgoing.is_paused = bool(is_labelled) and self.residency.is_secret(request)
        for policy in self._of_layer(spot):
            policy.placed(request, spot, now)

    def prefills(self, request: Request, replica: ReplicaId, now: float) -> tuple[int, float]:
        """The request's prompt is computed there, for a decode replica. Returns how many of its
        blocks are estimated to be there already, and when the deepest was placed there."""
        hashes = request.prompt.hashes
        held = [index.insert(replica, hashes, now) for index in self.replica_indexes]
        return max(held, default=(0, NEVER))

    def prefilled(
        self,
        request: Request,
        replica: ReplicaId,
        held: CacheEstimate,
        served: Served,
        now: float,
    ) -> None:
        """That is done, at this cost; `held`: what was estimated to be there."""
        if not request.kind.ends_here:
            return
        spot = Destination(CandidateKind.REPLICA, replica)
        for policy in self._local_policies:
            if isinstance(policy, PairPricing):
                policy.prefilled(request, spot, held, served, now)

    def never_prefilled(self, replica: ReplicaId, blocks: Sequence[int], at: float) -> None:
        """These blocks, sent there at that time, were not computed after all."""
        for index in self.replica_indexes:
            index.retract(replica, blocks, at)

    def began(self, request: Request, spot: Destination, now: float) -> None:
        for policy in self._of_layer(spot):
            policy.began(request, spot, now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        for policy in self._of_layer(spot):
            policy.served(request, spot, served, now)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        for policy in self._of_layer(spot):
            policy.left(request, spot, now)

    def forget_replica(self, replica: ReplicaId) -> None:
        """It is gone, or came back with an empty cache."""
        spot = Destination(CandidateKind.REPLICA, replica)
        for policy in self._local_policies:
            policy.forget(spot)

    def expire(self, now: float) -> None:
        """A tick: policies drop what is too old."""
        for policy in self._expiring:
            policy.expire(now)

    def _of_layer(self, spot: Destination) -> list[Policy]:
        is_local = spot.kind is CandidateKind.REPLICA
        return self._local_policies if is_local else self._remote_policies

    def _local_layer(
        self,
        pair: PolicyPair,
        request: Request,
        avoid: Collection[str],
        now: float,
        ahead: int,
        kept_from: frozenset[str] = NONE,
    ) -> CandidateLayer:
        judges_load = pair.local.judges_load
        layer = self._candidates.of_replicas(
            request,
            avoid,
            now,
            ahead,
            sampling=pair.sampling,
            busy_too=judges_load,
            kept_from=kept_from,
        )
        if not request.kind.loads_adapters and request.model in self._replicas.unloaded:
            layer = of_loaded(layer, request.model)
        if request.model not in self._replicas.decoded:
            return layer
        return self._pairings.joined(
            request,
            layer,
            avoid,
            now,
            kept_from=kept_from,
            judges_load=judges_load,
            prices_pairs=pair.prices_pairs,
        )

    def _choose(
        self,
        pair: PolicyPair,
        policy: Policy,
        request: Request,
        free: Sequence[Target],
        now: float,
        *layers: CandidateLayer,
    ) -> PlacementResult:
        choice = policy.choose(request, free, now)
        target = choice.target
        if target is None:
            return self._held(request, pair, choice.reason, *layers, choice=choice)
        # Listing candidates costs as much as pricing them.
        listed = receipt(layers, choice, request.prompt) if request.wants_receipt else NO_RECEIPT
        candidates, considered = listed
        prefill = None if target.prefill is None else choice_of(target, request, now)
        return PlacementResult(
            Placement.LOCAL if target.kind is CandidateKind.REPLICA else Placement.PEER,
            target.name,
            choice.reason,
            pair.name,
            prefill_tokens=_prefill_tokens(request, choice),
            first_token=choice.first_token if target.peer or request.slo_ttft_s else None,
            may_queue=policy.judges_load or self._pushes_past_pending,
            candidates=candidates,
            considered=considered,
            unlisted=None if considered else unlisted(layers, choice, request.prompt),
            prefill=prefill,
        )

    def _held(
        self,
        request: Request,
        pair: PolicyPair,
        reason: str,
        *layers: CandidateLayer,
        choice: Choice | None = None,
    ) -> PlacementResult:
        listed, kept = NO_RECEIPT, None
        of = choice or Choice(None, reason)
        if request.wants_receipt:
            listed = receipt(layers, of, request.prompt)
        elif layers:
            kept = unlisted(layers, of, request.prompt)
        candidates, considered = listed
        return PlacementResult(
            Placement.HOLD,
            None,
            reason,
            pair.name,
            by_choice=choice is not None,
            first_token=choice.first_token if choice is not None else None,
            candidates=candidates,
            considered=considered,
            unlisted=kept,
        )


def _lacks(*layers: CandidateLayer) -> str:
    """What none of these places is: ready, or else free."""
    down = all(why in NOT_READY for layer in layers for _, why in layer.busy)
    return READY if down else "free"


def _prefill_tokens(request: Request, choice: Choice) -> int:
    if choice.held_tokens is None:
        return request.prompt.uncached_tokens(choice.matched_blocks)
    return max(1, request.prompt.tokens - choice.held_tokens)
