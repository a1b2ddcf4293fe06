"""This region's digest: what its router publishes to peers, and when."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import chain, islice, zip_longest
from statistics import median
from typing import TypeVar

from mesh.core.model.rates import EventRate
from mesh.core.model.reported_speed import BASE_S_MAX, believed_slope
from mesh.core.model.served_names import (
    is_for_others,
    is_model,
    is_prefill_name,
    model_of,
    models_by_path,
    models_only,
    work_name,
)
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.residency import Residency
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica import Replica, is_adopted
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.listed_replicas import LISTED_MAX, ListedReplicas
from schemas.numbers import WHOLE_MAX
from schemas.state import (
    AVOIDED_CHARS_MAX,
    AVOIDED_MAX,
    CARDS_MAX,
    MOVING_MAX,
    Digest,
    ModelCapacity,
    ModelCard,
    ReplicaState,
    rounded,
)

CHANGE_S_MIN = 0.01  # counting a thousand replicas for each one that turns full costs a core
# Digests of many models are large, and each router of a region sends its own: they are so far apart
# that all together take this of the slowest link at most. The longest time apart is half of that
# after which peers forget a router.
LINK_SHARE = 1 / 8
BYTES, MODEL_BYTES, LISTED_BYTES = 512, 192, 32  # of one as JSON; of each model, and replica, in it
AVOIDED_BYTES = 192  # of each replica and peer that is avoided, with why
# Round trips and cards, which change little, are sent once a second: in every digest, the traffic
# between regions would grow with the square of their number.
ROUND_TRIPS_S = 1.0
# Of adapters that no replica has loaded, and only where tokens are generated: they may be hundreds.
ADAPTERS_PUBLISHED_MAX = 64
WAIT_S_MAX = 3600.0  # until a queue is computed, whatever an agent reports of it
RATE_S = 5.0  # time constant of the request rate's running average
REST_AFTER_S = 1.0  # without a request or a change, or a router that needs digests as usual

T = TypeVar("T")
Counts = dict[ModelId, tuple[int, int]]  # ready and free replicas
Listed = dict[ReplicaId, int]  # a replica's place in the digest


class RegionalDigest:
    """Builds digests every `digest_s`, and at once after changes that matter to peers, as far as
    the links carry so many.

    While there is nothing to do and to say, each comes later than the one before, up to
    `digest_rest_s`.
    """

    def __init__(
        self,
        region: RegionId,
        router: RouterId,
        epoch: int,
        settings: RouterSettings,
        replicas: ReplicaTable,
        held: HoldQueue,
        peers: PeerTable,
    ) -> None:
        self._region, self._router, self._epoch = region, router, epoch
        self._settings = settings
        self._replicas = replicas
        self._held = held
        self._peers = peers
        self._seq = 0
        self.busy_at = float("-inf")  # the last time with a request, a change, or a lost bus
        self._next_within_s = settings.digest_s
        self._published_at = self._made_at = float("-inf")
        self._round_trips_at = self._cards_at = float("-inf")
        self._latest: Digest | None = None
        self._apart_s = CHANGE_S_MIN
        self._bytes_per_s = settings.slowest_bytes_per_s * LINK_SHARE
        self._routers = 1
        self._last: tuple[object, ...] = ()  # what mattered in the last one
        self._accepted = True
        self.arrivals = EventRate(RATE_S)  # of clients' requests
        self._residency = Residency(region, settings.ground)
        self._labels = tuple(sorted(settings.ground.carried_by(region)))

    def due(
        self,
        now: float,
        *,
        accepting: bool,
        adopted: Mapping[RegionId, int],
        rtt_s: Callable[[], dict[RegionId, float]],
        routers: int = 1,
        has_changed: bool = True,
    ) -> Digest | None:
        """The digest to publish now, if one is due. A change too soon waits for the next tick.

        `adopted`: regions with the term of each. `rtt_s`: to the peers. `routers`: of this region.
        `has_changed`: what peers act on may have; else only time has passed.
        """
        self._routers = routers
        since_s = now - self._published_at
        if since_s < self._apart_s and accepting == self._accepted:
            return None
        is_as_it_was = not has_changed and self._last[-2:] == (accepting, adopted)
        if is_as_it_was and self.is_slow and since_s < self._next_within_s and self._rests(now):
            return None
        counts = self._counts(now)
        is_crossed = len(self._held) > self._settings.peer_queue_max
        last = counts, is_crossed, accepting, adopted
        usual_s, is_same = self._settings.digest_s, last == self._last
        if is_same and since_s < usual_s:
            return None
        if not is_same:
            self.busy(now)
        rests = self._rests(now)
        if rests and since_s < self._next_within_s:
            return None
        rest_s = max(usual_s, min(2.0 * self._next_within_s, self._settings.digest_rest_s))
        self._next_within_s = rest_s if rests else usual_s
        self._last, self._published_at, self._accepted = last, now, accepting
        round_trips = rtt_s() if now - self._round_trips_at >= ROUND_TRIPS_S else {}
        if round_trips:
            self._round_trips_at = now
        return self._digest(counts, now, accepting, adopted, round_trips, self._cards(counts, now))

    def busy(self, now: float) -> None:
        """Something is under way, or has changed: from now on digests come as usual."""
        self.busy_at, self._next_within_s = now, self._settings.digest_s

    @property
    def is_slow(self) -> bool:
        """Whether nothing has been under way for a while, and all who hear this region know."""
        return self._next_within_s > self._settings.digest_s

    def _rests(self, now: float) -> bool:
        """Whether nothing is under way, and all who hear this region read when the next comes."""
        if min(now - self.busy_at, now - self._peers.hurry_at) < REST_AFTER_S:
            return False
        return not any(one.inside or one.on_the_way.count for one in self._replicas)

    def fresh(self, now: float, *, accepting: bool, adopted: Mapping[RegionId, int]) -> Digest:
        """The digest as of now for one peer; what is published to all does not depend on it."""
        if self._latest is not None and now - self._made_at < CHANGE_S_MIN:
            return self._latest
        return self._digest(self._counts(now), now, accepting, adopted, {}, {})

    def _cards(self, models: Iterable[ModelId], now: float) -> dict[ModelId, ModelCard]:
        """Of the first models, once a second."""
        if now - self._cards_at < ROUND_TRIPS_S:
            return {}
        self._cards_at = now
        known = ((model, self._replicas.card(model)) for model in models)
        return dict(islice(((m, card) for m, card in known if card is not None), CARDS_MAX))

    def _digest(
        self,
        counts: Counts,
        now: float,
        accepting: bool,
        adopted: Mapping[RegionId, int],
        rtt_s: dict[RegionId, float],
        cards: dict[ModelId, ModelCard],
    ) -> Digest:
        beats = [(replica, replica.heartbeat) for replica in self._replicas]
        working = [one for one, beat in beats if beat.state is ReplicaState.READY and beat.models]
        ready = [one for one in working if not is_prefill_name(one.heartbeat.models[0])]
        ready_beats = [replica.heartbeat for replica in ready]
        lines = [replica.prefill_line for replica in working]
        listed = self._listed(counts, now)
        capacities = self._capacities(counts, now, listed)
        self._seq += 1
        self._made_at = now
        self._latest = Digest(
            region=self._region,
            router=self._router,
            epoch=self._epoch,
            seq=self._seq,
            accepting=accepting,
            replicas_ready=len(ready),
            replicas_free=self._free(ready, now),
            queue=len(self._held),
            models=models_only(capacities),
            requests_per_s=rounded(self.arrivals.per_s(now)),
            prefill_s_per_token=rounded(_known(median, [s_per_token for s_per_token, _ in lines])),
            prefill_base_s=rounded(_known(median, [base_s for _, base_s in lines])),
            kv_used_ratio=rounded(_known(_mean, [beat.kv_used_ratio for beat in ready_beats])),
            residency=self._labels,
            models_by_label=self._by_label(now, listed),
            adopted=dict(adopted),
            rtt_s={peer: rounded(each_s) for peer, each_s in rtt_s.items()},
            cards=cards,
            models_by_path=models_by_path(capacities),
            replicas=_columns([self._replicas.by_name[name] for name in listed], now),
            avoided=_first_own(self._replicas.avoided(now), ReplicaId),
            avoided_peers=_first_own(self._peers.failing.avoided(now), RegionId),
            moving=self._replicas.moving[:MOVING_MAX],
            next_within_s=rounded(self._next_within_s),
        )
        by_other = (self._latest.models_by_label, self._latest.models_by_path)
        models = sum(len(each) for by in by_other for each in by.values()) + len(counts)
        avoided = len(self._latest.avoided) + len(self._latest.avoided_peers)
        size = BYTES + MODEL_BYTES * models + LISTED_BYTES * len(listed) + AVOIDED_BYTES * avoided
        apart_s = max(CHANGE_S_MIN, size * self._routers / self._bytes_per_s)
        self._apart_s = min(apart_s, self._settings.digest_lost_s / 2)
        return self._latest

    def _listed(self, models: Iterable[ModelId], now: float) -> Listed:
        """Replicas to be listed, and their places: in turn of each model the one that has the
        shortest wait of those not listed yet."""
        shortest = []
        for model in models:
            waits = [
                (wait_s, replica.heartbeat.replica)
                for replica in self._not_failing(model, self._replicas.serving(model), now)
                if self._replicas.serves(replica, model)
                and (wait_s := _wait_s(replica, now)) is not None
            ]
            shortest.append([name for _, name in nsmallest(LISTED_MAX, waits)])
        names = dict.fromkeys(filter(None, chain.from_iterable(zip_longest(*shortest))))
        return {name: place for place, name in enumerate(islice(names, LISTED_MAX))}

    def _by_label(self, now: float, listed: Listed) -> dict[str, dict[ModelId, ModelCapacity]]:
        """Of each label that some replica carries and some does not."""
        found: dict[str, dict[ModelId, ModelCapacity]] = {}
        beats = (replica.heartbeat for replica in self._replicas)
        # Only a replica that names its labels, or was adopted, may lack some.
        if all(beat.residency is None and beat.region == self._region for beat in beats):
            return found
        carried = [(replica, self._residency.of_replica(replica)) for replica in self._replicas]
        for label in self._labels:
            if any(label not in labels for _, labels in carried):
                within = [replica for replica, labels in carried if label in labels]
                capacities = self._capacities(self._counts(now, within), now, listed, within)
                found[label] = models_only(capacities)
        return found

    def _counts(self, now: float, within: Collection[Replica] | None = None) -> Counts:
        """Of each model: a change of these is published at once. `within`: of these replicas."""
        counts: Counts = {}
        told = 0  # adapters that no replica has loaded
        for model in sorted(filter(is_for_others, self._replicas.models())):
            if self._is_unloaded(model) and model_of(model) not in self._replicas.on_demand:
                if is_model(model):
                    if told == ADAPTERS_PUBLISHED_MAX:
                        continue
                    told += 1
                elif model_of(model) not in counts or not is_model(work_name(model)):
                    continue
            among = self._serving(model, within)
            free, others = self._replicas.partition_available(model, now, among=among)
            ready = len(free) + sum(self._replicas.serves(replica, model) for replica, _ in others)
            if ready:
                counts[model] = ready, len(self._not_failing(model, free, now))
        return counts

    def _not_failing(
        self, model: ModelId, replicas: Collection[Replica], now: float
    ) -> Collection[Replica]:
        """Those that are not left out after failures; all, if that leaves none."""
        failing = self._replicas.failing
        if not failing.places:
            return replicas
        left = [one for one in replicas if not failing.bars(one.heartbeat.replica, model, now)]
        return left or replicas

    def _is_unloaded(self, model: ModelId) -> bool:
        """Whether each of its replicas would have to load it first."""
        loads = self._replicas.unloaded.get(model, 0)
        return loads > 0 and loads == len(self._replicas.serving(model))

    def _serving(self, model: ModelId, within: Collection[Replica] | None) -> Collection[Replica]:
        serving = self._replicas.serving(model)
        if within is None:
            return serving
        names = {replica.heartbeat.replica for replica in within}
        return [replica for replica in serving if replica.heartbeat.replica in names]

    def _capacities(
        self,
        counts: Counts,
        now: float,
        listed: Listed,
        within: Collection[Replica] | None = None,
    ) -> dict[ModelId, ModelCapacity]:
        capacities = {}
        for model, (ready, free) in counts.items():
            among = self._serving(model, within)
            serving = [replica for replica in among if self._replicas.serves(replica, model)]
            unloaded = model in self._replicas.unloaded
            load_s = min(one.load_s(model) for one in serving) if unloaded else 0.0
            kv_free_tokens = _known(max, [replica.kv_free_tokens for replica in serving])
            capacities[model] = ModelCapacity(
                ready=ready,
                free=free,
                wait_s=rounded(_known(min, [_wait_s(replica, now) for replica in serving])),
                kv_free_tokens=None if kv_free_tokens is None else _count(kv_free_tokens),
                running=rounded(_mean([_running(replica) for replica in serving])),
                load_s=rounded(load_s) if load_s else None,
                listed=_places(serving, listed),
            )
        return capacities

    def _free(self, ready: list[Replica], now: float) -> int:
        """How many of them would take a request for their first model."""
        among: dict[ModelId, list[Replica]] = {}
        for replica in ready:
            among.setdefault(replica.heartbeat.models[0], []).append(replica)
        available = self._replicas.partition_available
        return sum(
            len(self._not_failing(model, available(model, now, among=of)[0], now))
            for model, of in among.items()
        )


def _first_own(avoided: Mapping[str, str], typed: Callable[[str], T]) -> dict[T, str]:
    """The first, without adopted replicas."""
    own = ((name, why) for name, why in avoided.items() if not is_adopted(ReplicaId(name)))
    return {typed(name): why[:AVOIDED_CHARS_MAX] for name, why in islice(own, AVOIDED_MAX)}


def _places(serving: Collection[Replica], listed: Listed) -> tuple[int, ...]:
    known = (listed.get(replica.heartbeat.replica) for replica in serving)
    return tuple([place for place in known if place is not None])


def _columns(replicas: Sequence[Replica], now: float) -> ListedReplicas:
    """Of replicas that have a known wait, and so a known speed."""
    lines = [replica.prefill_line for replica in replicas]
    free = [replica.kv_free_tokens for replica in replicas]
    return ListedReplicas(
        names=tuple([replica.heartbeat.replica for replica in replicas]),
        wait_s=tuple([rounded(_wait_s(replica, now) or 0.0) for replica in replicas]),
        running=tuple([_count(_running(replica)) for replica in replicas]),
        kv_free_tokens=tuple([None if one is None else _count(one) for one in free]),
        prefill_s_per_token=tuple([rounded(believed_slope(slope or 0.0)) for slope, _ in lines]),
        prefill_base_s=tuple([_at_most(base_s, BASE_S_MAX) for _, base_s in lines]),
    )


def _wait_s(replica: Replica, now: float) -> float | None:
    """Until it has computed its queue, and has a slot in its batch; None where its speed or its
    queue is unknown."""
    (s_per_token, base_s), waited = replica.prefill_line, replica.heartbeat.waited
    if s_per_token is None:
        return None
    queued = replica.prefill_queue_tokens(now, s_per_token)
    if queued is None:
        return None
    slot_s = 0.0 if waited is None else waited.slot_s(s_per_token, base_s or 0.0)
    return min(WAIT_S_MAX, queued * s_per_token + slot_s)


def _count(number: float) -> int:
    """As a digest may have it, whatever an agent reported."""
    return max(0, min(WHOLE_MAX, int(number)))


def _at_most(seconds: float | None, most_s: float) -> float | None:
    return None if seconds is None else rounded(min(seconds, most_s))


def _running(replica: Replica) -> float:
    """By its engine's count; where not reported, its load."""
    running = replica.heartbeat.running
    return float(replica.load if running is None else running)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _known(summary: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    """The summary of the known values; None, not 0, without any."""
    known = [value for value in values if value is not None]
    return summary(known) if known else None
