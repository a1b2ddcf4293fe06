"""An onlooker with books of its own: what no router may do, whatever happens to it.

It sees each event and the effects that answered it, keeps its own picture of the fleet from
heartbeats and digests alone, and asserts after every step. Nothing in it asks the core what it
thinks, but for the lengths of its tables.
"""

from dataclasses import dataclass, field
from random import Random

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, find_maker
from mesh.core.requests.hold_queue import effective_arrival
from mesh.core.router import RouterCore
from schemas.decision import Placement
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat, ReplicaState, longer_s
from tests.mesh.core.build import ROUTER, US

POLICIES_USED = {name: find_maker(name)(RouterSettings(), Random(0)) for name in POLICIES}
JOINT = [name for name, policy in POLICIES_USED.items() if policy.joint]  # may prefer a peer
JUDGES = [name for name, policy in POLICIES_USED.items() if policy.judges_load]  # or the busy

CHOOSY = [*JUDGES, "batch-aware"]  # a request may wait by choice while another one goes


@dataclass
class Seen:
    """A replica's or a peer's last word."""

    said: Heartbeat | Digest
    at: float
    rests: bool = False
    sent: dict[int, float] = field(default_factory=dict)  # hand-offs without a heartbeat since
    silent_from: float = 0.0  # of a replica: it may be silent until then


@dataclass
class Case:
    """A client's request."""

    request: Request
    attempt: int = 0
    live: bool = False
    started: bool = False
    place: str | None = None
    handoff: int | None = None
    placed: bool = False  # a peer said where
    heard: bool = False  # anything
    failed_by: set[str] = field(default_factory=set)
    ended_by: str | None = None


