"""What a first token costs at a peer region, for the `mesh` policy.

A peer's digest lists some replicas, each with its own wait, speed, memory and batch, and gossip
names those that hold the prompt. Each is priced as the peer's own router would: what it holds of
the prompt with its own load. The peer costs what the cheapest of them does. Which one gets the
request is decided by the peer, when the request is there.

A holder that is not listed waits at least as long as any that is. Where no holder is named, or none
listed, the price is of the region as a whole: its shortest wait, most memory, mean batch, median
speed and deepest prefix, as if one replica had them all.

What was forwarded since the digest left counts at the replica that it was priced for.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from mesh.core.model.reported_speed import BASE_S_MAX, believed_slope
from mesh.core.model.request import Request
from mesh.core.policies.base import Target
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, PriceRow, PromptHolders
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.core.view.peers import Peer
from schemas.ids import ModelId
from schemas.residency import Label
from schemas.settings import OUTSTANDING_MAX

FORWARDS_MAX = 1024  # to one peer since its digest left
PEERS_MAX = 256
RTT_START_S = 0.5  # of a peer before its first answered ping
DELAY_WEIGHT = 0.2  # of one first token's delay: some ten of them show what a peer is like
DELAY_HALF_LIFE_S = 30.0  # as what was learned of an idle replica
DELAY_S_MAX = 60.0
WAIT_S_MAX = 3600.0  # of what is reported: no wait, load or round trip is longer
UNSENT = (0, 0)
NO_NAMES: Mapping[str, HeldPrefix] = {}


class ListedReplica(NamedTuple):
    """One of a peer's replicas by its digest, in seconds."""

    name: str
    wait_s: float
    s_per_token: float
    running: float
    base_s: float
    stalled: float  # decodes that a prefill stalls, by their weight
    free_tokens: float | None


class Forward(NamedTuple):
    """A request on its way to a peer, and the replica that it was priced for."""

    at: float
    replica: str
    prefill_tokens: int
    tokens: int


class Forwards:
    """What was forwarded to each peer, until a digest that may count it."""

    def __init__(self) -> None:
        self._to: dict[str, deque[Forward]] = {}

    def add(self, peer: str, forward: Forward) -> None:
        """It is being sent there."""
        if peer not in self._to and len(self._to) >= PEERS_MAX:
            del self._to[next(iter(self._to))]
        self._to.setdefault(peer, deque(maxlen=FORWARDS_MAX)).append(forward)

    def unseen(self, name: str, left_at: float) -> Mapping[str, tuple[int, int]]:
        """Of each replica tokens to compute and of whole prompts, sent after `left_at`."""
        sent = self._to.get(name)
        while sent and sent[0].at < left_at:
            sent.popleft()
        found: dict[str, tuple[int, int]] = {}
        for one in sent or ():
            prefill_tokens, tokens = found.get(one.replica, UNSENT)
            found[one.replica] = prefill_tokens + one.prefill_tokens, tokens + one.tokens
        return found


NO_FORWARDS = Forwards()


class SentForward(NamedTuple):
    """A request on its way to a peer, and when its first token was expected."""

    at: float
    expected_s: float
    delay_s: float  # of that, what the peer's first tokens were late by

    @property
    def due_at(self) -> float:
        """From when it is late: after twice what was expected, and a second."""
        return self.at + 2.0 * self.expected_s + 1.0


class OpenForwards:
    """Requests under way to one peer, at most FORWARDS_MAX: the oldest makes room."""

    def __init__(self) -> None:
        self.by_key: dict[int, SentForward] = {}  # the oldest first
        # A heap of `due_at` and key. Those of requests that have begun or left since stay in it
        # until they come to its top, or until it is built again.
        self._due: list[tuple[float, int]] = []

    def add(self, key: int, sent: SentForward) -> None:
        """Follow one more request."""
        if len(self.by_key) >= FORWARDS_MAX:
            del self.by_key[next(iter(self.by_key))]
        self.by_key[key] = sent
        heappush(self._due, (sent.due_at, key))
        if len(self._due) > 2 * FORWARDS_MAX:
            self._due = [(one.due_at, key) for key, one in self.by_key.items()]
            heapify(self._due)

    def first_due_at(self) -> float:
        """The least `due_at` of them, which may be over; infinite if there are none."""
        while self._due:
            due_at, key = self._due[0]
            sent = self.by_key.get(key)
            if sent is not None and sent.due_at == due_at:
                return due_at
            heappop(self._due)
        return math.inf


