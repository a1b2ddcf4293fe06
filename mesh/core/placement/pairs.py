"""Pairs of a prefill and a decode replica among the candidates.

A request for a model with prefill replicas may be answered by two replicas of this region: one
computes the prompt, another gets its KV cache and generates. The price of a pair is the sum of what
the two cost, and the way between them costs the same whichever two it connects; so the cheapest
prefill replica is the same for all decode replicas of its transfer kind, and each decode replica is
a candidate once, with the prefill replicas of its kind (`Target.prefill`), of which the policy
takes the cheapest. Where the decode replica also takes whole requests and the policy prices pairs,
it is a candidate a second time, alone: a prompt that is short or mostly cached there may begin
sooner without a transfer. Policies that don't price pairs get each replica once, and the prefill
replica with the shortest queue.
"""

from collections.abc import Collection
from random import Random
from typing import NamedTuple

from mesh.core.model.effects import KvPair
from mesh.core.model.request import Request
from mesh.core.model.served_names import prefill_name
from mesh.core.placement.candidates import CandidateLayer, targets_of
from mesh.core.placement.residency import Residency
from mesh.core.policies.base import Prefill, Target, speed_of
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, ReplicaId
from schemas.kv_transfer import KvRole, TransferKind

NO_PREFILL = "no prefill replica is free"
PREFILLS_MAX = 64  # of one kind that are all examined for a request; of more, a sample


class PrefillChoice(NamedTuple):
    """The prefill replica of a placement on a pair."""

    replica: ReplicaId
    pair: KvPair


class Pairs:
    """Adds pairs to the layer of local replicas. Reads the tables; changes nothing."""

    def __init__(self, replicas: ReplicaTable, residency: Residency, dice: Random) -> None:
        self._replicas = replicas
        self._residency = residency
        self._dice = dice

    def joined(
        self,
        request: Request,
        layer: CandidateLayer,
        avoid: Collection[str],
        now: float,
        *,
        judges_load: bool,
        prices_pairs: bool,
        kept_from: Collection[str] = (),
    ) -> CandidateLayer:
        """The layer with pairs in place of their decode replicas, or beside them, and first; with
        none of the prefill replicas in `kept_from`."""
        by_kind: dict[str, Prefill | None] = {}
        pairs: list[Target] = []
        free: list[Target] = []
        busy = layer.busy.copy()
        for target in layer.free:
            kind = _decode_kind(target.replica, request.model)
            if kind is None:
                free.append(target)
                continue
            if kind not in by_kind:
                by_kind[kind] = self._prefill(
                    request, kind, avoid, now, judges_load=judges_load, kept_from=kept_from
                )
            prefill, is_whole = by_kind[kind], _takes_whole(target.replica)
            may_pair = prefill is not None and request.kind.may_pair
            if may_pair:
                pairs.append(target._replace(prefill=prefill))
            if is_whole and (prices_pairs or not may_pair):
                free.append(target)
            elif not may_pair:
                busy.append((target, NO_PREFILL))
        return CandidateLayer(layer.kind, pairs + free, busy)

    def are_all_for(self, request: Request) -> bool:
        """Whether the model's replicas answer in pairs alone, and the request never may."""
        if request.is_whole_here and request.kind.may_pair:
            return False
        wanted, serving = self._residency.wanted(request), self._replicas.serving(request.model)
        replicas = [one for one in serving if self._residency.takes_replica(wanted, one)]
        in_pairs = (_decode_kind(one, request.model) and not _takes_whole(one) for one in replicas)
        return bool(replicas) and all(in_pairs)

    def _prefill(
        self,
        request: Request,
        kind: str,
        avoid: Collection[str],
        now: float,
        *,
        judges_load: bool,
        kept_from: Collection[str],
    ) -> Prefill | None:
        """The prefill replicas of that kind that may get the request now; None if none may."""
        name = prefill_name(request.model, kind)
        among = self._replicas.serving(name)
        if len(among) > PREFILLS_MAX:
            among = self._replicas.sample_serving(name, (), self._dice)
        free, _ = self._replicas.partition_available(name, now, busy_too=judges_load, among=among)
        wanted = self._residency.wanted(request)
        found = [
            one
            for one in free
            if one.heartbeat.replica not in avoid
            and one.heartbeat.replica not in kept_from
            and self._residency.takes_replica(wanted, one)
        ]
        if not found or not request.is_whole_here:
            return None
        failing = self._replicas.failing
        if failing.places:
            good = [
                one
                for one in found
                if failing.bars(one.heartbeat.replica, request.model, now, has_failed=bool(avoid))
                is None
            ]
            found = good or found
        return Prefill(tuple(targets_of(found)))


def choice_of(target: Target, request: Request, now: float) -> PrefillChoice | None:
    """Of a candidate that is a pair, what its attempt needs of the prefill replica."""
    prefill, decode = target.prefill, target.replica
    if prefill is None or decode is None or decode.heartbeat.kv is None:
        return None
    first = min(prefill.among, key=lambda one: _queue_s(one, now))
    kv, there = decode.heartbeat.kv, None if first.replica is None else first.replica.heartbeat.kv
    assert there is not None, "prefill replicas report their part"
    pair = KvPair(TransferKind(kv.kind), there.address, kv.address)
    return PrefillChoice(ReplicaId(first.name), pair)


def _queue_s(target: Target, now: float) -> float:
    """Until the prompts are computed that the replica has, or is about to have."""
    assert target.replica is not None, "prefill replicas are local"
    s_per_token = speed_of(target).prefill_s_per_token
    queued = target.replica.prefill_queue_tokens(now, s_per_token)
    return target.load if queued is None else queued * s_per_token


def _decode_kind(replica: Replica | None, model: ModelId) -> str | None:
    """The transfer kind of a decode replica for that model; None of any other."""
    kv = None if replica is None else replica.heartbeat.kv
    if kv is None or kv.role != KvRole.DECODE or not kv.is_usable or model not in kv.models:
        return None
    return kv.kind


def _takes_whole(replica: Replica | None) -> bool:
    return replica is not None and replica.heartbeat.kv is not None and replica.heartbeat.kv.whole
