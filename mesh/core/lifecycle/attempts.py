"""Attempts and ends of requests: what they occupy in the tables, and their effects and receipts.

`Attempts` begins and leaves attempts, so that what one occupies (a hand-off to a replica, a
forwarded request) is counted once and released once, and every placement has its receipt.

`Completion` ends requests other than by their answer: failed, shed, or refused. It releases the
place in the hold queue, the attempt, and all that they occupied. A peer's request is refused where
a client's would fail: the peer's router, which receives this region's digest with the refusal, then
places it elsewhere.
"""

from collections.abc import Callable, Iterable, Mapping

from mesh.core.lifecycle.admission import RETRY_AFTER_S_MAX, Admission, LateFirstToken
from mesh.core.lifecycle.forwarded import ForwardedQueue
from mesh.core.model import effects as fx
from mesh.core.model.request import Request, Served
from mesh.core.model.served_names import work_name
from mesh.core.placement.pairs import PrefillChoice
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.policies.base import CacheEstimate, Destination
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.requests.record import PrefillStage, RequestRecord, Suspect
from mesh.core.view.outliers import FailingPlaces
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica import split_replica_name
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import CandidateKind, Decision, Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId
from schemas.state import Digest

SHUTTING_DOWN = "this router is shutting down"


class Attempts:
    """Writes to the tables and to `effects`; the caller decides whether and where."""

    def __init__(
        self,
        region: RegionId,
        replicas: ReplicaTable,
        peers: PeerTable,
        placer: Placer,
        effects: list[fx.Effect],
        terms: Mapping[RegionId, int],
    ) -> None:
        """`terms`: of the leases by which this router owns regions' replicas."""
        self._region = region
        self._replicas = replicas
        self._peers = peers
        self._placer = placer
        self._effects = effects
        self._terms = terms
        # A request that goes to a replica, and that policies are still to learn of.
        self.unlearned: tuple[Request, Destination, float] | None = None

    def decided(
        self, request: Request, place: PlacementResult, *, attempt: int = 1, held_s: float = 0.0
    ) -> None:
        is_local = place.placement is Placement.LOCAL
        decision = Decision(
            request=request.request_id,
            region=self._region,
            policy=place.policy,
            placement=place.placement,
            replica=place.target if is_local else None,
            prefill=None if place.prefill is None else place.prefill.replica,
            peer=None if is_local else place.target,
            hops=request.hops + (place.placement is Placement.PEER),
            attempt=attempt,
            held_s=held_s,
            reason=place.reason,
            residency=request.residency,
            candidates=place.candidates,
            considered=place.considered,
        )
        self._effects.append(fx.Decided(request.key, decision, place.unlisted))

    def begin(
        self,
        record: RequestRecord,
        place: PlacementResult,
        now: float,
        *,
        learn_later: bool = False,
    ) -> None:
        """Begin an attempt at `place`.

        A peer's request ends here with it, as the replica answers to the peer's inbox, or with its
        prefill stage. `learn_later`: policies learn of it by `learn`, which is called before
        anything else happens. That takes as long as the decision, and the replica need not wait.
        """
        request, name = record.request, place.target
        assert name is not None, "an attempt goes to a place"
        if place.placement is not Placement.LOCAL:
            self._forward(record, place, name, now)
            return
        if place.prefill is not None:
            self._begin_pair(record, place, place.prefill, now)
            return
        replica, prefill_tokens = ReplicaId(name), place.prefill_tokens
        handoff = self._replicas.hand_off(replica, request.prompt.tokens, prefill_tokens, now)
        if self._replicas.failing:
            self._replicas.failing.tries(name, request.model, request.key, now)
        destination = Destination(CandidateKind.REPLICA, name)
        record.dispatch(destination, handoff, now)
        self.decided(request, place, attempt=record.attempt, held_s=record.held_s)
        if learn_later:
            self.unlearned = request, destination, now
        else:
            self._placer.placed(request, destination, now)
        self._effects.append(
            self._work(
                record, replica, handoff, request.answer_inbox, prefill_tokens, place.may_queue
            )
        )
        if request.answer_inbox is not None:
            self._replicas.relay(replica, request.answer_inbox, request.deadline)
            record.end()

    def learn(self) -> None:
        """Let policies learn of the last request, if they have not."""
        if (unlearned := self.unlearned) is not None:
            self.unlearned = None
            self._placer.placed(*unlearned)

    def _work(
        self,
        record: RequestRecord,
        replica: ReplicaId,
        handoff: int,
        inbox: str | None,
        prefill_tokens: int,
        may_queue: bool,
        pair: fx.KvPair | None = None,
    ) -> fx.Dispatch:
        region, bus_name = split_replica_name(replica)
        known = self._replicas.get(replica)
        return fx.Dispatch(
            record.request.key,
            record.attempt,
            bus_name,
            handoff,
            inbox,
            prefill_tokens,
            may_queue,
            region,
            self._terms.get(region or self._region),
            region is None and known is not None and known.heartbeat.held_seq is not None,
            pair,
        )

    def _begin_pair(
        self, record: RequestRecord, place: PlacementResult, choice: PrefillChoice, now: float
    ) -> None:
        """Begin the prefill stage, and the decode stage where the engines need both at once."""
        request, tokens = record.request, record.request.prompt.tokens
        first, second = ReplicaId(choice.replica), ReplicaId(place.target or "")
        handoff = self._replicas.hand_off(first, tokens, place.prefill_tokens, now)
        reserved = self._replicas.reserve(second, tokens)
        stage = PrefillStage(first, handoff, now, choice.pair, reserved)
        destination = Destination(CandidateKind.REPLICA, second)
        record.dispatch(destination, None, now, stage)
        self.decided(request, place, attempt=record.attempt, held_s=record.held_s)
        self._placer.placed(request, destination, now)
        # After it, which decides whether peers may know of the prompt.
        stage.matched_blocks, stage.matched_at = self._placer.prefills(request, first, now)
        work = self._work(record, first, handoff, None, place.prefill_tokens, place.may_queue)
        self._effects.append(fx.DispatchPrefill(work, choice.pair))
        if choice.pair.kind.is_at_once:
            self.decode(record, now)

    def decode(self, record: RequestRecord, now: float) -> None:
        """Begin the decode stage of an attempt on a pair."""
        stage, replica, request = record.prefill, record.replica, record.request
        assert stage is not None and stage.reserved is not None, "its first stage has begun"
        assert replica is not None, "the decode replica of a pair is chosen with it"
        self._replicas.over(replica, stage.reserved)
        handoff = self._replicas.hand_off(replica, request.prompt.tokens, 1, now)
        record.decode(handoff, now)
        inbox = request.answer_inbox
        self._effects.append(self._work(record, replica, handoff, inbox, 1, True, stage.pair))
        if inbox is not None:
            self._replicas.relay(replica, inbox, request.deadline)

    def prefilled(self, record: RequestRecord, served: Served | None, now: float) -> None:
        """The prefill stage is over, at that cost."""
        stage = record.prefill
        assert stage is not None, "only a stage ends"
        self._replicas.over(stage.replica, stage.handoff)
        record.prefilled()
        if served is not None:
            held = CacheEstimate(stage.matched_blocks, stage.matched_at, stage.began_at)
            self._placer.prefilled(record.request, stage.replica, held, served, now)

    def _forward(
        self, record: RequestRecord, place: PlacementResult, name: str, now: float
    ) -> None:
        request, peer = record.request, RegionId(name)
        destination = Destination(CandidateKind.PEER, name)
        record.dispatch(destination, None, now)
        self.decided(request, place, attempt=record.attempt, held_s=record.held_s)
        self._peers.forwarded(peer, now)
        if self._peers.failing:
            self._peers.failing.tries(peer, request.model, request.key, now)
        self._placer.placed(request, destination, now)
        self._effects.append(fx.Forward(request.key, record.attempt, peer, record.queued_s(now)))

    def began(self, record: RequestRecord, now: float, *, shows_ttft: bool) -> None:
        """A first byte is here; policies learn from it if it shows when the first token was."""
        if record.handoff is not None and record.replica is not None:
            self._replicas.began(record.replica, record.handoff)
        if record.destination is not None and shows_ttft:
            self._placer.began(record.request, record.destination, now)

    def served(self, record: RequestRecord, served: Served | None, now: float) -> None:
        """The whole answer has arrived; policies learn from its cost, if that is known."""
        if served is not None:
            self._judge(record, served, now)
        if record.destination is not None and served is not None:
            self._placer.served(record.request, record.destination, served, now)

    def leave(self, record: RequestRecord, now: float) -> None:
        """Release what the attempt under way occupies. The record's next transition follows."""
        if self._replicas.failing or self._peers.failing:
            place, model = record.peer or record.replica or "", record.request.model
            self._failing_of(record).left(place, model, record.request.key)
        if record.handoff is not None and record.replica is not None:
            self._replicas.over(record.replica, record.handoff)
        if record.prefill is not None:
            self._leave_prefill(record, record.prefill)
            if record.request.answer_inbox is not None:
                return  # policies don't follow peers' requests
        if record.destination is not None:
            self._placer.left(record.request, record.destination, now)

    def _judge(self, record: RequestRecord, served: Served, now: float) -> None:
        """What was answered is a good end, and shows that others failed it by their own fault."""
        model = record.request.model
        if record.suspects and (served.prompt_tokens or served.output_tokens):
            for suspect in record.suspects:
                table = self._peers.failing if suspect.is_peer else self._replicas.failing
                if self._is_there(suspect.place, is_peer=suspect.is_peer):
                    table.failed(suspect.place, model, suspect.what, now)
        if self._replicas.failing or self._peers.failing:
            self._failing_of(record).answered(record.peer or record.replica or "", model)

    def failed(self, record: RequestRecord, what: str, now: float, *, is_sure: bool) -> None:
        """The attempt under way failed. `is_sure`: by its place's fault; else an answer elsewhere
        has to show it. Pairs are not judged: the fault may be either one's."""
        place = record.peer or record.replica
        if record.prefill is not None or place is None:
            return
        is_peer = record.peer is not None
        if not is_sure:
            record.suspect(Suspect(place, what, is_peer=is_peer))
        elif self._is_there(place, is_peer=is_peer):
            self._failing_of(record).failed(place, record.request.model, what, now)

    def _is_there(self, place: str, *, is_peer: bool) -> bool:
        return place in (self._peers.by_region if is_peer else self._replicas.by_name)

    def _failing_of(self, record: RequestRecord) -> FailingPlaces:
        return self._replicas.failing if record.peer is None else self._peers.failing

    def _leave_prefill(self, record: RequestRecord, stage: PrefillStage) -> None:
        if stage.reserved is not None and record.replica is not None:
            self._replicas.over(record.replica, stage.reserved)
        if not stage.is_open:
            return
        self._replicas.over(stage.replica, stage.handoff)
        request = record.request
        self._effects.append(fx.CancelPrefill(request.key, record.attempt, stage.replica))
        if not record.has_started:  # else its prompt was computed
            new = request.prompt.hashes[stage.matched_blocks :]
            self._placer.never_prefilled(stage.replica, new, stage.began_at)

    def rest(self, record: RequestRecord, now: float, *, in_prefill: bool = False) -> None:
        """The replica or peer that did not take this attempt gets no work until its next report."""
        if in_prefill and record.prefill is not None:
            self._replicas.refused(record.prefill.replica, now)
        elif record.peer is not None:
            self._peers.refused(record.peer, now)
        elif record.replica is not None:
            self._replicas.refused(record.replica, now)

    def cancel(self, record: RequestRecord) -> None:
        """Cancel the attempt at the place that answers it; `leave` cancels its prefill stage."""
        if record.is_prefilling:
            return
        region, replica = record.peer, record.replica
        if region is None and replica is not None:
            region, replica = split_replica_name(replica)
        self._effects.append(
            fx.CancelAttempt(record.request.key, record.attempt, region or self._region, replica)
        )

    def hand_back(self, record: RequestRecord, now: float) -> None:
        """Its adopted replica belongs to its own region again."""
        assert record.replica is not None, "an attempt on an adopted replica"
        region, replica = split_replica_name(record.replica)
        assert region is not None, "adopted replicas are named with their region"
        self.leave(record, now)
        record.handed_back(region, replica)


