"""What a first token costs at each candidate, in seconds: the arithmetic of the `mesh` policy.

Everything here is read from heartbeats, digests and hand-offs, at the speeds that were learned
from earlier answers (`mesh_lessons`). What nobody told is reckoned from what is known otherwise
(a queue from the requests in it), never taken for zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mesh.core.federation.peers import Peer
from mesh.core.policies.base import Score, Target
from mesh.core.policies.mesh_holdings import Held
from mesh.core.policies.mesh_lessons import UNKNOWN, Lessons
from mesh.core.region.replicas import Replica
from mesh.core.requests.request import Request

STALL_WEIGHT = 0.15  # of the decodes that our prefill stalls: they wait for one token in hundreds
# Of a first token's least time, for each that runs there: a larger batch makes every iteration a
# little longer, for as long as our answer lasts. How much can't be fitted (prefills hide it), but
# an idle replica beside a busy one must be worth something even to a prompt that is held there.
BATCH_WEIGHT = 0.02
RTT_START_S = 0.5  # a peer that no ping has come back from


class Price(NamedTuple):
    """One candidate's. All in seconds; `seconds` is the sum, others' cost included."""

    seconds: float
    target: Target
    held: Held
    tokens: float  # to compute there before the first one comes, those queued included
    running: float
    rtt_s: float
    line_s: float
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
            "line_s": self.line_s,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "base_s": self.base_s,
            "memory_s": self.memory_s,
            "others_s": self.others_s,
        }
        return Score(self.target, self.seconds, terms, self.held.blocks)


Row = tuple[float, Target, Held, float, float, float, float, float, float, float, float, float]


class Prices:
    """Prices of one request, at one moment.

    They are made as plain tuples, of which `Price` are the names: naming a thousand of them to
    choose one would take longer than reckoning them.
    """

    def __init__(self, lessons: Lessons, request: Request, now: float) -> None:
        self._lessons = lessons
        self._request = request
        self._now = now
        self._prompt_tokens = request.prompt.tokens
        self._needed_tokens = request.prompt.tokens + lessons.output_tokens

    def rows(self, targets: Sequence[Target], held: Sequence[Held]) -> list[Row]:
        """The price of each target; `held`: what each holds of the prompt."""
        rows = []
        self._ready = max(1, sum([target.replica is not None for target in targets]))
        for target, has in zip(targets, held, strict=True):
            if target.replica is not None:
                rows.append(self._local(target, target.replica, has))
            elif target.peer is not None:
                rows.append(self._remote(target, target.peer, has))
        return rows

    def _local(self, target: Target, replica: Replica, held: Held) -> Row:
        # Half of what a decision takes, times the fleet: nothing is asked twice, or by a call.
        name, _, _, rtt_s, _, _, ahead = target
        beat, way, lessons = replica.heartbeat, replica.on_the_way, self._lessons
        speed = lessons.replicas.get(name, UNKNOWN).speed
        if speed is None:
            speed = lessons.told_by(beat) or lessons.fleet_speed
        base_s, s_per_token, s_per_decode = speed
        load, running = replica.inside + way.count, beat.running
        if running is None:
            running = load
        queued = replica.prefill_queue_tokens(self._now, s_per_token)
        if queued is None:  # its agent doesn't say: count requests instead
            queued = (load if replica.pending is None else replica.pending) * lessons.prefill_tokens
        memory_s = 0.0
        if load and replica.kv_told_tokens is not None:
            free_tokens = replica.kv_told_tokens - way.tokens
            if free_tokens < self._needed_tokens:
                memory_s = self._memory_s(target, free_tokens, running)
        if rtt_s is None:
            rtt_s = RTT_START_S
        prefill_tokens = self._prompt_tokens - held.tokens
        queue_s, prefill_s = queued * s_per_token, prefill_tokens * s_per_token
        batch_s = BATCH_WEIGHT * running * base_s
        base_s += s_per_decode * running
        line_s = ahead * lessons.prefill_tokens * s_per_token / self._ready
        others_s = (running * STALL_WEIGHT + ahead / self._ready) * prefill_s + batch_s
        seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + others_s
        tokens = prefill_tokens + queued
        return (
            seconds,
            target,
            held,
            tokens,
            running,
            rtt_s,
            line_s,
            queue_s,
            prefill_s,
            base_s,
            memory_s,
            others_s,
        )

    def _memory_s(self, target: Target, free_tokens: float | None, running: float) -> float:
        """Until answers that run there have given back the memory that this request lacks."""
        if free_tokens is None or free_tokens >= self._needed_tokens:
            return 0.0
        lessons = self._lessons
        given_back_per_s = max(1.0, running) * lessons.kv_tokens / lessons.of(target).residence_s
        return (self._needed_tokens - free_tokens) / given_back_per_s

    def _remote(self, target: Target, peer: Peer, held: Held) -> Row:
        lessons, model = self._lessons, self._request.model
        base_s, s_per_token, s_per_decode = lessons.speed(target)
        prefill_s = (self._prompt_tokens - held.tokens) * s_per_token
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        ready = max(1, peer.ready(model))
        typical_s = lessons.prefill_tokens * s_per_token / ready
        line_s = target.ahead * typical_s
        queue_s = self._peer_queue_s(peer, rtt_s, typical_s)
        running = peer.running(model)
        if running is None:
            running = lessons.running
        batch_s = BATCH_WEIGHT * running * base_s
        base_s += s_per_decode * running
        others_s = (running * STALL_WEIGHT + target.ahead / ready) * prefill_s + batch_s
        others_s += lessons.returns * rtt_s
        # Who runs nothing has nothing to give back: waiting for it would not help.
        memory_s = self._memory_s(target, peer.kv_free_tokens(model), running) if running else 0.0
        seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + others_s
        tokens = (line_s + queue_s + prefill_s) / s_per_token
        return (
            seconds,
            target,
            held,
            tokens,
            running,
            rtt_s,
            line_s,
            queue_s,
            prefill_s,
            base_s,
            memory_s,
            others_s,
        )

    def _peer_queue_s(self, peer: Peer, rtt_s: float, typical_s: float) -> float:
        """In an engine there: what the digest said, and what has come since.

        What we sent there is counted, what others did is expected. `typical_s`: one more request's
        share of the region's time.
        """
        model = self._request.model
        told_s = peer.wait_s(model)
        age_s = self._now - peer.seen_at + rtt_s / 2
        unseen = len(peer.forwarded_at) + peer.requests_per_s * age_s
        unseen_s = max(0.0, unseen - peer.free(model)) * typical_s
        return (typical_s * max(1, peer.ready(model)) if told_s is None else told_s) + unseen_s
