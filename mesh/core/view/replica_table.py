"""The replicas that this router may place on: their heartbeats plus what it just sent.

Selective pushing (SkyWalker 3.3): a replica takes work while nothing is pending in it, that is,
while all it accepted fits its running batch. A heartbeat is up to 100 ms old, so every hand-off has
a rising number, heartbeats name the last one taken (`Heartbeat.taken`), and all later ones are *on
their way* (`replica.py`). They may fill the room that the heartbeat left (batch slots and KV
tokens), no more; otherwise all routers would overfill the emptiest replica until its next one.

What a heartbeat does not report is None and is never taken for zero: an engine that does not report
its batch size gets a small fixed number of hand-offs per heartbeat.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from random import Random
from typing import NamedTuple

from mesh.core.model import events as ev
from mesh.core.model.served_names import model_of, prefill_name
from mesh.core.model.settings import RouterSettings
from mesh.core.view.bus_status import REST_S, BusStatus, HeartbeatLossDetector
from mesh.core.view.outliers import FailingPlaces
from mesh.core.view.replica import ForwardedAnswer, Replica, is_adopted
from mesh.core.view.replica_sampling import ReplicaSampler
from mesh.core.view.slowness import SlowPlaces
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.settings import PushingKind
from schemas.state import Heartbeat, ModelCard, ReplicaState, longer_s

REPLICAS_MAX = 16_384  # adopted ones included; heartbeats of more are ignored
OTHER_MODEL = "other model"
ON_DEMAND_MAX = 4096  # models
DECODED_MAX = 1024  # models, a few heartbeats' more
ADAPTERS_BUSY = "its adapters are in use"
KEPT_S = 600.0  # a replica lost for longer has an empty cache, or another one's


class LostReplica(NamedTuple):
    """A replica that fell silent: if the same agent returns, its engine's cache may still count."""

    epoch: int
    lost_at: float


class HeartbeatChange(NamedTuple):
    """What a heartbeat changed. `orphans`: peers' inboxes whose answers are lost with the agent."""

    changed: bool  # what the digest contains: full, state or models
    restarted: bool  # another process, or gone: the work that it had is lost
    orphans: tuple[str, ...]


NO_CHANGE = HeartbeatChange(changed=False, restarted=False, orphans=())