class Completion:
    """Writes to the tables and to `effects`; the caller decides whether a request must end."""

    def __init__(
        self,
        *,
        inflight: dict[int, RequestRecord],
        held: HoldQueue,
        forwarded_queue: ForwardedQueue,
        admission: Admission,
        attempts: Attempts,
        placer: Placer,
        fresh: Callable[[float], Digest],
        effects: list[fx.Effect],
    ) -> None:
        """`fresh`: this region's digest as of now, sent with each refusal."""
        self._inflight = inflight
        self._held = held
        self._forwarded_queue = forwarded_queue
        self._admission = admission
        self._attempts = attempts
        self._placer = placer
        self._fresh = fresh
        self._effects = effects

    def end(self, record: RequestRecord, now: float) -> None:
        """End it. What its client receives is the caller's to emit."""
        del self._inflight[record.request.key]
        if record.held_since is not None:
            self._held.remove(record.request)
            self._admission.left(record.request, now)
        self._attempts.leave(record, now)
        record.end()

    def fail(
        self,
        record: RequestRecord,
        now: float,
        fault: Fault,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        """End it with an error, or refuse it if it is a peer's."""
        handed_over, replica = record.is_handed_over, record.replica
        held_since = record.held_since
        self.end(record, now)
        if (inbox := record.request.answer_inbox) is not None:
            if handed_over and replica is not None:
                self._effects.append(fx.StopForwarded(inbox, replica))
                self._effects.append(fx.TellLost(inbox, replica))
                return
            self._forwarded_queue.leave(record.request)
            why = Refusal.DRAINING if fault is Fault.DRAINING else Refusal.NO_REPLICA
            self.refuse(record.request, inbox, why, now)
        else:
            key = record.request.key
            self._effects.append(fx.Fail(key, fault, message, retry_after_s, held_since))

    def drained(self, records: Iterable[RequestRecord], now: float) -> None:
        """End these because this router shuts down; their attempts are cancelled."""
        for record in list(records):
            if record.held_since is None:
                self._attempts.cancel(record)
            self.fail(record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)

    def refuse(self, request: Request, inbox: str, why: Refusal, now: float) -> None:
        """Refuse a peer's request, placed or held; `inbox`: of the peer's router."""
        self._effects.append(fx.RefusePeer(request.key, inbox, why, self._fresh(now)))

    def hand_back(self, record: RequestRecord, inbox: str, now: float) -> None:
        """Let the peer place its request elsewhere, which was held here; `inbox`: of its router."""
        self.end(record, now)
        self._forwarded_queue.leave(record.request)
        self.refuse(record.request, inbox, Refusal.ELSEWHERE, now)

    def end_copy(self, record: RequestRecord, now: float) -> bool:
        """End the copy of a request, which neither waits nor is tried again; False for others."""
        if record.request.shadow:
            self.fail(record, now, Fault.SATURATED, "a copy does not wait")
        return record.request.shadow

    def make_room(self, record: RequestRecord, place: PlacementResult, now: float) -> bool:
        """Have room in the hold queue, by shedding another request for it if it is full; False if
        this one was shed."""
        request = record.request
        if not self._held.is_full_for(request):
            return True
        last = self._held.gives_way(request)
        if last is None:
            self.shed(record, place, f"{place.reason}, and the hold queue is full", now)
            return False
        is_same = work_name(last.model) == work_name(request.model)
        goes_before = request.priority if is_same else f"a request for {request.model}"
        why = f"the hold queue is full, and {goes_before} goes before"
        self.shed(self._inflight[last.key], None, why, now)
        return True

    def shed_if_too_late(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> bool:
        """Shed it if it would miss its objective or, without one, wait too long; whether it was."""
        late = self._admission.late(record, place, now)
        why = late or self._admission.delay.too_long(record, place, now)
        if why is None:
            return False
        joins = place is not None and place.target is None and record.held_since is None
        placed = f"; {place.reason}" if joins and place is not None else ""
        self.shed(record, place, f"{why}{placed}", now, late)
        return True

    def shed(
        self,
        record: RequestRecord,
        place: PlacementResult | None,
        why: str,
        now: float,
        late: LateFirstToken | None = None,
    ) -> None:
        """Refuse it with its receipt and a time to retry after."""
        self._give_up(record, place, why, now)
        retry_after_s = self._admission.retry_after_s(record.request, late, now)
        self.fail(record, now, Fault.SATURATED, f"no room in time: {why}", retry_after_s)

    def unserved(self, record: RequestRecord, why: str, now: float) -> None:
        """Refuse it with its receipt: no place that may serve it is there."""
        self._give_up(record, None, why, now)
        self.fail(record, now, Fault.NO_REPLICA, why, RETRY_AFTER_S_MAX)

    def _give_up(
        self, record: RequestRecord, place: PlacementResult | None, why: str, now: float
    ) -> None:
        """Emit its last receipt."""
        request = record.request
        last = place or record.place or self._placer.held(request, why)
        shed = last._replace(placement=Placement.SHED, target=None, prefill=None, reason=why)
        attempt, held_s = max(1, record.attempt), record.waited_s(now)
        self._attempts.decided(request, shed, attempt=attempt, held_s=held_s)
