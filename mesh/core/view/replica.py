"""One replica as a router knows it: its last heartbeat, and what was handed to it since.

What is read of every replica for every request is computed once per heartbeat, or counted with
every hand-off, and is an attribute.

A replica with nothing to do sends fewer heartbeats, and each says when the next one comes at the
latest (`Heartbeat.next_within_s`): its silence counts from 0.1 s before that. Once it is given
something it has to speak at once, and its silence counts from then on.

A hand-off takes room from the moment it is sent until a heartbeat counts it (`Heartbeat.taken`) or
it is over. When its answer begins it waits no longer, but it still occupies the batch slot that the
last heartbeat showed free.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import Heartbeat, ModelCard, PrefillPrior, ReplicaState, longer_s

REPLICA_NAMES_KEPT = 4096
LOAD_START_S = 1.0  # of an adapter, before a load was measured: a small one from a local disk


@dataclass(slots=True)
class UnseenHandoff:
    """One hand-off that no heartbeat has confirmed."""

    sent_at: float
    tokens: int
    prefill_tokens: int
    waits: bool = True


class UnseenHandoffs:
    """One replica's, by number, the oldest first."""

    def __init__(self) -> None:
        self._unseen: dict[int, UnseenHandoff] = {}
        self._reserved: dict[int, int] = {}  # tokens of prompts that are computed elsewhere
        self.count = 0
        self.tokens = 0  # their prompt tokens
        self.waiting = 0  # those whose answers have not begun
        self.prefill_tokens = 0  # of those, still to be computed

    def __len__(self) -> int:
        return self.count

    @property
    def is_awaited(self) -> bool:
        """Whether the replica was sent something that no heartbeat has confirmed."""
        return bool(self._unseen)

    def add(self, number: int, tokens: int, prefill_tokens: int, now: float) -> None:
        """Count work that is being sent. Numbers rise."""
        self._unseen[number] = UnseenHandoff(now, tokens, prefill_tokens)
        self.count += 1
        self.tokens += tokens
        self.prefill_tokens += prefill_tokens
        self.waiting += 1

    def reserve(self, number: int, tokens: int) -> None:
        """Count work that will be sent, under a number that no heartbeat will confirm."""
        self._reserved[number] = tokens
        self.count += 1
        self.tokens += tokens

    def began(self, number: int) -> None:
        handoff = self._unseen.get(number)
        if handoff is not None and handoff.waits:
            handoff.waits = False
            self.waiting -= 1
            self.prefill_tokens -= handoff.prefill_tokens

    def over(self, number: int) -> None:
        handoff = self._unseen.pop(number, None)
        if handoff is not None:
            self.count -= 1
            self.tokens -= handoff.tokens
            if handoff.waits:
                self.waiting -= 1
                self.prefill_tokens -= handoff.prefill_tokens
        elif (tokens := self._reserved.pop(number, None)) is not None:
            self.count -= 1
            self.tokens -= tokens

    def confirm(self, last: int) -> None:
        """A heartbeat counts hand-offs up to number `last`."""
        while self._unseen and (first := next(iter(self._unseen))) <= last:
            self.over(first)

    def expire(self, sent_before: float) -> None:
        """Hand-offs that no heartbeat confirmed for so long were lost, or have been served."""
        while self._unseen:
            number, handoff = next(iter(self._unseen.items()))
            if handoff.sent_at >= sent_before:
                return
            self.over(number)


class ForwardedAnswer(NamedTuple):
    """An answer that a replica sends to a peer's client."""

    inbox: str
    deadline: float


