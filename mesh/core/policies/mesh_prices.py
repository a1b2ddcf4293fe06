"""What a first token costs at each candidate, for the `mesh` policy; at peers: `mesh_peers.py`.

Prices come from heartbeats, digests and hand-offs, at learned speeds (`mesh_speeds.py`). What is
not reported is estimated, never taken for zero; unreported memory or batch sizes are not priced.
"""

from collections.abc import Sequence

from mesh.core.model.request import Request
from mesh.core.policies.base import Target
from mesh.core.policies.mesh_peers import (
    NO_DELAYS,
    NO_FORWARDS,
    RTT_START_S,
    Forwards,
    PeerDelays,
    PeerPrices,
)
from mesh.core.policies.mesh_price import HELD_NOTHING, PriceRow, PromptHolders
from mesh.core.policies.mesh_speeds import SpeedModel

# In an M/M/1 queue that is busy for a share b of its time are b / (1 - b) requests, and one more
# second of work delays each by that second; prompts differ more in length, hence twice that. Up to
# 60 % busy: beyond it all prompts would wait for the holders of their prefixes.
WORK_FACTOR, WORK_MAX = 2.0, 3.0


class Prices:
    """Prices of one request, as of now."""

    def __init__(
        self,
        speeds: SpeedModel,
        request: Request,
        now: float,
        forwards: Forwards = NO_FORWARDS,
        delays: PeerDelays = NO_DELAYS,
    ) -> None:
        """`forwards`: what has been forwarded to peers of late; `delays`: of their first tokens."""
        self._speeds = speeds
        self._now = now
        self._prompt_tokens = request.prompt.tokens
        self._needed_tokens = request.prompt.tokens + speeds.output_tokens
        self._peers = PeerPrices(speeds, request, now, forwards, delays)

    def rows(self, targets: Sequence[Target], holders: PromptHolders) -> list[PriceRow]:
        """The price of each target; `holders`: of the prompt."""
        # This loop is half of a decision's cost, so nothing in it is looked up twice.
        rows: list[PriceRow] = []
        speeds, kept, now = self._speeds, self._speeds.kept, self._now
        prompt_tokens, needed_tokens = self._prompt_tokens, self._needed_tokens
        held_by = holders.replicas
        replicas = _replicas_among(targets)
        work_weight = self._peers.work_weight = self._weight_of_work(replicas)
        for target in targets:
            name, load, _, rtt_s, replica, peer, ahead = target
            if replica is None:
                if peer is not None:
                    rows.append(self._peers.of(target, peer, holders))
                continue
            known = kept.get(name)
            if known is None or known[0] is not replica.heartbeat:
                known = speeds.of_replica(replica)
            (
                _, s_per_token, running, base_s, batch_s, stalled, kv_tokens, waiting, room, load_s,
            ) = known  # fmt: skip
            held = held_by.get(name, HELD_NOTHING)
            sent = replica.on_the_way
            queued: float = sent.prefill_tokens
            if waiting:  # `Replica.prefill_queue_tokens`, without the call
                left = waiting - (now - replica.seen_at) / s_per_token if s_per_token else waiting
                queued += left if left > 0.0 else 0.0
            elif waiting is None:
                queued = speeds.usual_queue_tokens(replica)
            line_s = memory_s = 0.0
            if ahead:
                line_s = ahead * speeds.prefill_tokens * s_per_token / replicas
                stalled += ahead / replicas
            free_tokens = kv_tokens - sent.tokens + held[1]  # what it holds takes no more memory
            if load and (free_tokens < needed_tokens or load > room):
                lacking_tokens = needed_tokens - free_tokens
                memory_s = speeds.release_s(target, lacking_tokens, load - room, running)
            if rtt_s is None:
                rtt_s = RTT_START_S
            tokens = prompt_tokens - held[1]
            queue_s, prefill_s = queued * s_per_token, tokens * s_per_token
            stalled += work_weight * (queued > 0.0)
            others_s = stalled * prefill_s + batch_s
            seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + load_s + others_s
            rows.append((
                seconds, target, held, tokens + queued, running, rtt_s, line_s, queue_s,
                prefill_s, base_s, memory_s, load_s, others_s,
            ))  # fmt: skip
        return rows

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
