"""Idle replicas, and how much of their time may be spent on warming.

A replica is idle without requests in it or on their way, if it takes work and its engine reports
spare memory; what is not reported counts as none. Its prefill is priced at the speed that its agent
has learned or, without one, at the median of the others.

The budget is a share of the prefill seconds that replicas are idle. Seconds are saved while
replicas are idle and taken out before they are spent, so over any time no more is spent than the
share of the idle time in it and what was saved before, SAVED_S_MAX at most. Seconds of a warm-up
that failed are not put back: part of it may have been computed.
"""

from collections.abc import Sequence
from statistics import median

from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.replica import Replica, is_adopted
from mesh.core.view.replica_table import REPLICAS_MAX, ReplicaTable
from schemas.decision import Placement
from schemas.ids import ReplicaId

SAVED_S_MAX = 30.0  # the longest documents take about so long on small GPUs
STEP_S_MAX = 1.0  # between two looks: a suspended process did not see which replicas were idle


class IdleBudget:
    """One router's part, in seconds of one replica's prefill."""

    def __init__(self, share: float) -> None:
        """`share`: of idle time, 0 to 1."""
        self.share = share
        self._looked_at: float | None = None
        self.idle_s = 0.0  # since the start, this router's part of it
        self.spent_s = 0.0
        self.saved_s = 0.0

    def look(self, idle: int, routers: int, now: float) -> None:
        """So many replicas are idle, and so many routers share their time."""
        if self._looked_at is not None:
            idle_s = idle * min(STEP_S_MAX, now - self._looked_at) / routers
            self.idle_s += idle_s
            self.saved_s = min(SAVED_S_MAX, self.saved_s + self.share * idle_s)
        self._looked_at = now

    def spend(self, seconds: float) -> bool:
        """Take so much out; False if there is less."""
        if seconds > self.saved_s:
            return False
        self.saved_s -= seconds
        self.spent_s += seconds
        return True


POLICY = "warm"  # in receipts
NO_INDEX: PrefixIndex[str] = PrefixIndex(1)  # while the policy has none, nothing is warmed


class IdleReplicas:
    """Of one region, without adopted replicas, which their own region warms."""

    def __init__(self, settings: RouterSettings, replicas: ReplicaTable, placer: Placer) -> None:
        """Raises ValueError if there is a budget and the policy has no prefix index."""
        if settings.warm_idle_share and placer.index is None:
            raise ValueError(
                f"warm_idle_share: policy {settings.policy!r} doesn't know what replicas hold; "
                "leave it 0, or take a policy that follows prefixes"
            )
        self.budget = IdleBudget(settings.warm_idle_share)
        self.tokens = 0  # of the prompts placed, estimated to be missing
        self._kv_used_max = settings.warm_kv_used_max
        self._replicas = replicas
        self._residency = placer.residency
        self._placer = placer
        self._last_warmed: dict[ReplicaId, float] = {}

    def follow(self, settings: RouterSettings) -> None:
        """Take replicas for idle by these from now on; what was saved stays."""
        self.budget.share = settings.warm_idle_share
        self._kv_used_max = settings.warm_kv_used_max

    @property
    def _index(self) -> PrefixIndex[str]:
        index = self._placer.index
        return NO_INDEX if index is None else index

    def look(self, routers: int, now: float) -> int:
        """A tick: how many there are; this router's part of their time is saved."""
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
        """The warm-up begun there at that time was not computed."""
        self._index.retract(name, hashes, at)

    def serving(self, request: Request) -> list[Replica]:
        """Replicas of this region that have its model, loaded, and a label that it requires."""
        wanted = self._residency.wanted(request)
        serving = self._replicas.serving(request.model)
        own = [one for one in serving if not is_adopted(one.heartbeat.replica)]
        loaded = [one for one in own if not one.load_s(request.model)]
        return [replica for replica in loaded if self._residency.takes_replica(wanted, replica)]

    def place(
        self, request: Request, among: Sequence[Replica], now: float
    ) -> PlacementResult | None:
        """Choose an idle one of them, at the expense of the budget."""
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
        return PlacementResult(Placement.LOCAL, name, why, POLICY, prefill_tokens=tokens)

    def holds(self, replica: Replica, block: int) -> bool:
        """Whether it is estimated to hold the path up to that block."""
        return self._index.has(replica.heartbeat.replica, block)

    def _warmed_at(self, replica: Replica) -> float:
        return self._last_warmed.get(replica.heartbeat.replica, float("-inf"))

    def _is_idle(self, replica: Replica, now: float) -> bool:
        """Without requests, with spare memory, and taking work."""
        beat = replica.heartbeat
        return (
            not replica.load
            and bool(beat.models)
            and beat.kv is None  # pairs' replicas compute for each other
            and not is_adopted(beat.replica)
            and beat.kv_used_ratio is not None
            and beat.kv_used_ratio <= self._kv_used_max
            and self._replicas.unavailable_because(replica, beat.models[0], now) is None
        )

    def _s_per_token(self, replica: Replica | None) -> float | None:
        """Its own, or without one the median of the others."""
        if replica is not None and replica.heartbeat.prefill_s_per_token is not None:
            return replica.heartbeat.prefill_s_per_token
        beats = [one.heartbeat for one in self._replicas]
        known = [beat.prefill_s_per_token for beat in beats if beat.prefill_s_per_token]
        return median(known) if known else None
