"""What a first token costs at each candidate, in seconds: the arithmetic of the `mesh` policy.

Everything here is read from heartbeats, digests and hand-offs, at the speeds that were learned
from earlier answers (`mesh_lessons`). What nobody told is reckoned from what is known otherwise
(a queue from the requests in it), never taken for zero.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from mesh.core.federation.peers import Peer
from mesh.core.policies.base import Score, Target
from mesh.core.policies.mesh_holdings import NOTHING, Held, Known
from mesh.core.policies.mesh_lessons import Lessons, Standing
from mesh.core.region.replica import Replica
from mesh.core.requests.request import Request

STALL_WEIGHT = 0.15  # of the decodes that our prefill stalls: they wait for one token in hundreds
# Of a first token's least time, for each that runs there: a larger batch makes every iteration a
# little longer, for as long as our answer lasts. How much can't be fitted (prefills hide it), but
# an idle replica beside a busy one must be worth something even to a prompt that is held there.
BATCH_WEIGHT = 0.02
SLOT_START_S = 0.1  # before an answer ended there: held for it, but nobody is shed for a guess
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
        return score(self)


Row = tuple[float, Target, Held, float, float, float, float, float, float, float, float, float]


def score(row: Row) -> Score:
    """For the receipt: what `Price.seconds` adds up from."""
    seconds, target, held, _, _, rtt_s, line_s, queue_s, prefill_s, base_s, memory_s, others_s = row
    terms = {
        "rtt_s": rtt_s,
        "line_s": line_s,
        "queue_s": queue_s,
        "prefill_s": prefill_s,
        "base_s": base_s,
        "memory_s": memory_s,
        "others_s": others_s,
    }
    return Score(target, seconds, terms, held.blocks)


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

    def rows(self, targets: Sequence[Target], known: Known) -> list[Row]:
        """The price of each target; `known`: what they hold of the prompt."""
        # Half of what a decision takes, times the fleet: nothing is asked twice, or by a call.
        rows: list[Row] = []
        lessons, standings, now, ready = self._lessons, self._lessons.standings, self._now, 0
        prompt_tokens, needed_tokens = self._prompt_tokens, self._needed_tokens
        here, there = known
        for target in targets:
            name, _, _, rtt_s, replica, peer, ahead = target
            if replica is None:
                if peer is not None:
                    rows.append(self._remote(target, peer, there.get(name, NOTHING)))
                continue
            has = here.get(name, NOTHING)
            stands, way = standings.get(name), replica.on_the_way
            if stands is None or stands.heartbeat is not replica.heartbeat:
                stands = self._stand(replica)
            s_per_token, base_s = stands.s_per_token, stands.base_s
            queued_tokens = stands.queued_tokens
            if queued_tokens is None:  # its agent doesn't say: count requests instead
                waiting = replica.load if replica.pending is None else replica.pending
                queued = waiting * lessons.prefill_tokens
            else:  # `Replica.prefill_queue_tokens`, without the call
                done = (now - replica.seen_at) / s_per_token if s_per_token else 0.0
                left = queued_tokens - done
                queued = (left if left > 0.0 else 0.0) + way.prefill_tokens
            stalled, line_s, memory_s = stands.stalled, 0.0, 0.0
            if ahead:
                ready = ready or _replicas_among(targets)
                line_s = ahead * lessons.prefill_tokens * s_per_token / ready
                stalled += ahead / ready
            free_tokens = stands.kv_told_tokens - way.tokens
            if free_tokens < needed_tokens and replica.load:
                memory_s = self._memory_s(target, free_tokens, stands.running)
            if (over := replica.inside + way.count + 1 - stands.batch_max) > 0.0:
                memory_s = max(memory_s, self._slot_s(target, over, stands.running))
            if rtt_s is None:
                rtt_s = RTT_START_S
            tokens = prompt_tokens - has.tokens
            queue_s, prefill_s = queued * s_per_token, tokens * s_per_token
            others_s = stalled * prefill_s + stands.batch_s
            seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + others_s
            rows.append((
                seconds, target, has, tokens + queued, stands.running, rtt_s, line_s, queue_s,
                prefill_s, base_s, memory_s, others_s,
            ))  # fmt: skip
        return rows

    def _stand(self, replica: Replica) -> Standing:
        """What its last word comes to; kept, but where it doesn't tell how many run there."""
        beat, kv_told_tokens = replica.heartbeat, replica.kv_told_tokens
        running = replica.load if beat.running is None else beat.running
        base_s, s_per_token, s_per_decode = self._lessons.speed_to_stand(beat)
        standing = Standing(
            beat,
            s_per_token,
            running,
            base_s + s_per_decode * running,
            BATCH_WEIGHT * running * base_s,
            running * STALL_WEIGHT,
            math.inf if kv_told_tokens is None else kv_told_tokens,
            beat.prefill_queued_tokens,
            beat.batch_max or math.inf,
        )
        if beat.running is not None:
            self._lessons.standings[beat.replica] = standing
        return standing

    def _memory_s(self, target: Target, free_tokens: float | None, running: float) -> float:
        """Until answers that run there have given back the memory that this request lacks."""
        if free_tokens is None or free_tokens >= self._needed_tokens:
            return 0.0
        lessons = self._lessons
        given_back_per_s = max(1.0, running) * lessons.kv_tokens / lessons.of(target).residence_s
        return (self._needed_tokens - free_tokens) / given_back_per_s

    def _slot_s(self, target: Target, slots: float, running: float) -> float:
        """Until so many of the answers that run there have ended, each of which frees a slot."""
        answer_s = self._lessons.of(target).slot_s
        return slots * (SLOT_START_S if answer_s is None else answer_s / max(1.0, running))

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


def _replicas_among(targets: Sequence[Target]) -> int:
    return sum(target.replica is not None for target in targets)