class ReplicaTable:
    """All known replicas of the region, and of those that it has adopted.

    `adopted_by_peer`: a peer owns the region's own replicas now, so none of them is available here.
    """

    def __init__(self, me: RouterId, settings: RouterSettings) -> None:
        self._me = me
        self._settings = settings
        self.by_name: dict[ReplicaId, Replica] = {}
        self._sampler: ReplicaSampler[Replica] = ReplicaSampler()
        self._lost: dict[ReplicaId, LostReplica] = {}
        self.loss_detectors: dict[RegionId, HeartbeatLossDetector] = {}  # of each region seen
        self.bus = BusStatus(settings)
        self.failing, self.slow = FailingPlaces(), SlowPlaces()
        self.adopted_by_peer = False
        self._to_move = ev.MoveStreams()  # by operators
        # Adapters and models that some replica would have to load first, each by how many of them;
        # of these, models that engines load by themselves.
        self.unloaded: Counter[ModelId] = Counter()
        self.on_demand: set[ModelId] = set()
        # Rises when a replica comes or goes, begins to take work or ceases to, or has to speak
        # sooner.
        self.roll = 0
        # Replicas whose load has changed; the candidate cache clears it.
        self.changed: dict[ReplicaId, None] = {}
        self._last_handoff = 0  # over all replicas, as it outlives each of them
        # Models that some replica decodes for others, or did: hardly any fleet has one.
        self.decoded: frozenset[ModelId] = frozenset()

    def follow(self, settings: RouterSettings) -> None:
        """Count replicas as available by these from now on."""
        self._settings = settings
        self.roll += 1

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def get(self, name: ReplicaId) -> Replica | None:
        return self.by_name.get(name)

    def remembers(self, name: str) -> bool:
        """Whether it is known, or was until it fell silent a while ago."""
        return name in self.by_name or name in self._lost

    def see(self, beat: Heartbeat, now: float) -> HeartbeatChange:
        """Take in a heartbeat; one that arrives out of order is ignored."""
        detector = self.loss_detectors.get(beat.region)
        if detector is None:
            detector = self.loss_detectors[beat.region] = HeartbeatLossDetector(self._settings)
        detector.seen(now, longer_s(beat.next_within_s))
        known = self.by_name.get(beat.replica)
        if known is not None and _is_older(beat, known.heartbeat):
            return NO_CHANGE
        if known is not None and beat.epoch != known.heartbeat.epoch:
            self._remove(known)
            self._add(beat, now)
            return HeartbeatChange(changed=True, restarted=True, orphans=_inboxes(known))
        if known is None:
            before = self._lost.pop(beat.replica, None)
            another = before is not None and before.epoch != beat.epoch
            return HeartbeatChange(changed=self._add(beat, now), restarted=another, orphans=())
        if beat.state is ReplicaState.GONE:
            self._remove(known)
            return HeartbeatChange(changed=True, restarted=True, orphans=_inboxes(known))
        last = known.heartbeat
        known.update(beat, now)
        taken = beat.taken.get(self._me, 0)
        if taken <= self._last_handoff:  # a higher one was not ours: agents may name any
            known.on_the_way.confirm(taken)
        if last.models != beat.models:
            self._sampler.leave(beat.replica, last.models)
            self._sampler.enter(beat.replica, beat.models, known)
            known.is_idle = False
        self._count_unloaded(last, -1)
        self._count_unloaded(beat, 1)
        is_other = last.state is not beat.state or last.models != beat.models
        is_other = is_other or last.outstanding_max != beat.outstanding_max or last.kv != beat.kv
        if is_other or last.adapters_busy != beat.adapters_busy:
            self.roll += 1
            self._note_decoded(beat)
        self._settle(known)
        inside = beat.outstanding + beat.offline_waiting + beat.offline_running
        if not inside and not known.on_the_way:
            known.relayed.clear()
        changed = is_other or last.full != beat.full
        return HeartbeatChange(changed=changed, restarted=False, orphans=())

    def _add(self, beat: Heartbeat, now: float) -> bool:
        known = len(self.by_name) + len(self._lost)
        if beat.state is ReplicaState.GONE or known >= REPLICAS_MAX:
            return False
        self._note_decoded(beat)
        self._forget_answers(beat.replica)
        self.by_name[beat.replica] = replica = Replica(beat, now)
        self.roll += 1
        self.loss_detectors[beat.region].known += 1
        self._sampler.enter(beat.replica, beat.models, replica)
        self._count_unloaded(beat, 1)
        self._settle(replica)
        return True

    def _note_decoded(self, beat: Heartbeat) -> None:
        if beat.kv is not None and len(self.decoded) < DECODED_MAX:
            self.decoded = self.decoded.union(beat.kv.models)

    def note_on_demand(self, beat: Heartbeat) -> None:
        """Note the models that its engine itself would load for a request: no adapters."""
        if len(self.on_demand) < ON_DEMAND_MAX:
            self.on_demand.update(name for name in beat.loadable if name in beat.models)

    def _count_unloaded(self, beat: Heartbeat, by: int) -> None:
        if not (beat.loadable or beat.loading):
            return
        for name in (*beat.loadable, *beat.loading):
            self.unloaded[name] += by
            if not self.unloaded[name]:
                del self.unloaded[name]

    def _remove(self, replica: Replica) -> None:
        beat = replica.heartbeat
        del self.by_name[beat.replica]
        self.loss_detectors[beat.region].known -= 1
        self._sampler.leave(beat.replica, beat.models)
        self._count_unloaded(beat, -1)
        self.changed.pop(beat.replica, None)
        self._forget_answers(beat.replica)
        self.roll += 1

    def told(self, beat: Heartbeat, now: float) -> None:
        """What its agent says of answers, if it is the last heartbeat of one that is here."""
        if beat.results is None and not self.failing.places:
            return
        known = self.by_name.get(beat.replica)
        has_one_model = len(set(map(model_of, beat.models))) == 1
        if known is not None and known.heartbeat is beat and has_one_model:
            self.failing.told(beat.replica, beat.results, now)

    def avoided(self, now: float) -> dict[str, str]:
        """Those that get less work than others, or none for now, by their answers, with why."""
        if not (self.failing.places or self.slow.by_key or self.slow.gone):
            return {}
        return self.slow.words() | self.failing.avoided(now)

    def _forget_answers(self, name: ReplicaId) -> None:
        self.failing.forget(name)
        self.slow.forget(name)

    def _settle(self, replica: Replica) -> None:
        """Note its load, and whether it takes more, where they have changed."""
        beat, on_the_way = replica.heartbeat, replica.on_the_way.count
        load = replica.inside + on_the_way
        if load != replica.settled_load:  # most heartbeats leave it as it was
            replica.settled_load = load
            self.changed[beat.replica] = None
        takes = on_the_way < replica.room and replica.refused_at is None
        if takes is not replica.takes:
            replica.takes = takes
            self.roll += 1
        is_idle = not load and beat.state is ReplicaState.READY
        if is_idle is not replica.is_idle:
            replica.is_idle = is_idle
            self._sampler.settle(beat.replica, beat.models, is_idle=is_idle)

    def remove(self, name: ReplicaId) -> None:
        """Drop a replica that was handed back, without counting it as lost."""
        if (replica := self.by_name.get(name)) is not None:
            self._remove(replica)
        self._lost.pop(name, None)

    def names_of(self, region: RegionId) -> list[ReplicaId]:
        found = self.by_name.items()
        return [name for name, replica in found if replica.heartbeat.region == region]

    def hand_off(self, name: ReplicaId, tokens: int, prefill_tokens: int, now: float) -> int:
        """Count work that is being sent to a replica; returns the hand-off's number.

        `tokens`: of its prompt; `prefill_tokens`: of those, estimated to be computed.
        """
        self._last_handoff += 1
        replica = self.by_name[name]
        if replica.silent_from > now:
            replica.silent_from = now
            self.roll += 1
        replica.on_the_way.add(self._last_handoff, tokens, prefill_tokens, now)
        self._settle(replica)
        return self._last_handoff

    def reserve(self, name: ReplicaId, tokens: int) -> int:
        """Keep room on a decode replica while its prompt is computed elsewhere; `over` with the
        number that this returns gives it back."""
        self._last_handoff += 1
        replica = self.by_name[name]
        replica.on_the_way.reserve(self._last_handoff, tokens)
        self._settle(replica)
        return self._last_handoff

    def began(self, name: ReplicaId, number: int) -> None:
        replica = self.by_name.get(name)
        if replica is not None:
            replica.on_the_way.began(number)

    def over(self, name: ReplicaId, number: int) -> None:
        replica = self.by_name.get(name)
        if replica is not None:
            replica.on_the_way.over(number)
            self._settle(replica)

    def refused(self, name: ReplicaId, now: float) -> None:
        """Its agent refused work: it is not available until its next heartbeat."""
        replica = self.by_name.get(name)
        if replica is not None:
            replica.refused_at = now
            self._settle(replica)

    def relay(self, name: ReplicaId, inbox: str, deadline: float) -> None:
        """Note a peer's inbox that this replica answers to, until `deadline` at most."""
        replica = self.by_name[name]
        replica.relayed.append(ForwardedAnswer(inbox, deadline))
        while len(replica.relayed) > self._settings.relayed_max:
            replica.relayed.popleft()

    def expire(self, now: float) -> list[tuple[ReplicaId, tuple[str, ...]]]:
        """Drop what is overdue. Returns the replicas lost now, with peers' inboxes."""
        kept_s = self._settings.handoff_s_max
        kept_blind_s = max(kept_s, self._settings.heartbeat_blind_s)
        lost_s = self._settings.heartbeat_lost_s
        if self.failing.places:
            self.failing.expire(now)
        self.slow.judge(self.by_name, now)
        lost = []
        for name, replica in list(self.by_name.items()):
            if replica.on_the_way.count:
                is_blind = self.is_blind_to(replica, now)
                replica.on_the_way.expire(now - (kept_blind_s if is_blind else kept_s))
                self._settle(replica)
            while replica.relayed and replica.relayed[0].deadline <= now:
                replica.relayed.popleft()
            if now - replica.silent_from > lost_s and self.is_lost(replica, now):
                lost.append((name, _inboxes(replica)))
                self._remove(replica)
                self._lost[name] = LostReplica(replica.heartbeat.epoch, now)
        return lost

    def forgotten(self, now: float) -> list[ReplicaId]:
        """Replicas that have been lost for KEPT_S: their caches count no more."""
        gone = [name for name, lost in self._lost.items() if now - lost.lost_at > KEPT_S]
        for name in gone:
            del self._lost[name]
        return gone

    def is_lost(self, replica: Replica, now: float) -> bool:
        """Whether its heartbeats have been missing for too long."""
        since = self.loss_detectors[replica.heartbeat.region].since(replica.silent_from)
        is_silent = self.bus.silent_s(since, now) > self._settings.heartbeat_lost_s
        return is_silent and not self.is_blind_to(replica, now)

    def is_blind_to(self, replica: Replica, now: float) -> bool:
        """Whether its region's heartbeats are lost rather than replicas."""
        return self.bus.is_away(now) or self.loss_detectors[replica.heartbeat.region].is_blind(now)

    def serves(self, replica: Replica, model: ModelId) -> bool:
        beat = replica.heartbeat
        return beat.state is ReplicaState.READY and model in beat.models

    def has_ready(self, model: ModelId, avoid: Collection[str] = ()) -> bool:
        """Whether some replica that is not in `avoid` serves it, full or not."""
        return any(
            self.serves(replica, model) and replica.heartbeat.replica not in avoid
            for replica in self.serving(model)
        )

    def may_answer(self, replica: Replica, model: ModelId, avoid: Collection[str]) -> bool:
        """Whether it serves it, whole or with a prefill replica; neither is in `avoid`."""
        beat = replica.heartbeat
        if beat.replica in avoid or not self.serves(replica, model):
            return False
        if (kv := beat.kv) is None or kv.whole or model not in kv.models:
            return True
        return self.has_ready(prefill_name(model, kv.kind), avoid)

    def card(self, model: ModelId) -> ModelCard | None:
        """The card of the model, from some replica that serves it."""
        cards = (replica.cards.get(model) for replica in self.serving(model))
        return next((card for card in cards if card is not None), None)

    def models(self) -> tuple[ModelId, ...]:
        """Models that some replica has, ready or not."""
        return tuple(self._sampler.models())

    def serving(self, model: ModelId) -> Collection[Replica]:
        """Replicas that have this model, whatever their state."""
        return self._sampler.replicas_of(model).members.values()

    def move(self, order: ev.MoveStreams) -> None:
        """Operators want these empty from now on."""
        self._to_move = order

    @property
    def moving(self) -> tuple[ReplicaId, ...]:
        """Of those that operators want empty: own ones that are drained and have requests."""
        order = self._to_move
        if not (order.everywhere or order.replicas):
            return ()
        return tuple(
            name
            for name, replica in self.by_name.items()
            if (order.everywhere or name in order.replicas)
            and not is_adopted(name)
            and replica.heartbeat.state is ReplicaState.DRAINING
            and replica.heartbeat.outstanding
        )

    def drains(self, model: ModelId) -> bool:
        """Whether this model's replicas all drain, as long as their operator wants."""
        states = {one.heartbeat.state for one in self.serving(model)}
        return states == {ReplicaState.DRAINING}

    def sample_serving(self, model: ModelId, first: Iterable[str], dice: Random) -> list[Replica]:
        """Some of them: those of `first`, idle ones, random ones; none twice."""
        return self._sampler.replicas_of(model).some(first, dice)

    def partition_available(
        self,
        model: ModelId,
        now: float,
        *,
        busy_too: bool = False,
        among: Iterable[Replica] | None = None,
    ) -> tuple[list[Replica], list[tuple[Replica, str]]]:
        """The available replicas, and the others with the reason of `unavailable_because`.

        `among`: these, else all. It runs for many replicas per request, so the most frequent
        case comes first.
        """
        free, others, is_ours = [], [], not self.adopted_by_peer
        late_s, kind = self._settings.heartbeat_late_s, self._settings.pushing.kind
        any_load = is_ours and (busy_too or kind is PushingKind.BLIND)
        until_pending = is_ours and kind is PushingKind.PENDING
        for replica in self.by_name.values() if among is None else among:
            beat = replica.heartbeat
            if replica.takes and now - replica.silent_from <= late_s and model in beat.models:
                sent = replica.on_the_way.count
                if any_load or (until_pending and not (beat.full or beat.pending or sent)):
                    free.append(replica)
                    continue
            why = self.unavailable_because(replica, model, now, busy_too=busy_too)
            if why is None:
                free.append(replica)
            else:
                others.append((replica, why))
        if model in self.unloaded:
            others += [(one, ADAPTERS_BUSY) for one in free if _has_no_room(one.heartbeat, model)]
            free = [one for one in free if not _has_no_room(one.heartbeat, model)]
        return free, others

    def unavailable_because(
        self, replica: Replica, model: ModelId, now: float, *, busy_too: bool = False
    ) -> str | None:
        """Why this replica may not be given work now, or None if it may.

        `busy_too`: the policy judges by itself what is too busy. That needs an agent that takes
        work which must queue; one that doesn't report how much it takes is too old for it.
        """
        beat = replica.heartbeat
        if beat.state is not ReplicaState.READY:
            return beat.state.value
        if model not in beat.models:
            return OTHER_MODEL
        if now - replica.silent_from > self._settings.heartbeat_late_s:
            is_blind = self.is_blind_to(replica, now)
            return self._blind_because(replica, now) if is_blind else "heartbeat late"
        if replica.refused_at is not None:
            return self.failing.words(beat.replica, model) or "full"
        if self.adopted_by_peer and not is_adopted(beat.replica):
            return "adopted by a peer"
        pushing = self._settings.pushing
        if beat.outstanding_max is not None and (
            beat.outstanding + len(replica.on_the_way) >= beat.outstanding_max
        ):
            return "full"
        if pushing.kind is PushingKind.BLIND or (busy_too and beat.outstanding_max is not None):
            return None
        if pushing.kind is PushingKind.OUTSTANDING:
            return "outstanding" if replica.load >= pushing.outstanding_max else None
        if beat.full:
            return "full"
        return "pending" if beat.pending else self._no_room_because(replica)

    def _blind_because(self, replica: Replica, now: float) -> str | None:
        """By what is known without heartbeats: what was sent, and its refusals."""
        if replica.refused_at is not None and now - replica.refused_at <= REST_S:
            return "refused"
        return self._no_room_because(replica)

    def _no_room_because(self, replica: Replica) -> str | None:
        sent = replica.on_the_way
        if not sent:
            return None
        beat = replica.heartbeat
        if beat.batch_max is None or beat.running is None:
            no_slot = sent.waiting >= self._settings.handoffs_blind_max
        else:
            no_slot = len(sent) >= max(1, beat.batch_max - beat.running)
        if no_slot:
            return "handed off"
        if beat.kv_capacity_tokens is not None and beat.kv_used_ratio is not None:
            free_tokens = beat.kv_capacity_tokens * (1.0 - beat.kv_used_ratio)
            if sent.tokens >= free_tokens:
                return "handed off"
        return None


def _has_no_room(beat: Heartbeat, adapter: ModelId) -> bool:
    return beat.adapters_busy and adapter in beat.loadable


def _inboxes(replica: Replica) -> tuple[str, ...]:
    return tuple(answer.inbox for answer in replica.relayed)


def _is_older(beat: Heartbeat, than: Heartbeat) -> bool:
    return (beat.epoch, beat.seq) <= (than.epoch, than.seq)
