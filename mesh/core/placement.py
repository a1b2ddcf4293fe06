"""Where a request goes: a local replica, a peer region, or nowhere yet (SkyWalker Algorithm 1).

HANDLEREQUEST of the paper: the available local replicas if there are any, else the available
peers, else hold. The policy picks inside the chosen layer; a receipt of those considered comes
with every answer. It lists the first few and counts all: listing a thousand replicas for every
request would cost more than placing it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from mesh.core.peers import PeerTable
from mesh.core.policies import make_policy
from mesh.core.policies.base import Target
from mesh.core.prompt import BLOCK_BYTES, BYTES_PER_TOKEN_START
from mesh.core.replicas import ReplicaTable
from mesh.core.request import Request
from mesh.core.settings import RouterSettings
from schemas.decision import Candidate, CandidateKind, Placement
from schemas.ids import RegionId, ReplicaId

BLOCK_TOKENS = round(BLOCK_BYTES / BYTES_PER_TOKEN_START)  # for receipts, not for arithmetic
CANDIDATES_MAX = 16  # listed in a receipt


@dataclass(frozen=True, slots=True)
class Place:
    """The outcome: `target` is a replica's or a peer's name, None when held."""

    placement: Placement
    target: str | None
    reason: str
    candidates: tuple[Candidate, ...] = ()  # the best first, at most CANDIDATES_MAX
    considered: int = 0  # all of them


@dataclass(slots=True)
class Layer:
    """Those of one layer who serve the model."""

    kind: CandidateKind
    free: list[Target] = field(default_factory=list)
    busy: list[tuple[str, str]] = field(default_factory=list)  # name, why it may not be chosen

    def __len__(self) -> int:
        return len(self.free) + len(self.busy)


class Placer:
    """Asks the policy of each layer, over those available, and writes the receipt."""

    def __init__(
        self, settings: RouterSettings, replicas: ReplicaTable, peers: PeerTable, dice: Random
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._peers = peers
        self._local = make_policy(settings, dice)
        self._remote = make_policy(settings, dice)

    def place(self, request: Request, avoid: Collection[str], now: float) -> Place:
        """Choose, without doing anything yet. Places in `avoid` failed this request before."""
        local = self._local_layer(request, avoid, now)
        if local.free:
            return self._chosen(Placement.LOCAL, request, local)
        if request.hops >= self._settings.hops_max:
            return self._held("no local replica is free", local)
        remote = self._peer_layer(request, avoid, now)
        if remote.free:
            return self._chosen(Placement.PEER, request, remote, local)
        return self._held("no replica and no peer is free", local, remote)

    def placed_on_replica(self, request: Request, replica: ReplicaId) -> None:
        """The request goes to this replica."""
        self._local.placed(request.model, request.prompt, replica)

    def placed_on_peer(self, request: Request, peer: RegionId) -> None:
        """The request goes to this region."""
        self._remote.placed(request.model, request.prompt, peer)

    def forget_replica(self, replica: ReplicaId) -> None:
        """It is gone, or came back with an empty cache."""
        self._local.forget(replica)

    def _local_layer(self, request: Request, avoid: Collection[str], now: float) -> Layer:
        layer = Layer(CandidateKind.REPLICA)
        for replica in self._replicas:
            name = replica.heartbeat.replica
            why = self._replicas.unavailable_because(replica, request.model, now)
            if why is None and name not in avoid:
                layer.free.append(Target(name, replica.load))
            elif why != "other model":
                layer.busy.append((name, why or "failed before"))
        return layer

    def _peer_layer(self, request: Request, avoid: Collection[str], now: float) -> Layer:
        layer = Layer(CandidateKind.PEER)
        for region, peer in self._peers:
            why = self._peers.unavailable_because(peer, request.model, now)
            if why is None and region not in avoid:
                layer.free.append(Target(region, peer.queue + len(peer.forwarded_at)))
            else:
                layer.busy.append((region, why or "failed before"))
        return layer

    def _chosen(
        self, placement: Placement, request: Request, layer: Layer, *others: Layer
    ) -> Place:
        policy = self._local if placement is Placement.LOCAL else self._remote
        choice = policy.choose(request.model, request.prompt, layer.free)
        matched_tokens = choice.matched_blocks * BLOCK_TOKENS
        first = self._candidate(layer.kind, choice.name, None, matched_tokens)
        candidates, considered = self._receipt(layer, *others, first=first)
        return Place(placement, choice.name, choice.reason, candidates, considered)

    def _held(self, reason: str, *layers: Layer) -> Place:
        return Place(Placement.HOLD, None, reason, *self._receipt(*layers))

    def _receipt(
        self, *layers: Layer, first: Candidate | None = None
    ) -> tuple[tuple[Candidate, ...], int]:
        """Those to list, the chosen one first and the available next; and how many there are."""
        listed = [] if first is None else [first]
        for layer in layers:
            for name, why in chain(((target.name, None) for target in layer.free), layer.busy):
                if len(listed) >= CANDIDATES_MAX:
                    break
                if first is None or name != first.name:
                    listed.append(self._candidate(layer.kind, name, why))
        return tuple(listed), sum(map(len, layers))

    def _candidate(
        self, kind: CandidateKind, name: str, why: str | None, matched_tokens: int = 0
    ) -> Candidate:
        pending, rtt_s = None, None
        if kind is CandidateKind.REPLICA:
            replica = self._replicas.get(ReplicaId(name))
            pending = None if replica is None else replica.pending
        elif (peer := self._peers.get(RegionId(name))) is not None:
            pending, rtt_s = peer.queue, peer.rtt_s
        return Candidate(
            name=name,
            kind=kind,
            available=why is None,
            why=why,
            terms={} if rtt_s is None else {"rtt_s": rtt_s},
            matched_tokens=matched_tokens,
            pending=pending,
        )