class PeerDelays:
    """By how much later than expected each peer's first tokens come.

    What a peer's digest reports is its word. Prices follow it, but not for longer than first tokens
    agree with it: the difference is averaged and added to the peer's prices, and fades when nothing
    is forwarded there. So does the time of a request that has waited for over twice what was
    expected: a peer that answers nobody, whatever it reports, gets no more work than what finds
    that out, and one that recovers is tried again.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenForwards] = {}
        self._delays: dict[str, tuple[float, float]] = {}  # seconds, as of

    def forwarded(self, peer: str, key: int, expected_s: float, now: float) -> None:
        """A request leaves; `expected_s`: until its first token, the delay as of now included."""
        if peer not in self._open and len(self._open) >= PEERS_MAX:
            del self._open[next(iter(self._open))]
        under_way = self._open.setdefault(peer, OpenForwards())
        under_way.add(key, SentForward(now, expected_s, self.of(peer, now)))

    def began(self, peer: str, key: int, now: float) -> None:
        """Its first token is here."""
        if (sent := self._pop(peer, key)) is not None:
            # Against what the peer reported: of many under way each shows the same delay.
            late_s, known_s = (
                now - sent.at - (sent.expected_s - sent.delay_s),
                self._faded(peer, now),
            )
            self._set(peer, known_s + DELAY_WEIGHT * (late_s - known_s), now)

    def left(self, peer: str, key: int, now: float) -> None:
        """It leaves without one, for whatever reason."""
        if (sent := self._pop(peer, key)) is not None:
            self._set(peer, max(self._faded(peer, now), now - sent.due_at), now)

    def of(self, peer: str, now: float) -> float:
        """Seconds to add to what the peer reports."""
        under_way = self._open.get(peer)
        due_at = math.inf if under_way is None else under_way.first_due_at()
        return max(self._faded(peer, now), now - due_at)

    def _pop(self, peer: str, key: int) -> SentForward | None:
        under_way = self._open.get(peer)
        return None if under_way is None else under_way.by_key.pop(key, None)

    def _set(self, peer: str, seconds: float, now: float) -> None:
        if peer not in self._delays and len(self._delays) >= PEERS_MAX:
            del self._delays[next(iter(self._delays))]
        self._delays[peer] = min(DELAY_S_MAX, max(0.0, seconds)), now

    def _faded(self, peer: str, now: float) -> float:
        seconds, at = self._delays.get(peer, (0.0, now))
        return seconds and seconds * 0.5 ** ((now - at) / DELAY_HALF_LIFE_S)


NO_DELAYS = PeerDelays()


class PeerReplicas(NamedTuple):
    """What a peer's last digest lists for a model: rows, and their names."""

    of: tuple[float, ModelId, frozenset[Label] | None]
    rows: tuple[ListedReplica, ...]
    names: frozenset[str]


