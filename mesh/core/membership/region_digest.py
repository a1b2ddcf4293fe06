"""This region's own digest: what its router tells the peers, and when."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median
from types import MappingProxyType

from mesh.core.lifecycle.hold_queue import HoldQueue
from mesh.core.model.rates import EventRate
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.residency import Residency
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, RouterId
from schemas.state import CARDS_MAX, Digest, ModelCapacity, ModelCard, ReplicaState

CHANGE_S_MIN = 0.01  # counting a thousand replicas for each one that turns full costs a core
# Round trips are measured once a second and differ little from one to the next; in every digest,
# what regions say to each other would grow with the square of their number.
ROUND_TRIPS_S = 1.0
RATE_S = 5.0  # time constant of the request rate's running average


class RegionalDigest:
    """Builds digests every `digest_s`, and at once when what matters to peers has changed."""

    def __init__(
        self, region: RegionId, router: RouterId, epoch: int, settings: RouterSettings
    ) -> None:
        self._region, self._router, self._epoch = region, router, epoch
        self._settings = settings
        self._seq = 0
        self._published_at = self._made_at = self._round_trips_at = float("-inf")
        self._cards_at = float("-inf")
        self._latest: Digest | None = None
        self._accepted = True
        self._last: tuple[object, ...] = ()
        self.arrivals = EventRate(RATE_S)  # of clients' requests
        self.warm_tokens: Callable[[float], int | None] = lambda now: None
        self._residency = Residency(region, settings.ground)
        self._labels = tuple(sorted(settings.ground.carried_by(region)))

    def due(
        self,
        replicas: ReplicaTable,
        held: HoldQueue,
        accepting: bool,
        now: float,
        *,
        adopted: Mapping[RegionId, int] = MappingProxyType({}),
        rtt_s: Callable[[], dict[RegionId, float]] = dict,
    ) -> Digest | None:
        """The digest to publish now, if one is due. A change too soon is told at the next tick.

        `adopted`: regions with the term of each. `rtt_s`: to the peers, told once a second.
        """
        since_s = now - self._published_at
        if since_s < CHANGE_S_MIN and accepting == self._accepted:
            return None
        models = _counts(replicas, now)
        crossed = len(held) > self._settings.peer_queue_max
        telling = (models, crossed, accepting, adopted)
        if telling == self._last and since_s < self._settings.digest_s:
            return None
        self._last, self._published_at, self._accepted = telling, now, accepting
        told_s = self._round_trips(rtt_s, now)
        cards = self._cards(replicas, models, now)
        return self._digest(models, replicas, held, accepting, now, adopted, told_s, cards)

    def fresh(
        self,
        replicas: ReplicaTable,
        held: HoldQueue,
        accepting: bool,
        now: float,
        *,
        adopted: Mapping[RegionId, int] = MappingProxyType({}),
    ) -> Digest:
        """How the region is at this moment, for one who asks; the news for all is not changed."""
        if self._latest is not None and now - self._made_at < CHANGE_S_MIN:
            return self._latest
        counts = _counts(replicas, now)
        return self._digest(counts, replicas, held, accepting, now, adopted, {}, {})

    def _round_trips(
        self, rtt_s: Callable[[], dict[RegionId, float]], now: float
    ) -> dict[RegionId, float]:
        """To be told to everyone now; empty where they were told lately."""
        if now - self._round_trips_at < ROUND_TRIPS_S:
            return {}
        if told := rtt_s():
            self._round_trips_at = now
        return told

    def _cards(
        self, replicas: ReplicaTable, models: Iterable[ModelId], now: float
    ) -> dict[ModelId, ModelCard]:
        """What engines say of the first models, as often as round trips are told."""
        if now - self._cards_at < ROUND_TRIPS_S:
            return {}
        self._cards_at = now
        known = ((model, replicas.card(model)) for model in models)
        found = ((model, card) for model, card in known if card is not None)
        return dict(itertools.islice(found, CARDS_MAX))

    def _digest(
        self,
        counts: dict[ModelId, tuple[int, int]],
        replicas: ReplicaTable,
        held: HoldQueue,
        accepting: bool,
        now: float,
        adopted: Mapping[RegionId, int],
        rtt_s: dict[RegionId, float],
        cards: dict[ModelId, ModelCard],
    ) -> Digest:
        speakers = ((replica, replica.heartbeat) for replica in replicas)
        ready = [one for one, beat in speakers if beat.state is ReplicaState.READY and beat.models]
        self._seq += 1
        self._made_at = now
        self._latest = Digest(
            region=self._region,
            router=self._router,
            epoch=self._epoch,
            seq=self._seq,
            accepting=accepting,
            replicas_ready=len(ready),
            replicas_free=_free(replicas, ready, now),
            queue=len(held),
            models=_capacities(replicas, counts, now),
            requests_per_s=self.arrivals.per_s(now),
            prefill_s_per_token=_known(
                median, [replica.heartbeat.prefill_s_per_token for replica in ready]
            ),
            prefill_base_s=_known(median, [replica.heartbeat.prefill_base_s for replica in ready]),
            kv_used_ratio=_known(_mean, [replica.heartbeat.kv_used_ratio for replica in ready]),
            residency=self._labels,
            models_by_label=self._by_label(replicas, now),
            adopted=dict(adopted),
            rtt_s=rtt_s,
            warm_tokens=self.warm_tokens(now),
            cards=cards,
        )
        return self._latest

    def _by_label(
        self, replicas: ReplicaTable, now: float
    ) -> dict[str, dict[ModelId, ModelCapacity]]:
        """Of each label that some replica carries and some does not."""
        found: dict[str, dict[ModelId, ModelCapacity]] = {}
        if not any(self._may_lack_labels(replica) for replica in replicas):
            return found
        carried = [(replica, self._residency.of_replica(replica)) for replica in replicas]
        for label in self._labels:
            if any(label not in labels for _, labels in carried):
                within = [replica for replica, labels in carried if label in labels]
                counts = _counts(replicas, now, within)
                found[label] = _capacities(replicas, counts, now, within)
        return found

    def _may_lack_labels(self, replica: Replica) -> bool:
        """Whether it says so itself, or was adopted: it stands on its own region's ground."""
        return replica.heartbeat.residency is not None or replica.heartbeat.region != self._region