@dataclass(slots=True)
class Replica:
    """One replica: its last heartbeat and what was handed to it since."""

    heartbeat: Heartbeat
    seen_at: float
    silent_from: float = field(init=False)  # from when on its silence counts
    on_the_way: UnseenHandoffs = field(default_factory=UnseenHandoffs)
    refused_at: float | None = None  # the agent refused work since its last heartbeat
    relayed: deque[ForwardedAnswer] = field(default_factory=deque)  # to peers, the oldest first
    # By its last heartbeat: requests in it, how many more its agent takes (0 if it isn't ready, or
    # doesn't report it), and KV memory that is not assigned to requests.
    inside: int = field(init=False)
    room: int = field(init=False)
    kv_reported_tokens: float | None = field(init=False)
    # Seconds per prompt token and of every first token, as its agent learned them, or else as it
    # knew them before; None where unknown.
    prefill_line: tuple[float | None, float | None] = field(init=False)
    cards: Mapping[ModelId, ModelCard] = field(default_factory=dict)
    prior: PrefillPrior | None = None
    # As of the table's last update: its load; its agent takes more work; it is ready and has none.
    settled_load: int = -1
    takes: bool = False
    is_idle: bool = False

    def __post_init__(self) -> None:
        self.update(self.heartbeat, self.seen_at)

    def update(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat.

        The agent's own count of requests is complete; the engine's may include work of others.
        """
        self.heartbeat, self.seen_at, self.refused_at = beat, now, None
        self.silent_from = now
        if not self.on_the_way.is_awaited:  # else it speaks as soon as it gets that
            self.silent_from += longer_s(beat.next_within_s)
        if beat.cards:  # sent now and then: the last ones hold
            self.cards = beat.cards
        if beat.prefill_prior is not None:
            self.prior = beat.prefill_prior
        self.prefill_line = beat.prefill_s_per_token, beat.prefill_base_s
        if beat.prefill_s_per_token is None and self.prior is not None:
            self.prefill_line = self.prior.s_per_token, self.prior.base_s
        self.inside = max(beat.outstanding, (beat.running or 0) + (beat.pending or 0))
        is_ready, most = beat.state is ReplicaState.READY, beat.outstanding_max
        self.room = most - beat.outstanding if is_ready and most is not None else 0
        self.kv_reported_tokens = None
        if beat.kv_capacity_tokens is not None and beat.kv_used_ratio is not None:
            free = beat.kv_capacity_tokens * (1.0 - beat.kv_used_ratio)
            self.kv_reported_tokens = free - (beat.prefill_queued_tokens or 0)

    def load_s(self, model: ModelId) -> float:
        """Seconds until its engine has loaded that adapter: 0 if it has, and for a model."""
        beat = self.heartbeat
        if model in beat.loadable:
            load_s = beat.loadable[model]
        elif model in beat.loading:
            load_s = beat.loading[model]
        else:
            return 0.0
        return LOAD_START_S if load_s is None else load_s

    @property
    def pending(self) -> int | None:
        """Requests waiting in the engine or on their way there; None if not reported."""
        known = self.heartbeat.pending
        return None if known is None else known + self.on_the_way.waiting

    @property
    def load(self) -> int:
        """Requests in or on their way into this replica: what "least load" compares."""
        return self.inside + self.on_the_way.count

    @property
    def kv_free_tokens(self) -> float | None:
        """KV memory not assigned to requests, below 0 if too much was; None if unknown."""
        free = self.kv_reported_tokens
        return None if free is None else free - self.on_the_way.tokens

    def prefill_queue_tokens(self, now: float, s_per_token: float) -> float | None:
        """Prompt tokens this replica still has to compute; None if unknown.

        The heartbeat's queue, less what it has computed since at `s_per_token`, and what was
        handed off since.
        """
        queued = self.heartbeat.prefill_queued_tokens
        if queued is None:
            return None
        old = queued - (now - self.seen_at) / s_per_token if s_per_token else queued
        return (old if old > 0.0 else 0.0) + self.on_the_way.prefill_tokens


# Names are unique inside a region only. A router that has adopted a region knows that region's
# replicas as `<region>/<replica>`; no name contains a slash.

SLASH = "/"


class RegionAndReplica(NamedTuple):
    """A name's parts; `region` is None for a replica of this region."""

    region: RegionId | None
    replica: ReplicaId


def replica_name_at(region: RegionId, replica: ReplicaId, home: RegionId) -> ReplicaId:
    """The name in the tables of a router of `home`."""
    return replica if region == home else ReplicaId(f"{region}{SLASH}{replica}")


def is_adopted(name: ReplicaId) -> bool:
    """Whether that is a replica of another region."""
    return SLASH in name


@lru_cache(REPLICA_NAMES_KEPT)  # for each hand-off
def split_replica_name(name: ReplicaId) -> RegionAndReplica:
    """The name on the bus."""
    region, slash, replica = name.rpartition(SLASH)
    return RegionAndReplica(RegionId(region) if slash else None, ReplicaId(replica))
