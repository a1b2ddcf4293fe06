"""When held requests are tried again: whenever a replica or peer may have room.

A request that can't use the room (that place failed it before, or it waits for a better one)
doesn't block those behind it that can.

Where the policy judges load, a try prices all candidates for each request. There it is made once a
replica or peer has reported something new, at the earliest RETRY_S after the one before; and
without news after UNCHANGED_S, as queues are computed meanwhile.

Where the policy judges load, held requests with little to compute go first. The mean wait is least
if the shortest is computed first (Smith, Naval Research Logistics Quarterly 3, 1956); first come,
first served makes a prompt that needs 0.1 s wait for many that need 5 s, and under overload answers
them all when their clients are about to give up. And while a cached prompt waits, others may evict
what it came for. A request gives way to those of its model and class that came at most
SHORTER_FACTOR times as much later as its own prompt takes to compute, and at most SHORTER_S_MAX,
half of the longest hold or of its own limit for the first token, or the limit of queue delay later,
so that nobody is held until it is shed. Turns of models and classes are by `effective_arrival`:
which request of a model and class has one is decided here, among the first SORTED_MAX. Rejected:
nothing held for a queue, which had the same effect (short prompts went first where memory was full)
without any limit on engines' queues.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import attrgetter

from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.hold_queue import HoldQueue, RequestKind, kind_of
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.model.reported_speed import believed_slope
from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.policies.base import PREFILL_S_PER_TOKEN
from mesh.core.view.bus_status import AWAY
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.exchange import Priority
from schemas.ids import ModelId, ReplicaId
from schemas.state import Digest, Heartbeat

OTHERS_WAIT = "others wait for this model"
NOWHERE: frozenset[str] = frozenset()  # what a request avoids that has not failed
# Requests held by the policy's choice that don't block newcomers, and are tried at every event.
CHOOSY_MAX = 16
RETRY_S = 0.02  # a hundred replicas would keep a core busy with the held requests
UNCHANGED_S = 0.1  # a heartbeat's time
REPORTS_MAX = 32_768  # replicas, and routers of peers
# Most of what the price of a replica, and whether it is available, depend on beside what was sent
# to it. Where only something else has changed, a request is tried after UNCHANGED_S.
PRICED_BY: Callable[[Heartbeat], tuple[object, ...]] = attrgetter(
    *("state", "models", "full", "pending", "running", "outstanding", "outstanding_max"),
    *("prefill_queued_tokens", "batch_max", "kv_used_ratio", "kv_capacity_tokens"),
    *("prefill_s_per_token", "prefill_base_s", "loadable", "loading", "adapters_busy"),
    *("adapters_free", "prefill_prior"),
)
# Mean time to the first token with a factor of 5, of 30, to that by arrival (simulated, two seeds):
# documents on both GPUs at full load 0.97, 0.35, on H100s 0.80, 0.64; tools above it 0.84, 0.57.
SHORTER_FACTOR = 30.0
SHORTER_S_MAX = 30.0  # half of the longest hold
SORTED_MAX = 64  # the first held requests
UNCACHED_KNOWN_S = 0.1  # a heartbeat's time; each look walks the index


Reports = dict[tuple[str, ...], tuple[object, ...]]  # by replica, or region and router


class QueueScheduler:
    """Tries held requests in order."""

    def __init__(
        self,
        held: HoldQueue,
        inflight: Mapping[int, RequestRecord],
        replicas: ReplicaTable,
        placer: Placer,
        begin: Callable[[RequestRecord, PlacementResult, float], None],
        admission: Admission,
    ) -> None:
        self._held = held
        self._inflight = inflight
        self._replicas = replicas
        self._placer = placer
        self._begin, self._admission = begin, admission
        # Held requests for which a place was available when last tried: keys, with their kinds.
        self._choosy: dict[int, RequestKind] = {}
        self._tried_at = float("-inf")
        # What each replica, and each router of a peer, had reported when it was last compared.
        self._replica_reports: Reports = {}
        self._peer_reports: Reports = {}
        self._has_news = False  # since the last try
        # By key: when it was looked up, and how many tokens it leaves to compute.
        self._uncached: dict[int, tuple[float, float]] = {}

    def must_queue(self, newcomer: Request) -> bool:
        """Whether requests for the same model and labels are held before it.

        Requests that wait for other labels must not hold it up.
        """
        model, labels, _ = kind_of(newcomer)
        ours_and_theirs = (model, labels, False), (model, labels, True)
        waiting = sum(map(self._held.alike, ours_and_theirs))
        if not waiting:
            return False
        choosy = sum(
            choosing in ours_and_theirs and self._is_held(key)
            for key, choosing in self._choosy.items()
        )
        return waiting > choosy

    def place_new(self, request: Request, now: float) -> PlacementResult:
        """Place it. Local replicas that held requests wait for are not for it; peers may be."""
        if self._replicas.bus.is_away(now):
            return self._placer.held(request, AWAY)
        must_wait = self.must_queue(request)
        if must_wait and not self._placer.judges_load:
            return self._placer.held(request, OTHERS_WAIT)
        ahead, queue = self._held.waiting(request.model), len(self._held) + 1
        place = self._placer.place(request, (), now, ahead, queue)
        if must_wait and place.placement is Placement.LOCAL:
            return self._placer.held(request, OTHERS_WAIT)
        self._sent_to(place)
        return place

    def joined(self, request: Request, place: PlacementResult) -> None:
        """A newcomer is held for the reason in `place`."""
        if place.by_choice and len(self._choosy) < CHOOSY_MAX:
            self._choosy[request.key] = kind_of(request)

    def _is_held(self, key: int) -> bool:
        record = self._inflight.get(key)
        return record is not None and record.held_since is not None

    def place_waiting(self, now: float) -> None:
        """Place held requests in order, as far as there is room."""
        if self._replicas.bus.is_away(now):
            return
        self._choosy.clear()
        self._tried_at, self._has_news = now, False
        stuck: set[tuple[RequestKind, str, frozenset[str]]] = set()
        kinds_left = len(self._held.held_kinds) * self._placer.policy_count
        ahead: Counter[ModelId] = Counter()  # requests by work that stay held, up to here
        for request in self._in_order(now):
            record = self._inflight[request.key]
            kind, avoid = (kind_of(request), self._placer.policy_name(request)), record.avoided(now)
            work = work_name(request.model)
            if not stuck.isdisjoint(((*kind, NOWHERE), (*kind, avoid))):
                ahead[work] += 1
                continue
            queue = len(self._held)
            place = self._placer.place(request, avoid, now, ahead[work], queue, is_held=True)
            record.decided(place)
            ahead[work] += place.target is None
            if place.target is not None:
                self._sent_to(place)
                self._held.release(request)
                self._begin(record, place, now)
                continue
            if place.by_choice and len(self._choosy) < CHOOSY_MAX:
                self._choosy[request.key] = kind_of(request)
                continue
            stuck.add((*kind, avoid))
            kinds_left -= not avoid
            if not kinds_left:
                return

    def _in_order(self, now: float) -> Iterable[Request]:
        """All held requests; in turns of one model and class, those with less to compute first."""
        if len(self._held) < 2 or not self._placer.judges_load or not self._held.is_first_come:
            return self._held
        rest = iter(self._held)
        first = list(islice(rest, SORTED_MAX))
        self._look_up(first, now)
        models = dict.fromkeys(request.model for request in first)
        speeds = {model: self._s_per_token(model) for model in models}

        def place(request: Request) -> float:
            prefill_s = self._uncached[request.key][1] * speeds[request.model]
            return request.arrived_at + min(self._most_s(request), SHORTER_FACTOR * prefill_s)

        alike: dict[tuple[ModelId, Priority], list[Request]] = {}
        for request in first:
            alike.setdefault((request.model, request.priority), []).append(request)
        turns = {kind: iter(sorted(own, key=place)) for kind, own in alike.items()}
        return chain([next(turns[one.model, one.priority]) for one in first], rest)

    def _most_s(self, request: Request) -> float:
        """How much later those may have come that it gives way to."""
        most_s = min(SHORTER_S_MAX, self._admission.hold_s_max / 2)
        if (goal_s := request.slo_ttft_s) is not None:
            most_s = min(most_s, goal_s / 2)
        return min(most_s, self._admission.delay.limit_of(request) or most_s)

    def _look_up(self, requests: Iterable[Request], now: float) -> None:
        known, self._uncached = self._uncached, {}
        for request in requests:
            seen = known.get(request.key)
            if seen is None or now - seen[0] >= UNCACHED_KNOWN_S:
                seen = now, request.prompt.tokens * (1.0 - self._placer.hit_ratio(request))
            self._uncached[request.key] = seen

    def _s_per_token(self, model: ModelId) -> float:
        """Of the middle one of the replicas that serve it, by what they report."""
        reported = (replica.prefill_line[0] for replica in self._replicas.serving(model))
        known = sorted(filter(None, reported)) or [PREFILL_S_PER_TOKEN]
        return believed_slope(known[len(known) // 2])

    def offer(self, name: ReplicaId | None, now: float) -> None:
        """Try held requests, if this replica may have room now that it had not before."""
        replica = None if name is None else self._replicas.get(name)
        if replica is None:
            return
        if not self._placer.may_go(replica, self._held.models(), now):
            return
        beat, sent = replica.heartbeat, replica.on_the_way
        sent_there = sent.count, sent.waiting, sent.tokens, sent.prefill_tokens
        report = PRICED_BY(beat), sent_there
        self._note(self._replica_reports, (beat.replica,), report)
        if self._is_due(now):
            self.place_waiting(now)

    def digest_arrived(self, digest: Digest, now: float) -> None:
        """The same of a peer, by its digest."""
        report = digest.accepting, digest.replicas_free, digest.queue
        self._note(self._peer_reports, (digest.region, digest.router), report)
        if digest.replicas_free and self._is_due(now):
            self.place_waiting(now)

    def tick(self, now: float) -> None:
        """Try held requests, as time has passed."""
        if self._is_due(now):
            self.place_waiting(now)

    def _note(self, table: Reports, place: tuple[str, ...], report: tuple[object, ...]) -> None:
        if table.get(place) != report:
            if len(table) >= REPORTS_MAX:
                table.clear()  # one try too many
            table[place] = report
            self._has_news = True

    def _sent_to(self, place: PlacementResult) -> None:
        """Who is tried from now on sees it there, so that its end is news."""
        if place.placement is Placement.LOCAL and place.target is not None:
            self._replica_reports.pop((place.target,), None)

    def _is_due(self, now: float) -> bool:
        """Whether a try has not to wait, which it has where the policy judges load by itself."""
        wait_s = RETRY_S if self._has_news else UNCHANGED_S
        return not self._placer.judges_load or now - self._tried_at >= wait_s