def _counts(
    replicas: ReplicaTable, now: float, within: Collection[Replica] | None = None
) -> dict[ModelId, tuple[int, int]]:
    """Ready and free replicas of each model: what peers must hear of at once.

    `within`: those that count, if not all.
    """
    counts = {}
    for model in sorted(replicas.models()):
        among = _serving(replicas, model, within)
        free, others = replicas.partition_available(model, now, among=among)
        ready = len(free) + sum(replicas.serves(replica, model) for replica, _ in others)
        if ready:
            counts[model] = ready, len(free)
    return counts


def _serving(
    replicas: ReplicaTable, model: ModelId, within: Collection[Replica] | None
) -> Collection[Replica]:
    serving = replicas.serving(model)
    if within is None:
        return serving
    names = {replica.heartbeat.replica for replica in within}
    return [replica for replica in serving if replica.heartbeat.replica in names]


def _capacities(
    replicas: ReplicaTable,
    counts: dict[ModelId, tuple[int, int]],
    now: float,
    within: Collection[Replica] | None = None,
) -> dict[ModelId, ModelCapacity]:
    capacities = {}
    for model, (ready, free) in counts.items():
        among = _serving(replicas, model, within)
        serving = [replica for replica in among if replicas.serves(replica, model)]
        capacities[model] = ModelCapacity(
            ready=ready,
            free=free,
            wait_s=_known(min, [_wait_s(replica, now) for replica in serving]),
            kv_free_tokens=_most([_kv_free_tokens(replica) for replica in serving]),
            running=_mean([_running(replica) for replica in serving]),
        )
    return capacities


def _wait_s(replica: Replica, now: float) -> float | None:
    """Until it has computed what it was given; None where its speed or its queue is unknown."""
    s_per_token = replica.heartbeat.prefill_s_per_token
    if s_per_token is None:
        return None
    queued = replica.prefill_queue_tokens(now, s_per_token)
    return None if queued is None else queued * s_per_token


def _running(replica: Replica) -> float:
    """As its engine counts; where it doesn't say, all that the replica has."""
    running = replica.heartbeat.running
    return float(replica.load if running is None else running)


def _kv_free_tokens(replica: Replica) -> int | None:
    free = replica.kv_free_tokens
    return None if free is None else max(0, int(free))


def _most(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _free(replicas: ReplicaTable, ready: list[Replica], now: float) -> int:
    """How many of them would take a request for their first model."""
    among: dict[ModelId, list[Replica]] = {}
    for replica in ready:
        among.setdefault(replica.heartbeat.models[0], []).append(replica)
    return sum(
        len(replicas.partition_available(model, now, among=of)[0]) for model, of in among.items()
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _known(summary: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    """The summary of the values that are there; None, not 0, when none is."""
    there = [value for value in values if value is not None]
    return summary(there) if there else None