class PeerPrices:
    """Prices of one request at peers, as of now."""

    def __init__(
        self,
        speeds: SpeedModel,
        request: Request,
        now: float,
        forwards: Forwards,
        delays: PeerDelays,
    ) -> None:
        self.work_weight = 0.0  # what others wait for each second of prefill where prompts queue
        self._speeds = speeds
        self._model = request.model
        self._now = now
        self._forwards, self._delays = forwards, delays
        self._prompt_tokens = request.prompt.tokens
        self._needed_tokens = request.prompt.tokens + speeds.output_tokens

    def of(self, target: Target, peer: Peer, holders: PromptHolders) -> PriceRow:
        """The peer's price: by what it reports, and by how first tokens have agreed with that."""
        row, delay_s = (
            self._reported(target, peer, holders),
            self._delays.of(target.name, self._now),
        )
        if not delay_s:
            return row
        return (row[0] + delay_s, *row[1:9], row[9] + delay_s, *row[10:])

    def _reported(self, target: Target, peer: Peer, holders: PromptHolders) -> PriceRow:
        held = holders.peers.get(target.name, HELD_NOTHING)
        listed = self._listed(target, peer)
        if not listed.rows:
            return self._of_region(target, peer, held)
        named = holders.named.get(target.name, NO_NAMES)
        rows = listed.rows
        if not named.keys() <= listed.names:
            rows = (*rows, self._of_unlisted(target, peer, listed, named))
        price = self._of_listed(target, peer, rows, named)
        if held[0] and all(one[0] < held[0] for one in named.values()):  # who holds it is not known
            price = min(price, self._of_region(target, peer, held), key=itemgetter(0))
        return price

    def _listed(self, target: Target, peer: Peer) -> PeerReplicas:
        """Computed once for a digest."""
        speeds, of = self._speeds, (peer.seen_at, self._model, peer.within)
        kept: PeerReplicas | None = speeds.kept_peers.get(target.name)
        if kept is not None and kept.of == of:
            return kept
        found, rows = peer.listed(self._model), []
        lines = [] if found is None else [*zip(*found[0].columns, strict=True)]
        for place in () if found is None else found[1]:
            if place < len(lines) and lines[place][4] > 0.0:
                name, wait_s, running, free_tokens, slope, base_s = lines[place]
                s_per_token, wait_s = believed_slope(slope), min(wait_s, WAIT_S_MAX)
                running = min(running, OUTSTANDING_MAX)
                rows.append(self._row(name, wait_s, s_per_token, running, base_s, free_tokens))
        made = PeerReplicas(of, tuple(rows), frozenset([row.name for row in rows]))
        speeds.kept_peers[target.name] = made
        return made

    def _row(
        self,
        name: str,
        wait_s: float,
        s_per_token: float,
        running: float,
        base_s: float | None,
        free_tokens: float | None,
    ) -> ListedReplica:
        speeds = self._speeds
        usual_s, _, s_per_decode = speeds.fleet_speed
        least_s = usual_s if base_s is None else min(base_s, BASE_S_MAX)
        return ListedReplica(
            name,
            wait_s,
            s_per_token,
            running,
            least_s + s_per_decode * running,
            speeds.stall_weight * running,
            free_tokens,
        )

    def _of_unlisted(
        self, target: Target, peer: Peer, listed: PeerReplicas, named: Mapping[str, HeldPrefix]
    ) -> ListedReplica:
        """The holder of most that is not listed: as busy as the busiest that is, else as usual."""
        held = max(one for name, one in named.items() if name not in listed.names)
        base_s, s_per_token, _ = self._speeds.speed(target)
        running = peer.running(self._model)
        return self._row(
            held.replica,
            max([row.wait_s for row in listed.rows]),
            s_per_token,
            self._speeds.running if running is None else min(running, OUTSTANDING_MAX),
            base_s,
            None,
        )

    def _of_listed(
        self,
        target: Target,
        peer: Peer,
        rows: Sequence[ListedReplica],
        named: Mapping[str, HeldPrefix],
    ) -> PriceRow:
        speeds, prompt_tokens, work_weight = self._speeds, self._prompt_tokens, self.work_weight
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        ready = max(1, peer.ready(self._model))
        typical_s = speeds.prefill_tokens * speeds.speed(target).s_per_token / ready
        sent = self._forwards.unseen(target.name, peer.seen_at - rtt_s)
        arrived_s = self._arrived_s(peer, rtt_s, typical_s, 0)
        ahead = target.ahead / ready
        cheapest, best = math.inf, None
        for row in rows:
            name, wait_s, s_per_token, running, base_s, stalled, free_tokens = row
            held = named.get(name, HELD_NOTHING)
            prefill_sent, whole_sent = sent.get(name, UNSENT)
            queue_s = wait_s + arrived_s + prefill_sent * s_per_token
            prefill_s = (prompt_tokens - held[1]) * s_per_token
            others_s = (stalled + ahead + work_weight * (queue_s > 0.0)) * prefill_s
            seconds, memory_s = queue_s + prefill_s + base_s + others_s, 0.0
            if best is not None and seconds >= cheapest:
                continue
            # Where no request runs, none will release memory: waiting would not help.
            if running and free_tokens is not None:
                lacking_tokens = self._needed_tokens - (free_tokens + held[1] - whole_sent)
                memory_s = speeds.release_s(target, lacking_tokens, 0.0, running)
            if best is None or seconds + memory_s < cheapest:
                cheapest = seconds + memory_s
                best = row, held, queue_s, prefill_s, memory_s, others_s
        assert best is not None
        row, held, queue_s, prefill_s, memory_s, others_s = best
        others_s += speeds.returns * rtt_s
        line_s = target.ahead * typical_s
        load_s = min(peer.load_s(self._model), WAIT_S_MAX)
        seconds = rtt_s + line_s + queue_s + prefill_s + row.base_s + memory_s + load_s + others_s
        tokens = (line_s + queue_s + prefill_s) / row.s_per_token
        held = held if held[0] else HeldPrefix(0, 0, row.name)
        return (
            seconds, target, held, tokens, row.running, rtt_s, line_s, queue_s, prefill_s,
            row.base_s, memory_s, load_s, others_s,
        )  # fmt: skip

    def _of_region(self, target: Target, peer: Peer, held: HeldPrefix) -> PriceRow:
        """As if one replica had the best of all."""
        speeds, model = self._speeds, self._model
        base_s, s_per_token, s_per_decode = speeds.speed(target)
        prefill_s = (self._prompt_tokens - held.tokens) * s_per_token
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        ready = max(1, peer.ready(model))
        typical_s = speeds.prefill_tokens * s_per_token / ready
        line_s = target.ahead * typical_s
        wait_s = peer.wait_s(model)
        queue_s = typical_s * ready if wait_s is None else min(wait_s, WAIT_S_MAX)
        queue_s += self._arrived_s(peer, rtt_s, typical_s, len(peer.forwarded_at))
        running = peer.running(model)
        running = speeds.running if running is None else min(running, OUTSTANDING_MAX)
        base_s += s_per_decode * running
        weight = running * speeds.stall_weight + target.ahead / ready
        if queue_s:
            weight += self.work_weight
        others_s = weight * prefill_s + speeds.returns * rtt_s
        memory_s = 0.0
        free_tokens = peer.kv_free_tokens(model) if running else None
        if free_tokens is not None:
            lacking_tokens = self._needed_tokens - free_tokens - held.tokens
            memory_s = speeds.release_s(target, lacking_tokens, 0.0, running)
        load_s = min(peer.load_s(model), WAIT_S_MAX)
        seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + load_s + others_s
        tokens = (line_s + queue_s + prefill_s) / s_per_token
        return (
            seconds, target, held, tokens, running, rtt_s, line_s, queue_s, prefill_s, base_s,
            memory_s, load_s, others_s,
        )  # fmt: skip

    def _arrived_s(self, peer: Peer, rtt_s: float, typical_s: float, forwarded: int) -> float:
        """Of what has come there since the digest left: what this router forwarded is counted, what
        others did is expected. `typical_s`: one more request's share of the region's time."""
        age_s = self._now - peer.seen_at + rtt_s / 2
        unseen = forwarded + peer.requests_per_s * age_s
        return min(WAIT_S_MAX, max(0.0, unseen - peer.free(self._model)) * typical_s)
