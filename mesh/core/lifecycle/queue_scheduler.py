"""When held requests are tried again: whenever a replica or peer may have room.

A request that can't use the room (that place failed it before, or it waits for a better one)
doesn't block those behind it that can.

Where the policy judges load, a try prices all candidates for each request. There it is made once a
replica or peer has reported something new, at the earliest RETRY_S after the one before; and
without news after UNCHANGED_S, as queues are computed meanwhile. Who goes first: `ReleaseOrder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter

from mesh.core.lifecycle.admission import Admission
from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.requests.hold_queue import HoldQueue, RequestKind, kind_of
from mesh.core.requests.record import RequestRecord
from mesh.core.view.bus_status import AWAY
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
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
    "state",
    "models",
    "full",
    "pending",
    "running",
    "outstanding",
    "outstanding_max",
    "prefill_queued_tokens",
    "batch_max",
    "kv_used_ratio",
    "kv_capacity_tokens",
    "prefill_s_per_token",
    "prefill_base_s",
    "loadable",
    "loading",
    "adapters_busy",
    "adapters_free",
    "prefill_prior",
)

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
        for request in self._admission.order.in_order(now):
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
