"""What a first token costs at each candidate, in seconds: the arithmetic of the `mesh` policy.

Everything here is read from heartbeats, digests and hand-offs, at the speeds that were learned
from earlier answers (`mesh_lessons`). What nobody told is reckoned from what is known otherwise
(a queue from the requests in it), never taken for zero.
"""

# A second of our prefill holds up every decode that runs beside it by a second. Their users
# wait for one token in hundreds, we for the first: their second weighs less.
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh.core.peers import Peer
from mesh.core.policies.base import Score, Spot, Target
from mesh.core.policies.mesh_holdings import NOTHING, Held
from mesh.core.policies.mesh_lessons import Lessons
from mesh.core.replicas import Replica
from mesh.core.request import Request

STALL_WEIGHT = float(os.environ.get("M_W", "0.1"))
M_D = float(os.environ.get("M_D", "0.3"))
RTT_START_S = 0.5  # a peer that no ping has come back from


class Price(NamedTuple):
    """One candidate's. All in seconds; `seconds` is the sum, others' cost included."""

    seconds: float
    target: Target
    held: Held
    tokens: float  # to compute there before the first one comes, those queued included
    running: float
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


class Prices:
    """Prices of one request at many targets."""

    def __init__(self, lessons: Lessons) -> None:
        self._lessons = lessons

    def of(
        self, request: Request, targets: Sequence[Target], held: Mapping[Spot, Held], now: float
    ) -> list[Price]:
        """The price of each target; `held`: what each holds of the prompt."""
        prices = []
        for target in targets:
            has = held.get(Spot(target.kind, target.name), NOTHING)
            if target.replica is not None:
                prices.append(self._local(request, target, target.replica, has, now))
            elif target.peer is not None:
                prices.append(self._remote(request, target, target.peer, has, now))
        return prices

    def _local(
        self, request: Request, target: Target, replica: Replica, held: Held, now: float
    ) -> Price:
        speed, beat = self._lessons.speed(target), replica.heartbeat
        prefill_tokens = request.prompt.tokens - held.tokens
        queued = replica.prefill_queue_tokens(now, speed.s_per_token)
        if queued is None:  # its agent doesn't say: count requests instead
            waiting = replica.load if replica.pending is None else replica.pending
            queued = waiting * self._lessons.prefill_tokens
        running = replica.load if beat.running is None else beat.running
        prefill_s = prefill_tokens * speed.s_per_token
        return _price(
            target,
            held,
            prefill_tokens + queued,
            running,
            rtt_s=RTT_START_S if target.rtt_s is None else target.rtt_s,
            queue_s=queued * speed.s_per_token,
            prefill_s=prefill_s,
            base_s=speed.base_s + speed.s_per_decode * running,
            memory_s=self._memory_s(request, target, replica.kv_free_tokens, running),
            slow_s=M_D * self._lessons.crowding_s * self._lessons.output_tokens,
        )

    def _memory_s(
        self, request: Request, target: Target, free: float | None, running: float
    ) -> float:
        """Until answers that run there have given back the memory that this request lacks."""
        if free is None:
            return 0.0
        lessons = self._lessons
        lacking = request.prompt.tokens + lessons.output_tokens - free
        if lacking <= 0.0:
            return 0.0
        given_back_per_s = max(1.0, running) * lessons.kv_tokens / lessons.of(target).residence_s
        return lacking / given_back_per_s

    def _remote(
        self, request: Request, target: Target, peer: Peer, held: Held, now: float
    ) -> Price:
        speed = self._lessons.speed(target)
        prefill_tokens = request.prompt.tokens - held.tokens
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        queue_s = self._peer_queue_s(request, peer, rtt_s, speed.s_per_token, now)
        running = peer.running(request.model)
        return _price(
            target,
            held,
            prefill_tokens + queue_s / speed.s_per_token,
            running,
            rtt_s=rtt_s,
            queue_s=queue_s,
            prefill_s=prefill_tokens * speed.s_per_token,
            base_s=speed.base_s + speed.s_per_decode * running,
            memory_s=self._memory_s(request, target, peer.kv_free_tokens(request.model), running),
            slow_s=M_D * self._lessons.crowding_s * self._lessons.output_tokens,
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


def _price(
    target: Target,
    held: Held,
    tokens: float,
    running: float,
    *,
    rtt_s: float,
    queue_s: float,
    prefill_s: float,
    base_s: float,
    memory_s: float,
    slow_s: float,
) -> Price:
    others_s = running * (STALL_WEIGHT * prefill_s + slow_s)
    seconds = rtt_s + queue_s + prefill_s + base_s + memory_s + others_s
    return Price(
        seconds,
        target,
        held,
        tokens,
        running,
        rtt_s,
        queue_s,
        prefill_s,
        base_s,
        memory_s,
        others_s,
    )
