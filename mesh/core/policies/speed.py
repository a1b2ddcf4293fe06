"""How fast a target computes: what it says itself, else what a paper measured.

Every policy that adds up seconds needs the same three numbers. A replica's heartbeat carries
what its agent has learned, a region's digests the median over its replicas. Who says nothing is
given the figures of one A100 node with Mistral 7B (GORGO, Table 1 and appendix A): a wrong speed
that is the same for all still compares them by tokens, zero would make the unknown the best.
"""

from typing import NamedTuple

from mesh.core.federation.peers import Peer
from mesh.core.policies.base import Target
from schemas.state import Heartbeat

PREFILL_S_PER_TOKEN = 0.0938e-3  # GORGO, Table 1: slope of TTFT on prompt tokens, R² 0.986
DECODE_S_PER_TOKEN = 0.0125  # GORGO, tables 2 to 4: median inter-token latency 12.5 to 12.7 ms


class Speed(NamedTuple):
    """Seconds of prefill per uncached token and per request, of decoding per output token."""

    prefill_s_per_token: float = PREFILL_S_PER_TOKEN
    prefill_base_s: float = 0.0
    decode_s_per_token: float = DECODE_S_PER_TOKEN

    def prefill_s(self, tokens: float) -> float:
        """Time to compute a prompt of which `tokens` are missing."""
        return self.prefill_base_s + tokens * self.prefill_s_per_token


TYPICAL = Speed()


def speed_of(target: Target) -> Speed:
    """By what the target said last; a speed of zero is none."""
    if target.replica is not None:
        return _of_replica(target.replica.heartbeat)
    if target.peer is not None:
        return Speed(_of_peer(target.peer) or PREFILL_S_PER_TOKEN)
    return TYPICAL


def _of_replica(beat: Heartbeat) -> Speed:
    pace = beat.decode_tokens_per_s
    return Speed(
        beat.prefill_s_per_token or PREFILL_S_PER_TOKEN,
        beat.prefill_base_s or 0.0,
        1.0 / pace if pace else DECODE_S_PER_TOKEN,
    )


def _of_peer(peer: Peer) -> float | None:
    """Over its routers, each of which tells the median of the same replicas."""
    said = [digest.prefill_s_per_token for digest in peer.digests.values()]
    known = [s_per_token for s_per_token in said if s_per_token]
    return sum(known) / len(known) if known else None
