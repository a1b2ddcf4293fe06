"""One router's requests, from clients and peers: every event in, every effect performed.

`feed` lets the core decide about one event and performs what it says, in order; an event that
comes up meanwhile waits until that is done. Attempts of one request follow each other, and each
has an inbox of its own: what arrives in the inbox of an earlier one is dropped, and its sender gets
a cancel.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.answer import AnswerReceiver, Held
from mesh.session.bus_receiver import BusReceiver
from mesh.session.headers import ingress_headers, passed_on_headers, work_headers
from mesh.session.prefill_stages import opened, outcome, room_of, stage_headers
from mesh.session.record import (
    STEPS_MAX,
    Bus,
    Decide,
    Failure,
    Home,
    Identifiers,
    Observer,
    OpenRequest,
    Step,
)
from mesh.session.silent_streams import SilentStreams
from schemas import exchange, subjects
from schemas.exchange import Refusal
from schemas.held import HASHES_MAX, PromptBlocks
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId
from schemas.kv_transfer import KvRole
from schemas.parcels import parcelled
from schemas.state import Digest, encode_state

DIGEST_CHARS_MAX = 32 * 1024  # in a refusal: half of what a control message may have


def nothing_more(record: OpenRequest) -> None:
    """The `grew` of a host that keeps nothing of what is said."""


class Session:
    """One router's, from its start to its end."""

    def __init__(
        self,
        home: Home,
        *,
        decide: Decide,
        clock: Callable[[], float],
        bus: Bus,
        ids: Identifiers,
        observer: Observer | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        """`keep_alive_s`: how long a client's stream may be silent; 0: as long as it is. The host
        adds to `performers` those of effects that concern no request (digests, gossip,
        leases), and may set `grew`, which is called where a credit is due for a client's answer,
        and `fed`, which is called after each event."""
        self.region, self.router, _ = home
        self._decide, self.clock = decide, clock
        self._bus = bus
        self._secret, self.keys = ids
        self._observer = observer or Observer()
        self._silent = SilentStreams(keep_alive_s)
        self._records: dict[int, OpenRequest] = {}  # clients', by key
        self._forwarded: dict[int, OpenRequest] = {}  # peers', until they are placed or refused
        self._prefills: dict[int, OpenRequest] = {}  # stages on prefill replicas, by key
        self._streams: dict[str, OpenRequest] = {}  # by the inbox of the attempt under way
        # What they begin with.
        self._inboxes = subjects.inbox(self.region, self.router, parcelled(""))
        self._events: deque[object] = deque()
        self._is_feeding = False
        self.answers = BusReceiver(
            home, self._streams, bus, clock, self._observer, self.feed, self._attempt_over
        )
        self.performers = self._performers()
        self.grew: Callable[[Any], object] = nothing_more
        self.fed: Callable[[], object] | None = None

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        bus = self._bus
        return {
            fx.Decided: self._decided,
            fx.Dispatch: self._dispatch,
            fx.DispatchPrefill: self._dispatch_prefill,
            fx.CancelPrefill: self._cancel_prefill,
            fx.Forward: self._forward,
            fx.Retargeted: lambda effect: self._records[effect.key].retarget(effect.model),
            fx.CancelAttempt: self._cancel,
            fx.Fail: self._fail,
            fx.PassEngineError: self._pass_engine_error,
            fx.RefusePeer: self._refuse_peer,
            fx.TellHeld: lambda effect: bus.answer_peer(effect.answer_inbox, Held(effect.hops)),
            fx.TellLost: self._tell_lost,
            fx.StopForwarded: self._stop_forwarded,
            fx.RequestAgain: lambda effect: self.answers.link_returned(effect.region),
        }

    def __len__(self) -> int:
        """Clients that have not been answered to the end."""
        return len(self._records)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._records.values()))

    @property
    def from_peers(self) -> tuple[OpenRequest, ...]:
        """Peers' requests that are neither placed nor refused."""
        return tuple(self._forwarded.values())

    @property
    def forwarded(self) -> int:
        """Peers' requests that are neither placed nor refused."""
        return len(self._forwarded)

    def buffered_bytes(self) -> int:
        """Bytes of answers that wait for their clients."""
        answers = (record.answer for record in self._records.values())
        return sum(answer.buffered_bytes for answer in answers if answer is not None)

    def feed(self, event: object) -> None:
        """Let the core decide about one event, and perform its effects."""
        events = self._events
        events.append(event)  # behind what an exception may have left
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            performers = self.performers
            while events:
                for effect in self._decide(events.popleft(), self.clock()):
                    performers[type(effect)](effect)
        finally:
            self._is_feeding = False
        if self.fed is not None:
            self.fed()

    # Clients and peers.

    def admit(self, record: OpenRequest) -> None:
        self._records[record.request.key] = record
        self._silent.opened(record, self.clock())
        self.feed(ev.RequestArrived(record.request))

    def open(self, record: OpenRequest) -> None:
        """The core itself begins this request: an attempt of a batch job's line."""
        self._records[record.request.key] = record

    def admit_forwarded(self, record: OpenRequest) -> None:
        self._forwarded[record.request.key] = record
        self.feed(ev.RequestArrived(record.request))

    def record(self, key: int) -> OpenRequest | None:
        """A client's request that is open."""
        return self._records.get(key)

    def is_open(self, record: OpenRequest) -> bool:
        return self._records.get(record.request.key) is record

    def started(self, record: OpenRequest) -> None:
        """Its client is being sent a first byte: from now on it is placed again only to go on from
        what was said."""
        answer, request = record.answer, record.request
        assert answer is not None
        may_continue, why_not = record.said is not None, record.why_not
        shows_ttft = answer.shows_ttft
        self.feed(ev.AnswerStarted(request.key, answer.attempt, shows_ttft, may_continue, why_not))
        if not may_continue:
            self.forget(record)

    def passed(self, record: OpenRequest) -> None:
        """Bytes have left for the client: the agent may send more."""
        if record.answer is not None and self.answers.give_credit(record.answer):
            self.grew(record)

    def close(self, record: OpenRequest) -> bool:
        """It is over, and nothing is told of it. False if it was before."""
        if self._records.pop(record.request.key, None) is None:
            return False
        self.forget(record)
        self.stop_listening(record)
        return True

    def end(
        self, record: OpenRequest, outcome: str, status: int, error_type: str = "", detail: str = ""
    ) -> bool:
        """It is over, in this way (see `Ending`). False if it was before."""
        if not self.close(record):
            return False
        self._ended(record, outcome, status, error_type, detail)
        return True

    def _ended(
        self, record: OpenRequest, outcome: str, status: int, error_type: str, detail: str
    ) -> None:
        ending = record.ending_at(self.clock(), outcome, status, error_type, detail)
        record.ending = ending
        self._observer.request_ended(record, ending)
        if (cost := ending.cost).is_output_estimated:
            request = record.request
            self.feed(ev.CostEstimated(request.key, request.model, cost.uncached, cost.output))
        spans = record.spans
        if spans.is_traced and (error_type or ending.ended_at - ending.arrived_at >= spans.quiet_s):
            spans.end(record, ending)

    def forget(self, record: OpenRequest) -> None:
        """It won't be placed again."""
        if record.kept_bytes:
            self._observer.body_dropped(record.kept_bytes)
            record.kept_bytes, record.body = 0, b""

    def stop_listening(self, record: OpenRequest) -> None:
        """Nothing more of its attempt is wanted."""
        if record.answer is not None:
            self._streams.pop(record.answer.inbox, None)
            record.answer.is_wanted = False
        record.direct_writer = None  # it would take frames of the next attempt for this one's

    def _attempt_over(self, record: OpenRequest, answer: AnswerReceiver, event: ev.Event) -> None:
        """Nothing more of this attempt is wanted."""
        self.stop_listening(record)
        if record.stage_of is not None:
            self._prefill_over(record, record.stage_of, answer, event)
            return
        if isinstance(event, ev.AnswerEnded):
            if answer.end is not None:
                self._observer.served(record, answer.end)
        elif isinstance(event, ev.AttemptRefused):
            self._observer.refused(record, event)
            if answer.fresh is not None and answer.fresh.region == answer.asked:
                self.feed(ev.DigestSeen(answer.fresh))
        elif isinstance(event, ev.AttemptFailed):
            record.engine_error = answer.engine_error or record.engine_error
            self._observer.attempt_failed(record, event)
        self.feed(event)

    # Time and the bus.

    def tick(self) -> None:
        """At least ten times a second: time has passed."""
        self.feed(ev.Tick())
        self.answers.tick()
        for record in self._silent.due(self._records, self.clock()):
            record.fell_silent()

    def bus_returned(self) -> None:
        """The bus was away: of answers that have begun, what came since may be lost."""
        self.feed(ev.BusReturned())
        self.answers.bus_returned()

    # Attempts: effects of the core.

    def _decided(self, effect: fx.Decided) -> None:
        record = self._records.get(effect.key) or self._forwarded.get(effect.key)
        if record is None:
            return
        record.decided = effect
        self._observer.decided(record, effect)

    def _dispatch(self, effect: fx.Dispatch) -> None:
        region, now = effect.region or self.region, self.clock()
        if effect.answer_inbox is not None:
            self._dispatch_forwarded(effect, effect.answer_inbox, region, now)
            return
        self._observer.handed_out(effect.key, self.region)
        record = self._records[effect.key]
        answer = self._begin(record, effect.attempt)
        answer.region, answer.replica = region, effect.replica
        headers = work_headers(record, effect, self.region, self.router, now)
        if effect.pair is not None:
            headers |= stage_headers(KvRole.DECODE, effect.pair, record)
        if record.spans.is_traced:
            record.spans.dispatched(effect, headers)
        if not self._bus.send_work(record, region, effect.replica, answer.inbox, headers):
            self._not_sent(record, answer)
        elif effect.with_blocks:
            self._send_blocks(record, region, effect.replica, answer.inbox)

    def _dispatch_forwarded(
        self, effect: fx.Dispatch, inbox: str, region: RegionId, now: float
    ) -> None:
        """Hand a peer's request to the replica, and name the replica to the asking router."""
        record = self._forwarded.pop(effect.key)
        headers = passed_on_headers(record, effect, self.region, self.router, now)
        if effect.pair is not None:
            headers |= stage_headers(KvRole.DECODE, effect.pair, record)
        if record.spans.is_traced:
            record.spans.dispatched(effect, headers)
        # Before the work, so that no frame of the agent's can arrive first and pass for ours.
        held_s = 0.0 if record.decision is None else record.decision.held_s
        self._bus.answer_peer(inbox, exchange.Placed(region, effect.replica, held_s))
        sent = self._bus.send_work(record, region, effect.replica, inbox, headers)
        if not sent:  # the asking router is to look elsewhere
            self.refuse(inbox, Refusal.FULL)
        elif effect.with_blocks:
            self._send_blocks(record, region, effect.replica, inbox)
        self._forwarded_over(record, None if sent else Refusal.FULL)

    def _dispatch_prefill(self, effect: fx.DispatchPrefill) -> None:
        """Send an attempt's prefill stage. What it answers to is this router's, whosever request
        it is."""
        work, now = effect.work, self.clock()
        whole = self._records.get(work.key) or self._forwarded[work.key]
        whole.kv_room, whole.kv_params = room_of(self._secret()), ""
        answer = AnswerReceiver(work.key, work.attempt, self._inbox(work.key, work.attempt))
        answer.region, answer.replica = self.region, work.replica
        stage = self._prefills[work.key] = opened(whole, answer)
        self._streams[answer.inbox] = stage
        headers_of = passed_on_headers if whole.received else work_headers
        headers = headers_of(stage, work, self.region, self.router, now)
        headers |= stage_headers(KvRole.PREFILL, effect.pair, whole)
        if whole.spans.is_traced:
            whole.spans.prefill_dispatched(work, headers)
        if not self._bus.send_work(stage, self.region, work.replica, answer.inbox, headers):
            self._attempt_over(stage, answer, _not_taken(answer))
        elif work.with_blocks:
            self._send_blocks(stage, self.region, work.replica, answer.inbox)

    def _prefill_over(
        self, stage: OpenRequest, whole: OpenRequest, answer: AnswerReceiver, event: ev.Event
    ) -> None:
        if self._prefills.get(answer.key) is stage:
            del self._prefills[answer.key]
        event = outcome(stage, answer, event)
        if whole.spans.is_traced:
            whole.spans.prefill_ended(answer.attempt, event)
        if isinstance(event, ev.AttemptRefused):
            self._observer.refused(whole, event)
        elif isinstance(event, ev.AttemptFailed):
            whole.engine_error = answer.engine_error or whole.engine_error
            self._observer.attempt_failed(whole, event)
        elif isinstance(event, ev.PrefillEnded):
            self._observer.prefill_ended(whole, event)
        self.feed(event)

    def _cancel_prefill(self, effect: fx.CancelPrefill) -> None:
        stage = self._prefills.pop(effect.key, None)
        if stage is not None and stage.answer is not None:
            self.stop_listening(stage)
            self.answers.cancel(self.region, effect.replica, stage.answer.inbox)
            if stage.stage_of is not None and stage.stage_of.spans.is_traced:
                stage.stage_of.spans.prefill_ended(stage.answer.attempt, None)

    def _send_blocks(
        self, record: OpenRequest, region: RegionId, replica: ReplicaId, inbox: str
    ) -> None:
        prompt = record.request.prompt
        if prompt.hashes:
            length = prompt.tokens / prompt.block_tokens
            blocks = PromptBlocks(inbox, length, prompt.hashes[:HASHES_MAX])
            self._bus.send_blocks(region, replica, blocks)

    def _forward(self, effect: fx.Forward) -> None:
        self._observer.handed_out(effect.key, effect.peer)
        record = self._records[effect.key]
        answer = self._begin(record, effect.attempt)
        answer.asked = effect.peer
        headers = ingress_headers(record, effect, self.region, self.clock())
        if record.spans.is_traced:
            record.spans.dispatched(effect, headers)
        if not self._bus.send_ingress(record, effect.peer, answer.inbox, headers):
            self._not_sent(record, answer)

    def _begin(self, record: OpenRequest, attempt: int) -> AnswerReceiver:
        """A new attempt of an open request, with an inbox of its own."""
        self.stop_listening(record)
        inbox = self._inbox(record.request.key, attempt)
        answer = record.answer = AnswerReceiver(record.request.key, attempt, inbox)
        answer.splice, record.direct_writer = record.splice, None
        answer.generates = record.request.answer_tokens != 0
        self._streams[inbox] = record
        return answer

    def _inbox(self, key: int, attempt: int) -> str:
        # A process that knows an inbox may answer there, cancel and credit: it must be secret.
        return f"{self._inboxes}{key:x}-{attempt}-{self._secret()}"

    def _not_sent(self, record: OpenRequest, answer: AnswerReceiver) -> None:
        failed = _not_taken(answer)
        self._observer.attempt_failed(record, failed)
        self.feed(failed)

    def _cancel(self, effect: fx.CancelAttempt) -> None:
        record = self._records.get(effect.key)
        if record is None or record.answer is None:
            return
        # A replica that is not known yet gets a cancel when its first frame comes.
        self.stop_listening(record)
        if effect.why and len(record.steps) < STEPS_MAX:
            moved = ev.AttemptFailed(effect.key, effect.attempt, effect.why)
            record.steps += (Step(self.clock(), moved),)
        if effect.replica is not None:
            # A peer may have placed it on a replica of a region that it has adopted.
            region = record.answer.region or effect.region
            self.answers.cancel(region, effect.replica, record.answer.inbox)

    def _fail(self, effect: fx.Fail) -> None:
        if effect.fault is Fault.RESIDENCY:
            self._observer.residency_refused("client")
        record = self._records.get(effect.key)
        if record is not None:
            record.failure = Failure(
                effect.fault, effect.message, effect.retry_after_s, effect.held_since
            )
            record.changed()

    def _pass_engine_error(self, effect: fx.PassEngineError) -> None:
        record = self._records.get(effect.key)
        if record is not None:
            record.pass_engine_error = True
            record.changed()

    # Peers' requests.

    def _refuse_peer(self, effect: fx.RefusePeer) -> None:
        """Refuse a peer's request; the asking router places it elsewhere."""
        record = self._forwarded.pop(effect.key)
        self.refuse(effect.answer_inbox, effect.reason, effect.fresh)
        if effect.reason is Refusal.RESIDENCY:
            self._observer.residency_refused("peer")
        self._forwarded_over(record, effect.reason)

    def _forwarded_over(self, record: OpenRequest, refusal: str | None) -> None:
        outcome, why = ("placed", "") if refusal is None else ("refused", refusal)
        self._ended(record, outcome, 0, why, why)
        self.forget(record)

    def refuse(self, inbox: str, reason: str, fresh: Digest | None = None) -> None:
        """Tell the router that hears that inbox that its request is not taken here."""
        state = "" if fresh is None else encode_state(fresh).decode()
        if len(state) > DIGEST_CHARS_MAX:
            state = ""  # the next digest has it
        refused = exchange.Refused(reason, self.region, "", -1, -1, state)
        self._bus.answer_peer(inbox, refused)

    def _tell_lost(self, effect: fx.TellLost) -> None:
        lost = exchange.Lost(effect.region or self.region, effect.replica)
        self._bus.answer_peer(effect.answer_inbox, lost)

    def _stop_forwarded(self, effect: fx.StopForwarded) -> None:
        """A peer's request whose prefill stage failed."""
        self._bus.send_cancel(self.region, effect.replica, effect.answer_inbox)


def _not_taken(answer: AnswerReceiver) -> ev.AttemptFailed:
    detail = "the bus does not take it"
    return ev.AttemptFailed(answer.key, answer.attempt, detail, blameless=True)
