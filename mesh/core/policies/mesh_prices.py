"""What a first token costs at each candidate, for the `mesh` policy; at peers: `mesh_peers.py`.

Prices come from heartbeats, digests and hand-offs, at learned speeds (`mesh_speeds.py`). What is
not reported is estimated, never taken for zero; unreported memory or batch sizes are not priced.
"""

import math
import sys
from bisect import insort
from collections.abc import Sequence
from zlib import crc32

from mesh.core.model.request import Request
from mesh.core.policies.base import Prefill, Target
from mesh.core.policies.mesh_peers import (
    NO_DELAYS,
    NO_FORWARDS,
    RTT_START_S,
    Forwards,
    PeerDelays,
    PeerPrices,
)
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, Price, PriceRow, PromptHolders
from mesh.core.policies.mesh_speeds import SpeedModel

# In an M/M/1 queue that is busy for a share b of its time are b / (1 - b) requests, and one more
# second of work delays each by that second; prompts differ more in length, hence twice that. Up to
# 60 % busy: beyond it all prompts would wait for the holders of their prefixes.
WORK_FACTOR, WORK_MAX = 2.0, 3.0
TIE_S, TIE_RATIO = 0.001, 0.01  # estimates are no better than that
ALL = sys.maxsize
HELD_BY_NONE = PromptHolders({}, {})


def with_prefills(targets: Sequence[Target]) -> Sequence[Target]:
    """The targets, and before them the prefill replicas of pairs, which are no targets by
    themselves but may hold the prompt."""
    stages = {id(one.prefill): one.prefill for one in targets if one.prefill is not None}
    return [*(first for prefill in stages.values() for first in prefill.among), *targets]


def near_s(least_s: float) -> float:
    """Up to which price candidates are as good as the cheapest."""
    return least_s + max(TIE_S, TIE_RATIO * least_s)