class Ledger:
    """Watches one router of region us."""

    def __init__(self, core: RouterCore, settings: RouterSettings) -> None:
        self.core = core
        self.settings = settings
        self.cases: dict[int, Case] = {}
        self.foreign: dict[int, Request] = {}  # peers' requests that are neither placed nor refused
        self.replicas: dict[ReplicaId, Seen] = {}
        self.peers: dict[tuple[RegionId, RouterId], Seen] = {}
        self.heard_at = float("-inf")  # any replica
        self.away_since: float | None = None  # the bus

    def watch(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Feed the router one event and check its answer."""
        stale = self._is_stale(event)
        self._note(event, now)
        effects = [*self.core.handle(event, now), *self.core.finish()]
        if stale:
            assert effects == [], f"{event} is of an attempt that is over, got {effects}"
        before: fx.Effect | None = None
        for effect in effects:
            self._check(effect, before, event, now)
            if not isinstance(effect, fx.PublishToSiblings):  # a placement is said as it is made
                before = effect
        self._check_tables(event)
        return effects

    def live(self, key: int) -> Case | None:
        """The case, if an attempt of it is under way."""
        case = self.cases.get(key)
        return case if case is not None and case.live else None

    # Events.

    def _is_stale(self, event: ev.Event) -> bool:
        if not isinstance(event, ATTEMPT_EVENTS):
            return False
        case = self.live(event.key)
        return case is None or case.attempt != event.attempt

    def _note(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.RequestArrived) and event.request.answer_inbox is None:
            self.cases[event.request.key] = Case(event.request)
        elif isinstance(event, ev.RequestArrived):
            self.foreign[event.request.key] = event.request
        elif isinstance(event, ev.HeartbeatSeen):
            self._note_heartbeat(event.heartbeat, now)
            until = now + longer_s(event.heartbeat.next_within_s)
            self.heard_at = max(self.heard_at, until)
        elif isinstance(event, ev.DigestSeen):
            self.peers[event.digest.region, event.digest.router] = Seen(event.digest, now)
        elif isinstance(event, ev.ClientGone) and event.key in self.cases:
            self._end(self.cases[event.key], "gone", once=False)
        elif isinstance(event, ATTEMPT_EVENTS) and not self._is_stale(event):
            self._note_attempt(event, self.cases[event.key])
        else:
            self._note_time(event, now)

    def _note_time(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.BusLost) and self.away_since is None:
            self.away_since = now
        elif isinstance(event, ev.BusReturned):
            self.away_since = None
        elif isinstance(event, ev.Tick):
            kept_s = self.settings.handoff_s_max
            if self._is_blind(now) or self.is_away(now):
                kept_s = self.settings.heartbeat_blind_s
            for seen in self.replicas.values():
                limit = now - kept_s
                seen.sent = {n: at for n, at in seen.sent.items() if at >= limit}

    def _note_heartbeat(self, beat: Heartbeat, now: float) -> None:
        old = self.replicas.get(beat.replica)
        if old is not None and (old.said.epoch != beat.epoch or beat.state is ReplicaState.GONE):
            for case in self.cases.values():
                if case.live and case.place == beat.replica:
                    case.live = False
            old = None
        taken = beat.taken.get(ROUTER, 0)
        sent = {} if old is None else {n: at for n, at in old.sent.items() if n > taken}
        until = now + longer_s(beat.next_within_s)
        self.replicas[beat.replica] = Seen(beat, now, sent=sent, silent_from=until)

    def _note_attempt(self, event: ev.Event, case: Case) -> None:
        case.heard |= isinstance(event, ev.AttemptProgressed)
        if isinstance(event, ev.PlacedByPeer):
            case.placed = True
        elif isinstance(event, ev.AnswerStarted):
            case.started = True
        elif isinstance(event, ev.AnswerEnded):
            self._end(case, "answered")
        elif isinstance(event, ev.AttemptFailed):
            assert case.place is not None
            case.failed_by.add(case.place)
            self._leave(case)
        elif isinstance(event, ev.AttemptRefused) and not case.started:
            if event.region == US:
                self.replicas[event.replica].rests = True
            else:
                for (region, _), seen in self.peers.items():
                    seen.rests |= region == event.region
            self._leave(case)

    def _leave(self, case: Case) -> None:
        case.live = False
        if case.place in self.replicas:
            self.replicas[case.place].sent.pop(case.handoff, None)

    def _end(self, case: Case, how: str, *, once: bool = True) -> None:
        if case.ended_by is None:
            case.ended_by = how
        else:
            assert not once, f"request {case.request.key}: {how} after {case.ended_by}"
        self._leave(case)

    # Effects.

    def _check(
        self, effect: fx.Effect, before: fx.Effect | None, event: ev.Event, now: float
    ) -> None:
        if isinstance(effect, fx.Dispatch):
            self._check_receipt(effect, before, Placement.LOCAL, effect.replica)
            self._check_replica(effect, event, now)
        elif isinstance(effect, fx.Forward):
            self._check_receipt(effect, before, Placement.PEER, effect.peer)
            self._check_peer(effect, now)
        elif isinstance(effect, fx.CancelAttempt):
            case = self.cases[effect.key]
            gone = isinstance(event, ev.ClientGone)
            assert (case.live or gone) and effect.attempt == case.attempt > 0
            waited_abroad = effect.region != US and case.heard and not (case.placed or case.started)
            if isinstance(event, ev.Tick) and case.place is not None and not waited_abroad:
                case.failed_by.add(case.place)  # its silence was too long
            self._leave(case)
        elif isinstance(effect, fx.Fail | fx.PassEngineError):
            if isinstance(effect, fx.Fail) and effect.fault is Fault.SATURATED:
                self._check_shed(effect, before)
            self._end(self.cases[effect.key], type(effect).__name__)
        elif isinstance(effect, fx.RefusePeer):
            assert self.foreign.pop(effect.key).answer_inbox == effect.answer_inbox
        elif isinstance(effect, fx.TellHeld):
            assert effect.answer_inbox in {guest.answer_inbox for guest in self.foreign.values()}
            assert self.settings.policy in JUDGES

    def _check_receipt(
        self, effect: fx.Dispatch | fx.Forward, before: fx.Effect | None, kind: Placement, name: str
    ) -> None:
        assert isinstance(before, fx.Decided) and before.key == effect.key
        decision = before.decision
        assert (decision.placement, decision.attempt) == (kind, effect.attempt)
        assert name in (decision.replica, decision.peer)
        assert decision.candidates[0].name == name and decision.candidates[0].available

    def _check_shed(self, effect: fx.Fail, before: fx.Effect | None) -> None:
        assert isinstance(before, fx.Decided) and before.key == effect.key
        assert before.decision.placement is Placement.SHED
        assert before.decision.replica is before.decision.peer is None
        assert effect.retry_after_s is not None and 1.0 <= effect.retry_after_s <= 60.0

    def _begin(self, key: int, attempt: int, place: str, handoff: int | None) -> Case:
        case = self.cases[key]
        assert case.ended_by is None, f"request {key} tried after {case.ended_by}"
        assert not case.live, f"request {key} has two attempts under way"
        assert not case.started, f"request {key} tried again after its first byte"
        assert attempt == case.attempt + 1
        assert place not in case.failed_by, f"request {key} back at {place}, which failed it"
        for other in self.cases.values():
            overtaken = (
                self.settings.policy not in CHOOSY
                and other.ended_by is None
                and not (other.live or other.failed_by)
                and not self._shuns(other)
                and other.request.model == case.request.model
                and other.request.residency == case.request.residency
                and effective_arrival(other.request) < effective_arrival(case.request)
            )
            assert not overtaken, f"request {key} overtook {other.request.key}"
        case.attempt, case.live, case.place, case.handoff = attempt, True, place, handoff
        case.placed = case.heard = False
        return case

    def _shuns(self, case: Case) -> bool:
        """Whether a peer refused it: then it asks others first, and they may be taken."""
        record = self.core.inflight.get(case.request.key)
        return record is not None and bool(record.refused_by)

    def _check_replica(self, effect: fx.Dispatch, event: ev.Event, now: float) -> None:
        seen = self.replicas[effect.replica]
        beat = seen.said
        assert isinstance(beat, Heartbeat)
        if effect.answer_inbox is not None:
            model = self.foreign.pop(effect.key).model
        else:
            assert not self.is_away(now)
            model = self._begin(effect.key, effect.attempt, effect.replica, effect.handoff)
            model = model.request.model
        assert beat.state is ReplicaState.READY and model in beat.models
        seen.sent[effect.handoff] = now
        silent_s, seen.silent_from = now - seen.silent_from, min(seen.silent_from, now)
        if not self._is_blind(now):
            assert not seen.rests
            assert silent_s <= self.settings.heartbeat_late_s
            if self.settings.policy in JUDGES:
                return
            assert not beat.full and not beat.pending
        if beat.batch_max is not None:
            assert len(seen.sent) <= max(1, beat.batch_max - beat.running)

    def _is_blind(self, now: float) -> bool:
        """Whether heartbeats are lost: more than one replica, and none sends any."""
        silent_s = now - self.heard_at
        late_s, blind_s = self.settings.heartbeat_late_s, self.settings.heartbeat_blind_s
        return len(list(self.core.replicas)) > 1 and late_s < silent_s <= blind_s

    def is_away(self, now: float) -> bool:
        """Whether the bus is, and not for so long that those behind it are lost."""
        blind_s = self.settings.heartbeat_blind_s
        return self.away_since is not None and now - self.away_since <= blind_s

    def _check_peer(self, effect: fx.Forward, now: float) -> None:
        assert not self.is_away(now)
        case = self._begin(effect.key, effect.attempt, effect.peer, None)
        known = [seen for (region, _), seen in self.peers.items() if region == effect.peer]
        fresh = [s for s in known if now - s.at <= self.settings.digest_lost_s and not s.rests]
        assert any(seen.said.accepting for seen in fresh)
        capacities = [seen.said.models.get(case.request.model) for seen in fresh]
        if self.settings.policy in JUDGES:
            assert any(capacity is not None and capacity.ready for capacity in capacities)
            return
        assert any(capacity is not None and capacity.free for capacity in capacities)
        assert all(seen.said.queue <= self.settings.peer_queue_max for seen in fresh)
        if self.settings.policy in JOINT or self.settings.ground.carried:
            return  # labels may lead away from home: their own onlooker knows when
        for replica, seen in self.replicas.items():
            idle = self.core.replicas.get(replica)
            if idle is not None and replica not in case.failed_by:
                why = self.core.replicas.unavailable_because(idle, case.request.model, now)
                failing = self.core.replicas.failing
                why = why or failing.bars(replica, case.request.model, now, has_failed=True)
                assert why is not None, f"forwarded although {seen.said.replica} is free"

    # Tables.

    def _check_tables(self, event: ev.Event) -> None:
        open_keys = {key for key, case in self.cases.items() if case.ended_by is None}
        assert open_keys | self.foreign.keys() == set(self.core.inflight)
        waiting = [case for key, case in self.cases.items() if key in open_keys and not case.live]
        keys = {case.request.key for case in waiting} | self.foreign.keys()
        assert len(self.core.held) == len(keys)
        assert {held.key for held in self.core.held} == keys
        new = sum(case.attempt == 0 for case in waiting) + len(self.foreign)
        assert new <= self.settings.hold_max
        for name, seen in self.replicas.items():
            replica = self.core.replicas.get(name)
            if replica is not None:
                assert len(replica.on_the_way) == len(seen.sent), f"{name} after {event}"


ATTEMPT_EVENTS = (
    ev.PlacedByPeer,
    ev.AttemptRefused,
    ev.AttemptProgressed,
    ev.AnswerStarted,
    ev.AttemptFailed,
    ev.AnswerEnded,
)
