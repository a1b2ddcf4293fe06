"""Replicas that have nothing to do, and what may be spent on them.

Idle is a replica without requests, in it or on their way, that takes work, and whose engine says
that memory is to spare; what it does not say is no yes. Its prefill is priced at the speed that
its agent has learned, or while it has learned none at the median of the others.
"""

from collections.abc import Sequence
from statistics import median

from mesh.core.placing.placement import Place, Placer
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.region.names import is_adopted
from mesh.core.region.replica import Replica
from mesh.core.region.replicas import REPLICAS_MAX, ReplicaTable
from mesh.core.requests.request import Request
from mesh.core.settings import RouterSettings
from mesh.core.warming.idle_budget import IdleBudget
from schemas.decision import Placement
from schemas.ids import ReplicaId

POLICY = "warm"  # in receipts


class IdleReplicas:
    """Of one region, to one router. Those it has adopted are their region's to warm."""

    def __init__(self, settings: RouterSettings, replicas: ReplicaTable, placer: Placer) -> None:
        """Raises ValueError if there is a budget and the policy knows of no prefixes."""
        index = placer.index
        if settings.warm_idle_share and index is None:
            raise ValueError(
                f"warm_idle_share: policy {settings.policy!r} doesn't know what replicas hold; "
                "leave it 0, or take a policy that follows prefixes"
            )
        self.budget = IdleBudget(settings.warm_idle_share)
        self.tokens = 0  # paid for: of the prompts placed, what was believed to be missing
        self._kv_used_max = settings.warm_kv_used_max
        self._replicas = replicas
        self._residency = placer.residency
        self._index: PrefixIndex[str] = PrefixIndex(1) if index is None else index
        self._last_warmed: dict[ReplicaId, float] = {}

    def look(self, routers: int, now: float) -> int:
        """How many there are, at a tick; this router's part of their time is put by."""
        idle = sum(self._is_idle(replica, now) for replica in self._replicas)
        self.budget.look(idle, routers, now)
        return idle

    def affordable_tokens(self, now: float) -> int | None:
        """Prompt tokens that some idle replica could compute now; None for none."""
        s_per_token = self._s_per_token(None)
        if s_per_token is None or not any(self._is_idle(one, now) for one in self._replicas):
            return None
        return int(self.budget.saved_s / s_per_token) or None

    def forget(self, name: ReplicaId, hashes: Sequence[int], at: float) -> None:
        """What was begun there at that time was not computed."""
        self._index.retract(name, hashes, at)

    def serving(self, request: Request) -> list[Replica]:
        """Replicas of this region that have its model and carry a label that it wants."""
        wanted = self._residency.wanted(request)
        serving = self._replicas.serving(request.model)
        own = [one for one in serving if not is_adopted(one.heartbeat.replica)]
        return [replica for replica in own if self._residency.takes_replica(wanted, replica)]

    def place(self, request: Request, among: Sequence[Replica], now: float) -> Place | None:
        """An idle one of them, paid for out of the budget."""
        idle = [replica for replica in among if self._is_idle(replica, now)]
        if not idle:
            return None
        replica = min(idle, key=lambda one: (self._warmed_at(one), one.heartbeat.replica))
        name = replica.heartbeat.replica
        held, _ = self._index.depth(name, request.prompt.hashes)
        tokens = request.prompt.uncached_tokens(held)
        s_per_token = self._s_per_token(replica)
        if s_per_token is None:
            return None
        cost_s = tokens * s_per_token + (replica.heartbeat.prefill_base_s or 0.0)
        if not self.budget.spend(cost_s):
            return None
        self.tokens += tokens
        self._last_warmed.pop(name, None)
        self._last_warmed[name] = now
        if len(self._last_warmed) > REPLICAS_MAX:
            del self._last_warmed[next(iter(self._last_warmed))]
        why = f"warm: {cost_s:.3f} s of idle prefill"
        return Place(Placement.LOCAL, name, why, POLICY, prefill_tokens=tokens)

    def holds(self, replica: Replica, block: int) -> bool:
        """Whether it is believed to, with the path up to there: paths lose their ends first."""
        return self._index.has(replica.heartbeat.replica, block)

    def _warmed_at(self, replica: Replica) -> float:
        return self._last_warmed.get(replica.heartbeat.replica, float("-inf"))

    def _is_idle(self, replica: Replica, now: float) -> bool:
        """Nothing to do, nothing coming, and memory to spare; what it doesn't say is no yes."""
        beat = replica.heartbeat
        return (
            not replica.load
            and bool(beat.models)
            and not is_adopted(beat.replica)
            and beat.kv_used_ratio is not None
            and beat.kv_used_ratio <= self._kv_used_max
            and self._replicas.unavailable_because(replica, beat.models[0], now) is None
        )

    def _s_per_token(self, replica: Replica | None) -> float | None:
        """Its own, or while it has none the median of the others."""
        if replica is not None and replica.heartbeat.prefill_s_per_token is not None:
            return replica.heartbeat.prefill_s_per_token
        told = [one.heartbeat.prefill_s_per_token for one in self._replicas]
        known = [s_per_token for s_per_token in told if s_per_token]
        return median(known) if known else None
