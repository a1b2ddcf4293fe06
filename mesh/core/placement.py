"""Where a request goes: a local replica, a peer region, or nowhere yet (SkyWalker Algorithm 1).

HANDLEREQUEST of the paper: the available local replicas if there are any, else the available
peers, else hold. The policy picks inside the chosen layer; a receipt of everyone considered
comes with every answer.
"""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from mesh.core.peers import PeerTable
from mesh.core.policies import make_policy
from mesh.core.policies.base import Choice, Target
from mesh.core.prompt import BLOCK_BYTES, BYTES_PER_TOKEN_START
from mesh.core.replicas import Replica, ReplicaTable
from mesh.core.request import Request
from mesh.core.settings import RouterSettings
from schemas.decision import Candidate, CandidateKind, Placement
from schemas.ids import RegionId, ReplicaId

BLOCK_TOKENS = round(BLOCK_BYTES / BYTES_PER_TOKEN_START)  # for receipts, not for arithmetic


@dataclass(frozen=True, slots=True)
class Place:
    """The outcome: `target` is a replica's or a peer's name, None when held."""

    placement: Placement
    target: str | None
    reason: str
    candidates: tuple[Candidate, ...]


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
        local = self._local_candidates(request, avoid, now)
        if any(candidate.available for candidate in local):
            return self._chosen(Placement.LOCAL, request, local)
        if request.hops >= self._settings.hops_max:
            return Place(Placement.HOLD, None, "no local replica is free", local)
        remote = self._peer_candidates(request, avoid, now)
        if any(candidate.available for candidate in remote):
            return self._chosen(Placement.PEER, request, remote, local)
        return Place(Placement.HOLD, None, "no replica and no peer is free", local + remote)

    def placed_on_replica(self, request: Request, replica: ReplicaId) -> None:
        """The request goes to this replica."""
        self._local.placed(request.model, request.prompt, replica)

    def placed_on_peer(self, request: Request, peer: RegionId) -> None:
        """The request goes to this region."""
        self._remote.placed(request.model, request.prompt, peer)

    def forget_replica(self, replica: ReplicaId) -> None:
        """It is gone, or came back with an empty cache."""
        self._local.forget(replica)

    def _chosen(
        self,
        placement: Placement,
        request: Request,
        candidates: tuple[Candidate, ...],
        others: tuple[Candidate, ...] = (),
    ) -> Place:
        policy = self._local if placement is Placement.LOCAL else self._remote
        targets = [
            Target(candidate.name, self._load(candidate))
            for candidate in candidates
            if candidate.available
        ]
        choice = policy.choose(request.model, request.prompt, targets)
        ordered = _best_first(choice, candidates) + others
        return Place(placement, choice.name, choice.reason, ordered)

    def _load(self, candidate: Candidate) -> int:
        if candidate.kind is CandidateKind.REPLICA:
            replica = self._replicas.get(ReplicaId(candidate.name))
            return 0 if replica is None else replica.load
        peer = self._peers.get(RegionId(candidate.name))
        return 0 if peer is None else peer.queue + len(peer.forwarded_at)

    def _local_candidates(
        self, request: Request, avoid: Collection[str], now: float
    ) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(
                name=replica.heartbeat.replica,
                kind=CandidateKind.REPLICA,
                available=why is None,
                why=why,
                pending=replica.pending,
            )
            for replica in self._replicas
            if (why := self._replica_why(replica, request, avoid, now)) != "other model"
        )

    def _replica_why(
        self, replica: Replica, request: Request, avoid: Collection[str], now: float
    ) -> str | None:
        why = self._replicas.unavailable_because(replica, request.model, now)
        failed = why is None and replica.heartbeat.replica in avoid
        return "failed before" if failed else why

    def _peer_candidates(
        self, request: Request, avoid: Collection[str], now: float
    ) -> tuple[Candidate, ...]:
        candidates = []
        for region, peer in self._peers:
            why = self._peers.unavailable_because(peer, request.model, now)
            if why is None and region in avoid:
                why = "failed before"
            candidates.append(
                Candidate(
                    name=region,
                    kind=CandidateKind.PEER,
                    available=why is None,
                    why=why,
                    terms={} if peer.rtt_s is None else {"rtt_s": peer.rtt_s},
                    pending=peer.queue,
                )
            )
        return tuple(candidates)


def _best_first(choice: Choice, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The chosen one first, with what it holds, then the available, then the rest."""
    chosen = next(candidate for candidate in candidates if candidate.name == choice.name)
    marked = Candidate(
        name=chosen.name,
        kind=chosen.kind,
        available=True,
        terms=chosen.terms,
        matched_tokens=choice.matched_blocks * BLOCK_TOKENS,
        pending=chosen.pending,
    )
    rest = [candidate for candidate in candidates if candidate.name != choice.name]
    return (marked, *sorted(rest, key=lambda candidate: not candidate.available))
