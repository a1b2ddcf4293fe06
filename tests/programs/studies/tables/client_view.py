"""What the clients of one run got, request by request, kept small enough for one file a run.

The requests of an open loop are known before it is played, and so is the order in which they would
be sent if answers took no time. That order numbers them, for every policy alike. The first
`WARM_UP_PER_REPLICA` a replica (at most half of all) warm caches and estimates and are reported
apart; the others are measured.

A request is lost if its client has no complete answer: it was refused, it failed, its first token
did not come within the client's patience, or it was never sent because the request that it follows
was lost. A lost one counts with the patience as its time to first token, and with that and the
time to stream its answer alone as its latency; so nothing is gained by refusing it.

An answer is within its service level if its first token came within

    min(patience, 1 s + 3 · the time to compute its whole prompt alone)

on the slowest GPU of the fleet. One second is what round trips and a person's attention allow;
three times its own work lets two others of its kind go before it, in every workload, and no fleet
is judged by its quick half. It depends on the request and the fleet alone, not on what is cached.

Clocks begin when the first measured request would be sent. Inside a conversation the loop is
closed, as its user reads before writing: what follows an answer is sent when that has ended.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from agents.sim.profiles import Profile
from mesh.replay.tally import RequestOutcome
from mesh.sim.workload import RequestEnd, RequestNode, SentRequest, Workload
from mesh.sim.workloads.capacity import in_order
from mesh.sim.world import SETTLE_S

PATIENCE_S = 60.0
WARM_UP_PER_REPLICA = 100
SLO_FIXED_S, SLO_PREFILLS = 1.0, 3.0
IN_TIME, LATE, LOST = "+", "-", "x"


def stream_alone_s(profile: Profile, node: RequestNode) -> float:
    """Seconds from the first token to the last on an engine that has nothing else to do."""
    context = node.prompt_tokens + node.answer.tokens // 2
    return (node.answer.tokens - 1) * profile.decode_s(1, context)


@dataclass(slots=True)
class Client:
    """One request. `slo_s` and `stream_s`: see above; the rest is what became of it."""

    slo_s: float
    stream_s: float
    tokens: int
    region: str = ""
    ttft_s: float | None = None
    latency_s: float = 0.0
    ended_s: float | None = None  # on the workload's clock; None: no complete answer


class ClientView:
    """All requests of one run; `add` is called with each end."""

    def __init__(
        self,
        workload: Workload,
        profiles: list[Profile],
        *,
        patience_s: float = PATIENCE_S,
        warm_up: int | None = None,
    ) -> None:
        """`profiles`: one a replica. `warm_up`: requests a replica that are not measured.

        Raises ValueError for a closed loop.
        """
        if workload.clients:
            raise ValueError(f"{workload.name} is a closed loop: its requests depend on the policy")
        per_replica = WARM_UP_PER_REPLICA if warm_up is None else warm_up
        self._patience_s = patience_s
        self._clients: list[Client] = []
        self._by_node: dict[int, deque[Client]] = {}
        times: list[float] = []
        regions = {id(arrival.node): str(arrival.region) for arrival in workload.arrivals}
        kinds = list({profile.name: profile for profile in profiles}.values())
        for at_s, node in in_order(workload.arrivals):
            client = self._expected(node, kinds)
            client.region = regions[id(node)]
            for child in node.children:
                regions[id(child)] = client.region
            self._clients.append(client)
            self._by_node.setdefault(id(node), deque()).append(client)
            times.append(at_s)
        self._follow = 1.0 - len(workload.arrivals) / len(times)
        self._first = min(per_replica * len(profiles), len(times) // 2)
        self._from_s, self._until_s = times[self._first], times[-1]

    def _expected(self, node: RequestNode, kinds: list[Profile]) -> Client:
        cold_s = max(one.alone_s(node.prompt_tokens) for one in kinds)
        slo_s = min(self._patience_s, SLO_FIXED_S + SLO_PREFILLS * cold_s)
        stream_s = max(stream_alone_s(one, node) for one in kinds)
        return Client(slo_s, stream_s, node.answer.tokens)

    def add(self, sent: SentRequest, end: RequestEnd, now: float) -> None:
        """One request's end, at the world's time `now`."""
        client = self._by_node[id(sent.node)].popleft()
        if end.outcome is not RequestOutcome.OK or sent.first_at is None:
            return
        ttft_s = sent.first_at - sent.sent_at
        if ttft_s > self._patience_s:
            return
        client.ttft_s, client.latency_s = ttft_s, now - sent.sent_at
        client.ended_s = now - SETTLE_S

    def figures(self) -> dict[str, Any]:
        """For the file; lists have an entry a request, in the order described above."""
        clients, names = self._clients, sorted({one.region for one in self._clients})
        return {
            "measured_from": self._first,
            "offered_s": self._until_s - self._from_s,
            "patience_s": self._patience_s,
            "follow": round(self._follow, 3),
            "regions": names,
            "region": "".join(str(names.index(one.region)) for one in clients),
            "end": "".join(map(self._end_of, clients)),
            "ttft_s": [round(self._ttft_s(one), 5) for one in clients],
            "latency_s": [round(self._latency_s(one), 3) for one in clients],
            "tokens": [one.tokens for one in clients],
            "ended_s": [
                None if one.ended_s is None else round(one.ended_s - self._from_s, 3)
                for one in clients
            ],
        }

    def _end_of(self, client: Client) -> str:
        if client.ttft_s is None:
            return LOST
        return IN_TIME if client.ttft_s <= client.slo_s else LATE

    def _ttft_s(self, client: Client) -> float:
        return self._patience_s if client.ttft_s is None else client.ttft_s

    def _latency_s(self, client: Client) -> float:
        lost_s = self._patience_s + client.stream_s
        return lost_s if client.ttft_s is None else client.latency_s