class Prices:
    """Prices of one request, as of now."""

    def __init__(
        self,
        speeds: SpeedModel,
        request: Request,
        now: float,
        forwards: Forwards = NO_FORWARDS,
        delays: PeerDelays = NO_DELAYS,
        output_tokens: float | None = None,
    ) -> None:
        """`forwards`: what has been forwarded to peers of late; `delays`: of their first tokens.
        `output_tokens`: that it will generate there, if not as many as answers usually have."""
        self._request = request
        self._speeds = speeds
        self._now = now
        self._prompt_tokens = request.prompt.tokens
        if output_tokens is None:
            output_tokens = speeds.output_tokens
        self._needed_tokens = request.prompt.tokens + output_tokens
        self._forwards, self._delays = forwards, delays

    def rows(
        self, targets: Sequence[Target], holders: PromptHolders, most: int = ALL
    ) -> list[PriceRow]:
        """The price of each target, none of them a pair; `holders`: of the prompt.

        `most`: wanted are only rows among so many cheapest, or as good as the cheapest; other
        replicas' may be missing.
        """
        # This loop is a fifth of a decision's cost, so nothing in it is looked up twice.
        speeds, kept, now = self._speeds, self._speeds.kept, self._now
        prompt_tokens, needed_tokens = self._prompt_tokens, self._needed_tokens
        # Tokens of a prompt that is held; a conversation's next turns, which pay the round trip.
        usual_tokens, returns = speeds.prefill_tokens, speeds.returns
        held_by, replicas = holders.replicas, _replicas_among(targets)
        work_weight, rows = self._weight_of_work(replicas), list[PriceRow]()
        # A replica whose least price is above the limit is left out. `cheapest`: prices in order,
        # infinite for those not seen yet.
        cheapest, limit_s = [math.inf] * most if replicas > most else [], math.inf
        for target in targets:
            name, load, _, rtt_s, replica, _, ahead, _ = target
            if replica is None:
                break
            known = kept.get(name)
            if known is None or known[0] is not replica.heartbeat:
                known = speeds.of_replica(replica)
            held = held_by.get(name, HELD_NOTHING)
            tokens = prompt_tokens - held[1]
            if known[1] + tokens * known[2] > limit_s:
                continue
            (
                _, _, _, s_per_token, running, base_s, displaced_s, stalled, kv_tokens, waiting,
                room, load_s,
            ) = known  # fmt: skip
            sent = replica.on_the_way
            queued = float(sent.prefill_tokens)
            if waiting:  # `Replica.prefill_queue_tokens`, without the call
                left = waiting - (now - replica.seen_at) / s_per_token
                queued += left if left > 0.0 else 0.0
            elif waiting is None:
                queued = speeds.usual_queue_tokens(replica)
            line_s, memory_s = ahead * usual_tokens * s_per_token / replicas, 0.0
            # What it holds takes no more memory.
            lacking_tokens = needed_tokens - (kv_tokens - sent.tokens + held[1])
            if load and (lacking_tokens > 0.0 or load > room):
                memory_s = speeds.release_s(target, lacking_tokens, load - room, running)
            rtt_s = RTT_START_S if rtt_s is None else rtt_s
            queue_s, prefill_s = queued * s_per_token, tokens * s_per_token
            stalled = stalled + ahead / replicas + work_weight * (queued > 0.0)
            others_s = stalled * prefill_s + displaced_s + returns * rtt_s
            seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + load_s + others_s
            if seconds > limit_s:
                continue
            if cheapest:
                insort(cheapest, seconds)
                limit_s = (1.0 + TIE_RATIO) * cheapest[most - 1] + TIE_S
            rows.append((
                seconds, target, held, tokens + queued, running, rtt_s, line_s, queue_s,
                prefill_s, base_s, memory_s, load_s, others_s,
            ))  # fmt: skip
        return rows + self._of_peers(targets[replicas:], holders, work_weight)

    def _of_peers(
        self, targets: Sequence[Target], holders: PromptHolders, work_weight: float
    ) -> list[PriceRow]:
        if not targets:
            return []
        peers = PeerPrices(self._speeds, self._request, self._now, self._forwards, self._delays)
        peers.work_weight = work_weight
        found = ((target, target.peer) for target in targets)
        return [peers.of(target, peer, holders) for target, peer in found if peer is not None]

    def with_pairs(self, targets: Sequence[Target], holders: PromptHolders) -> list[PriceRow]:
        """The price of each target; pairs, a decode replica with the cheapest prefill replica of
        its kind, come before the others."""
        cheapest: dict[int, PriceRow] = {}
        found: list[PriceRow] = []
        for target in targets:
            prefill = target.prefill
            if prefill is None:
                break
            first = cheapest.get(id(prefill))
            if first is None:
                there = Prices(self._speeds, self._request, self._now, output_tokens=0.0)
                first = cheapest[id(prefill)] = there.cheapest(prefill.among, holders)
            alone = self.rows((target._replace(prefill=None),), HELD_BY_NONE)[0]
            held = holders.replicas.get(target.name, HELD_NOTHING)
            found.append(self._of_pair(target, Price._make(first), Price._make(alone), held))
        return found + self.rows(targets[len(found) :], holders)

    def cheapest(self, targets: Sequence[Target], holders: PromptHolders) -> PriceRow:
        """The price of the cheapest; of those within TIE_S of it one by the request's id, so that
        all routers' requests don't go to the same one."""
        rows = self.rows(targets, holders)
        least = min(row[0] for row in rows)
        near = [row for row in rows if row[0] <= least + TIE_S]
        return near[crc32(self._request.request_id.encode()) % len(near)]

    def _of_pair(self, target: Target, first: Price, alone: Price, held: HeldPrefix) -> PriceRow:
        """`first`: the price of the prefill stage; `alone`: of the whole request at the decode
        replica, without what it holds; `held`: of the prompt, by that one."""
        replica, speeds = target.replica, self._speeds
        assert replica is not None, "the replicas of pairs are local"
        displaced_s = speeds.of_replica(replica).displaced_s
        tokens = max(0, self._prompt_tokens - held.tokens)
        transfer_s = speeds.transfer.seconds(tokens, alone.running)
        queue_s, memory_s = first.queue_s + alone.queue_s, first.memory_s + alone.memory_s
        others_s, load_s = first.others_s + displaced_s, first.load_s + alone.load_s
        terms = {
            "rtt_s": alone.rtt_s,
            "line_s": alone.line_s,
            "queue_s": first.queue_s,
            "prefill_s": first.prefill_s,
            "base_s": first.base_s,
            "transfer_s": transfer_s,
            "decode_queue_s": alone.queue_s,
            "memory_s": memory_s,
            "load_s": load_s,
            "others_s": others_s,
        }
        chosen = Prefill((first.target,), terms, tokens)
        return (
            sum(terms.values()), target._replace(prefill=chosen), first.held, first.tokens,
            alone.running, alone.rtt_s, alone.line_s, queue_s, first.prefill_s,
            first.base_s + transfer_s, memory_s, load_s, others_s,
        )  # fmt: skip

    def _weight_of_work(self, among: int) -> float:
        """What others wait for each second of prefill where prompts are queued.

        By this router's own clients: with others' prompts, replicas are busier than assumed. Where
        none is queued it is 0: work on an idle replica delays nobody, and if it cost as much there,
        requests would wait for a busy holder beside it.
        """
        speeds = self._speeds
        replicas = max(among, len(speeds.replicas))  # of a large fleet only a sample is priced
        if not replicas:
            return 0.0
        busy = min(WORK_MAX / (WORK_MAX + WORK_FACTOR), speeds.demand.per_s(self._now) / replicas)
        return WORK_FACTOR * busy / (1.0 - busy)


def _replicas_among(targets: Sequence[Target]) -> int:
    """Replicas come before peers, which are few."""
    count = len(targets)
    while count and targets[count - 1].replica is None:
        count -= 1
    return count
