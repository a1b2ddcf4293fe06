"""What a first token costs at each candidate, in seconds: the arithmetic of the `mesh` policy.

Everything here is read from heartbeats, digests and hand-offs, and stretched by what came of
earlier estimates (`mesh_lessons`). A value that nobody told is taken from the worst that is
known of the others, so that the least known candidate never looks like the best one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh.core.peers import Peer
from mesh.core.policies.base import Score, Spot, Target
from mesh.core.policies.mesh_holdings import NOTHING, Held
from mesh.core.policies.mesh_lessons import Lesson, Lessons
from mesh.core.replicas import Replica
from mesh.core.request import Request

# A second of our prefill holds up every decode that runs beside it by a second. Their users
# wait for one token in hundreds, we for the first: their second weighs less.
STALL_WEIGHT = 0.08
# Nobody has told a speed yet: about an 8B model on a recent data centre GPU.
S_PER_TOKEN_START = 1e-4
RTT_START_S = 0.5  # a peer that no ping has come back from


class Price(NamedTuple):
    """One candidate's. All in seconds; `seconds` is the sum, others' cost included."""

    seconds: float
    target: Target
    held: Held
    rtt_s: float
    queue_s: float
    prefill_s: float
    base_s: float
    memory_s: float
    others_s: float

    @property
    def ttft_s(self) -> float:
        """What our own client waits."""
        return self.seconds - self.others_s

    def score(self) -> Score:
        """For the receipt."""
        terms = {
            "rtt_s": self.rtt_s,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "base_s": self.base_s,
            "memory_s": self.memory_s,
            "others_s": self.others_s,
        }
        return Score(self.target, self.seconds, terms, self.held.blocks)


class Speed(NamedTuple):
    """A first token costs `base_s` and `s_per_token` for each token to compute."""

    s_per_token: float
    base_s: float


class Prices:
    """Prices of one request at many targets."""

    def __init__(self, lessons: Lessons) -> None:
        self._lessons = lessons

    def of(
        self, request: Request, targets: Sequence[Target], held: Mapping[Spot, Held], now: float
    ) -> list[Price]:
        """The price of each target; `held`: what each holds of the prompt."""
        speeds = [_told(target) for target in targets]
        fallback = _worst(speeds)
        prices = []
        for target, told in zip(targets, speeds, strict=True):
            has = held.get(Spot(target.kind, target.name), NOTHING)
            lesson = self._lessons.of(target)
            if target.replica is not None:
                price = self._local(request, target, has, told or fallback, lesson, now)
            else:
                price = self._remote(request, target, has, told or fallback, lesson, now)
            prices.append(price)
        return prices

    def _local(
        self,
        request: Request,
        target: Target,
        held: Held,
        speed: Speed,
        lesson: Lesson,
        now: float,
    ) -> Price:
        replica = target.replica
        assert replica is not None
        s_per_token = speed.s_per_token * lesson.stretch
        prefill_s = (request.prompt.tokens - held.tokens) * s_per_token
        queue_s = replica.prefill_queue_s(now, s_per_token)
        if queue_s is None:  # its agent doesn't say: count requests instead
            waiting = replica.load if replica.pending is None else replica.pending
            queue_s = waiting * self._lessons.prefill_tokens * s_per_token
        running = replica.heartbeat.running
        decodes = replica.load if running is None else running
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        memory_s = self._memory_s(request, replica, lesson)
        others_s = STALL_WEIGHT * decodes * prefill_s
        own_s = rtt_s + queue_s + prefill_s + speed.base_s + memory_s
        return Price(
            own_s + others_s,
            target,
            held,
            rtt_s,
            queue_s,
            prefill_s,
            speed.base_s,
            memory_s,
            others_s,
        )

    def _memory_s(self, request: Request, replica: Replica, lesson: Lesson) -> float:
        """Until running answers have given back the memory that this prompt lacks."""
        beat = replica.heartbeat
        capacity, used = beat.kv_capacity_tokens, beat.kv_used_ratio
        if not capacity or not used:
            return 0.0
        free = capacity * (1.0 - used) - replica.on_the_way.tokens
        lacking = request.prompt.tokens + self._lessons.output_tokens - free
        if lacking <= 0.0:
            return 0.0
        return lacking * lesson.residence_s / (capacity * used)

    def _remote(
        self,
        request: Request,
        target: Target,
        held: Held,
        speed: Speed,
        lesson: Lesson,
        now: float,
    ) -> Price:
        peer = target.peer
        assert peer is not None
        s_per_token = speed.s_per_token * lesson.stretch
        prefill_s = (request.prompt.tokens - held.tokens) * s_per_token
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        queue_s = self._peer_queue_s(request, peer, rtt_s, s_per_token, now)
        others_s = STALL_WEIGHT * peer.running(request.model) * prefill_s
        own_s = rtt_s + queue_s + prefill_s + speed.base_s
        return Price(
            own_s + others_s, target, held, rtt_s, queue_s, prefill_s, speed.base_s, 0.0, others_s
        )

    def _peer_queue_s(
        self, request: Request, peer: Peer, rtt_s: float, s_per_token: float, now: float
    ) -> float:
        """What the digest said, and what has come since: ours is counted, others' expected."""
        typical_s = self._lessons.prefill_tokens * s_per_token
        ready = max(1, peer.ready(request.model))
        told_s = peer.wait_s(request.model)
        held_s = peer.queue * typical_s / ready
        age_s = now - peer.seen_at + rtt_s / 2
        unseen = len(peer.forwarded_at) + peer.requests_per_s * age_s
        unseen_s = max(0.0, unseen - peer.free(request.model)) * typical_s / ready
        return (typical_s if told_s is None else told_s) + held_s + unseen_s


def _told(target: Target) -> Speed | None:
    """What its heartbeat or digest says of its speed."""
    if target.replica is not None:
        beat = target.replica.heartbeat
        slope, base_s = beat.prefill_s_per_token, beat.prefill_base_s
    else:
        assert target.peer is not None
        slope, base_s = target.peer.prefill
    return None if slope is None else Speed(slope, base_s or 0.0)


def _worst(speeds: Sequence[Speed | None]) -> Speed:
    """The slowest of those known."""
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return Speed(S_PER_TOKEN_START, 0.0)
    return Speed(max(s.s_per_token for s in known), max(s.base_s for s in known))
