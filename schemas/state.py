"""What people and routers read of the fleet's state: heartbeats, digests, leases, as JSON.

A field that an engine does not report is null. Null is a tier of its own and never means zero
(PEERS: routers that read "missing" as 0 herd onto the replica they know least about).
Versions: `v` rises when a field changes its meaning; new fields alone do not raise it, because
readers ignore fields they don't know. The texts under the fields are the descriptions in
`schemas/json/`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal, TypeVar, overload

import orjson
from pydantic import ConfigDict, Field

from schemas.ids import (
    NAME_PATTERN,
    PATH_CHARS_MAX,
    PATH_PATTERN,
    ValidModelId,
    ValidRegionId,
    ValidReplicaId,
    ValidRouterId,
)
from schemas.json_messages import decoder
from schemas.kv_transfer import KvTransfer
from schemas.listed_replicas import LISTED_MAX, ListedReplicas, ListPlace
from schemas.numbers import Count, Seconds
from schemas.residency import LABELS_MAX, Label

# Far above any real term, which counts writes of a lease, four a second; and far below the largest
# integer, so that after a false claim of the highest term numbers are left.
TERM_MAX = 2**48
Term = Annotated[int, Field(ge=0, le=TERM_MAX)]
# How far one claim raises the term that an agent or a router knows. At four writes a second all
# terms last for two years; a true claim that is a year of writes ahead is reached in a minute.
TERM_STEP = 2**20
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
# Between two heartbeats, or digests, of which the first does not say otherwise.
USUAL_S = 0.1
NEXT_WITHIN_S_MAX = 2.0  # that is believed of what a message says of the next one
PerSecond = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
ValidLabels = Annotated[
    tuple[Annotated[Label, Field(pattern=NAME_PATTERN)], ...], Field(max_length=LABELS_MAX)
]


class ReplicaState(StrEnum):
    """Whether a replica takes work."""

    STARTING = "starting"  # the agent is up, the engine has not answered yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DOWN = "down"  # the agent is up, the engine does not answer
    GONE = "gone"  # the agent's last heartbeat


class DownReason(StrEnum):
    """Why a replica is down."""

    UNREACHABLE = "unreachable"  # scrapes of the engine fail
    HUNG = "hung"  # it answers scrapes, takes requests and computes none
    ASLEEP = "asleep"  # an operator put the engine to sleep


CARDS_MAX = 8  # of one replica or region; they are repeated every second
CARD_CHARS_MAX = 256
CardText = Annotated[str, Field(max_length=CARD_CHARS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What an engine reports of a model in its `/v1/models`, for clients to read there."""

    created: Count | None = None
    """Seconds since 1970."""
    owned_by: CardText | None = None
    root: CardText | None = None
    """What was loaded: a name or a path."""
    parent: CardText | None = None
    """The model that an adapter was made for."""
    max_model_len: Count | None = None
    """Most tokens of prompt and answer together."""


PAGE_PROBLEM_CHARS_MAX, DOWN_DETAIL_CHARS_MAX = 80, 160
LOOKS_LIKE = "looks like "  # of an engine of another kind than its agent was told
PATHS_MAX = 16  # that a heartbeat or digest names
OptionalPath = Annotated[str, Field(pattern=PATH_PATTERN, max_length=PATH_CHARS_MAX)]
Cards = Annotated[dict[ValidModelId, ModelCard], Field(max_length=CARDS_MAX)]


LACKING_MODELS_MAX = 64  # that a heartbeat names
Lacking = Annotated[
    dict[ValidModelId, Annotated[tuple[OptionalPath, ...], Field(max_length=PATHS_MAX)]],
    Field(max_length=LACKING_MODELS_MAX),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRoutes:
    """What is known of an engine's optional paths beside those that it is known to answer."""

    unknown: Annotated[tuple[OptionalPath, ...], Field(max_length=PATHS_MAX)] = ()
    """Paths of which it is not known, for some of its models, whether it answers them: a request
    would tell."""
    lacking: Lacking = field(default_factory=dict)
    """Models for which it does not answer some of these paths, or of `paths`, each with those."""


ADAPTERS_MAX = 64  # that one replica may load, or models that it has not loaded
LoadTimes = Annotated[dict[ValidModelId, Seconds | None], Field(max_length=ADAPTERS_MAX)]


class Health(StrEnum):
    """How alive a region is, by the gaps between its digests."""

    GREEN = "green"  # its digests arrive as often as they should
    YELLOW = "yellow"  # some are missing; it may still get requests
    RED = "red"  # none arrive: it gets no work


# Seconds per prompt token that an engine may have: from a tenth of a small model's on the quickest
# GPU to a large one's on a CPU.
SLOPE_MIN, SLOPE_MAX = 1e-7, 0.1
PriorTokens = Annotated[int, Field(ge=1, le=100_000_000)]
PriorSeconds = Annotated[float, Field(ge=0.0, le=3600.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPrior:
    """How long an engine's first tokens take, as known before it has answered requests."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # in a file that forbids others, too

    short_tokens: PriorTokens
    """A short prompt, of which nothing is cached, alone on the engine."""
    short_s: PriorSeconds
    """Its time to first token."""
    more_tokens: PriorTokens
    """By how much a long prompt is longer."""
    more_s: PriorSeconds
    """By how much its first token comes later."""
    error: Annotated[float, Field(ge=0.01, le=10.0)]
    """How far these may be wrong, relative: 0.2 where they are expected to be within a fifth."""

    @property
    def s_per_token(self) -> float:
        return self.more_s / self.more_tokens

    @property
    def base_s(self) -> float:
        return max(0.0, self.short_s - self.short_tokens * self.s_per_token)


RESULTS_MAX = 64  # last requests that are counted
# An engine fails when so many requests failed there one after the other, or this share of at least
# so many.
FAILING_IN_A_ROW, FAILING_SHARE, FAILING_OF_MIN = 3, 0.5, 5
FAILURE_CHARS_MAX = 80
AVOIDED_MAX, AVOIDED_CHARS_MAX = 32, 160  # places that a digest names, and why of each
MOVING_MAX = 32  # replicas that a digest names; others follow when these are empty


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResults:
    """How the last requests that an engine was given ended, of those that it answered or failed."""

    failed: Annotated[int, Field(ge=0, le=RESULTS_MAX)]
    """Of the last `of`, those that the engine failed: a server error, no connection, an error as
    the first event, no answer, a broken one."""
    of: Annotated[int, Field(ge=1, le=RESULTS_MAX)]
    in_a_row: Annotated[int, Field(ge=0, le=RESULTS_MAX)]
    """The latest of them that failed one after the other; 0 where the last one was answered."""
    what: Annotated[str, Field(max_length=FAILURE_CHARS_MAX)]
    """Of the last failure: "HTTP 500", "no connection", "an error as its first event"."""

    @property
    def is_failing(self) -> bool:
        """Whether the engine fails the requests that it is given, instead of a few of them."""
        return self.in_a_row >= FAILING_IN_A_ROW or self._fails_many

    @property
    def words(self) -> str:
        """For people, after "fails" or "failed": "9 of its last 10 requests, HTTP 500"."""
        if self.in_a_row >= FAILING_IN_A_ROW and not self._fails_many:
            return f"its last {self.in_a_row} requests, {self.what}"
        return f"{self.failed} of its last {self.of} requests, {self.what}"

    @property
    def _fails_many(self) -> bool:
        return self.of >= FAILING_OF_MIN and self.failed >= FAILING_SHARE * self.of


# On what prompts take of a request that waits for them: beside running answers they take longer.
WAIT_FACTOR = 2.0
SLOT_MIN_S = 0.1  # a scrape is that old


@dataclass(frozen=True, slots=True)
class FirstWaiting:
    """How long a request has waited in an engine, and for what prompts."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    seconds: PriorSeconds
    tokens: Count
    """Of its prompt, and of those before it, computed or not, since it was sent."""

    def slot_s(self, s_per_token: float, base_s: float) -> float:
        """Seconds of that for a slot in a full batch, at that speed of prompts; 0.0 if none."""
        slot_s = self.seconds - WAIT_FACTOR * (base_s + s_per_token * self.tokens)
        return slot_s if slot_s >= SLOT_MIN_S else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One replica's state, every 100 ms and at once when it turns full or not full; up to half a
    second apart while it has nothing to do and to say."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    replica: ValidReplicaId
    epoch: Count
    """Changes at every start of the agent; the counters below start anew with it."""
    seq: Count
    """Rises by one a heartbeat inside an epoch."""
    state: ReplicaState
    engine: str
    """Kind of the engine: vllm, sglang, llamacpp, openai."""
    models: tuple[ValidModelId, ...]
    """What the engine serves now."""
    full: bool
    """Whether the agent would refuse new work now."""
    pending: Count | None
    """Requests accepted and not yet in the running batch (SkyWalker 3.3)."""
    running: Count | None
    """Requests in the running batch."""
    outstanding: Count
    """Requests taken from the bus and not finished, counted by the agent itself."""
    outstanding_max: Count | None = None
    """Most requests that the agent takes, whatever the engine could queue."""
    prefill_queued_tokens: Count | None = None
    """Prompt tokens still to be computed of requests taken whose answer has not begun, by the
    routers' estimate of what is cached, less what is done by the learned speed."""
    batch_max: Count | None = None
    """Most requests the engine runs at once."""
    batch_occupancy: Ratio | None = None
    """running / batch_max."""
    kv_used_ratio: Ratio | None = None
    """Part of the KV cache in use."""
    kv_capacity_tokens: Count | None = None
    """Tokens the KV cache holds."""
    prefill_s_per_token: Seconds | None = None
    """Learned slope of TTFT on uncached prompt tokens, in seconds per token."""
    prefill_base_s: Seconds | None = None
    """Its intercept, in seconds."""
    prefill_prior: PrefillPrior | None = None
    """The same before it is learned, of the agent's last run, a profile or a probe. Sent once a
    second; where there is none, the last one holds."""
    decode_tokens_per_s: PerSecond | None = None
    """Of one running request, the median of recent ones."""
    prefix_hit_ratio: Ratio | None = None
    """Cached tokens / prompt tokens of what this agent served."""
    engine_age_s: Seconds | None = None
    """Age of the engine reading inside this heartbeat, in seconds."""
    served_total: Count = 0
    """Requests whose answer came to its end since the epoch began, an engine's error answers among
    them."""
    refused_total: Count = 0
    """Requests refused since the epoch began."""
    taken: dict[ValidRouterId, Count] = field(default_factory=dict)
    """Last hand-off number taken from each router of this region: what a router handed off
    beyond it is still on its way and must be added to `pending`."""
    residency: ValidLabels | None = None
    """The labels that its agent vouches for; null for all that its region carries."""
    owner: ValidRegionId | None = None
    """The region that has adopted this replica, as its agent knows; null while it is its own."""
    owner_taken: dict[ValidRouterId, Count] = field(default_factory=dict)
    """The same as `taken`, of the routers of `owner`."""
    term: Term = 0
    """The highest term that this agent has received: work of a lower one is refused."""
    offline_room_tokens: Count | None = None
    """Tokens, of prompts and of the most that they may generate, that it would take of offline
    requests now; null where it takes none."""
    offline_waiting: Count = 0
    """Offline requests that it has taken and not given to its engine. No count above includes
    offline requests, neither these nor those that run."""
    offline_running: Count = 0
    """Offline requests that its engine has."""
    queue_s: Seconds | None = None
    """Seconds that an online prompt sent now would wait until the prompts before it are computed,
    as the profile's latency predictor says; null without a profile."""
    down_reason: str | None = None
    """Why it is down: unreachable, hung (it answers scrapes, takes requests and computes none) or
    asleep; null in other states."""
    cards: Cards = field(default_factory=dict)
    """What the engine reports of its models, the first of them. Sent once a second; where there are
    none, the last ones hold."""
    paths: Annotated[tuple[OptionalPath, ...], Field(max_length=PATHS_MAX)] = ()
    """Paths that its engine answers beside those of chats and completions, like
    `/v1/embeddings`."""
    held_seq: Count | None = None
    """Number of the last delta of what its engine holds (`schemas.held`); null where the engine
    reports no KV events."""
    loadable: LoadTimes = field(default_factory=dict)
    """Adapters that its engine has not loaded and that its agent would load for a request, and
    models that the engine itself would, each with the seconds that this takes, as measured; null
    before the first load."""
    loading: LoadTimes = field(default_factory=dict)
    """Adapters and models that its engine is loading, each with the seconds that this still
    takes."""
    adapters_busy: bool = False
    """Whether each adapter that its engine has is in use: none could be loaded in its place now."""
    adapters_free: Count = 0
    """Adapters that could be loaded before one had to be unloaded."""
    kv: KvTransfer | None = None
    """Its part in pairs of a prefill and a decode replica; null where it answers alone."""
    routes: KnownRoutes | None = None
    """What else is known of its optional paths; null where all of them are known, the same for all
    its models."""
    page_problem: Annotated[str, Field(max_length=PAGE_PROBLEM_CHARS_MAX)] | None = None
    """Which page of its engine can't be read, and why, while the engine is up all the same:
    "metrics: HTTP 503"; null while all can. Without that page its agent counts by itself."""
    results: EngineResults | None = None
    """How the last requests at its engine ended, where any of them failed there; null where none
    did."""
    too_many: Count | None = None
    """The most requests that its engine is given at once, after it answered 429 to more; null where
    it did not lately."""
    system_first: bool = False
    """Whether its engine moves the system turns among the messages of `/v1/messages` to the end of
    the system prompt."""
    down_detail: Annotated[str, Field(max_length=DOWN_DETAIL_CHARS_MAX)] | None = None
    """What its agent met when it last asked an engine that is starting or unreachable: "no answer
    within 1 s"; null in other states."""
    waited: FirstWaiting | None = None
    """Of the requests that wait in its engine, though its memory has room and it tells of no batch
    size, the first; null while none does, or where it is not known which."""
    next_within_s: Seconds | None = None
    """The next heartbeat comes within so many seconds, even if one is lost, or at once when a
    request does; null for 0.1."""

    @property
    def is_failing(self) -> bool:
        """Whether its engine fails the requests that it is given, by `results`."""
        return self.results is not None and self.results.is_failing


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapacity:
    """How many replicas of a region serve one model, and how many of them would take work."""

    ready: Count
    """Replicas that serve it."""
    free: Count
    """Of those, the ones that are not full."""
    wait_s: Seconds | None = None
    """Shortest time to compute the prompts already queued at one of them, in seconds."""
    running: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Requests running in each, on average."""
    kv_free_tokens: Count | None = None
    """Most KV memory that one of them has left for prompts not sent to it yet, in tokens."""
    load_s: Seconds | None = None
    """Of an adapter that none of them has loaded: the shortest time to load it, in seconds; null
    where one has it, and of models."""
    listed: Annotated[tuple[ListPlace, ...], Field(max_length=LISTED_MAX)] = ()
    """Places in the digest's `replicas` of those that serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A region's state as its router publishes it to its peers, every 100 ms and on change; up to
    0.6 s apart while it has nothing to do and to say."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    router: ValidRouterId
    """The router that sends it; a region has one or more, each sends its own view."""
    epoch: Count
    """Changes at every start of the router."""
    seq: Count
    """Rises by one a digest inside an epoch."""
    accepting: bool
    """False while the router drains."""
    replicas_ready: Count
    replicas_free: Count
    """Ready and not full: what makes a region available (SkyWalker 3.3)."""
    queue: Count
    """Requests held in this router."""
    models: dict[ValidModelId, ModelCapacity]
    """Per model, because a peer forwards a request and not a count."""
    requests_per_s: PerSecond
    """Requests that arrived at this router, per second, recently."""
    prefill_s_per_token: Seconds | None = None
    """Median over ready replicas, in seconds per uncached prompt token."""
    prefill_base_s: Seconds | None = None
    """Median over ready replicas of what every first token costs, in seconds."""
    kv_used_ratio: Ratio | None = None
    """Mean over ready replicas."""
    residency: ValidLabels | None = None
    """The labels that the region carries; null from a router that knows of none."""
    models_by_label: dict[str, dict[ValidModelId, ModelCapacity]] = field(default_factory=dict)
    """The same as `models`, over the replicas that carry one label: for each label that some
    replica of the region carries and some doesn't."""
    adopted: dict[ValidRegionId, Term] = field(default_factory=dict)
    """Regions whose replicas this router serves for them, with the term of each: they count in
    `replicas_ready`, `replicas_free` and `models`."""
    rtt_s: dict[ValidRegionId, Seconds] = field(default_factory=dict)
    """Round trips to the other regions: the nearest one adopts first. Sent once a second; where
    there are none, the last ones that this router sent hold."""
    warm_tokens: Count | None = None
    """Of routers up to 0.1 that computed prefixes in advance; no longer sent, and not read."""
    cards: Cards = field(default_factory=dict)
    """What engines report of its models, the first of them. Sent once a second; where there are
    none, the last ones hold."""
    models_by_path: Annotated[
        dict[OptionalPath, dict[ValidModelId, ModelCapacity]], Field(max_length=PATHS_MAX)
    ] = field(default_factory=dict)
    """The same as `models`, over the replicas whose engines answer that path too."""
    replicas: ListedReplicas = field(default_factory=ListedReplicas)
    """The load of some of its replicas, so that a peer can price the one that holds a prefix."""
    avoided: Annotated[
        dict[ValidReplicaId, Annotated[str, Field(max_length=AVOIDED_CHARS_MAX)]],
        Field(max_length=AVOIDED_MAX),
    ] = field(default_factory=dict)
    """Some of its region's own replicas that this router gives less work, or none for now or for a
    model, by how they answered, each with why: "failing: 3 of its last 3, HTTP 500", "slow: first
    tokens 4.1× its like", "no longer serves 'tiny'"; and for as long again as they were left
    out."""
    avoided_peers: Annotated[
        dict[ValidRegionId, Annotated[str, Field(max_length=AVOIDED_CHARS_MAX)]],
        Field(max_length=AVOIDED_MAX),
    ] = field(default_factory=dict)
    """Some of the regions to which this router forwards less, or nothing for now or for a model, as
    their answers failed, each with why; and for as long again as they were left out."""
    moving: Annotated[tuple[ValidReplicaId, ...], Field(max_length=MOVING_MAX)] = ()
    """Some of its region's own replicas whose long streams are to go on elsewhere, as an operator
    drains them."""
    next_within_s: Seconds | None = None
    """The next digest comes within so many seconds; null from a router that does not read this of
    others, whose next one comes within 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who owns the replicas of a region, until the next write or the lease's end."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    """The region of the replicas."""
    owner: ValidRegionId
    """The region whose routers may hand work to them."""
    router: ValidRouterId
    """The router of the owner that wrote this."""
    term: Term
    """Rises with every change of the owner; renewals keep it. Work of a lower term is refused."""
    lease_s: Seconds
    """A region that receives nothing newer for so long may take the lease, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineCapacity:
    """What a region would take of offline requests of one model."""

    room_tokens: Count
    """That its replicas would take now, of prompts and of the most that they may generate."""
    tokens_per_s: PerSecond | None = None
    """Offline tokens, prompts and answers, that it has computed lately, a second; null before it
    has computed any."""
    waiting_tokens: Count = 0
    """Of its own jobs' lines that it has not given to a replica."""
    slack_tokens: tuple[Count, ...] = ()
    """Offline tokens that it expects to have room for in each of the next hours, by its load of
    the last day and week; empty before it has seen enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineState:
    """A region's offline work as its batch runner publishes it to its peers, every second."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    router: ValidRouterId
    """The batch runner that sends it; a region has one or more, each sends its own view."""
    epoch: Count
    """Changes at every start of the runner."""
    seq: Count
    """Rises by one a message inside an epoch."""
    accepting: bool
    """Whether it takes other regions' offline requests."""
    models: dict[ValidModelId, OfflineCapacity]
    price: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Of a GPU hour there, in any unit that all regions share; null where none is given."""
    residency: ValidLabels | None = None
    """The labels that the region carries; null from a runner that knows of none."""
    jobs: Count = 0
    """Batch jobs of its clients that have not ended."""
    lines_waiting: Count = 0
    """Lines of these jobs that no replica has."""
    lines_running: Count = 0
    """Lines of these jobs that a replica has, here or in another region."""


T = TypeVar("T")

SIGNIFICANT = ".4g"  # digits
ROUNDED_KEPT = 1024
SMALLEST = 1e-9  # a nanosecond; of a rate, one event in thirty years


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: None) -> None: ...
@lru_cache(maxsize=ROUNDED_KEPT)  # most numbers of a heartbeat are those of the one before
def rounded(value: float | None) -> float | None:
    """A measured value as a message has it: its SIGNIFICANT digits, and 0 below SMALLEST."""
    if value is None:
        return None
    return 0.0 if -SMALLEST < value < SMALLEST else float(format(value, SIGNIFICANT))


# The last keys of a heartbeat and of a digest, of which hardly any has one, and what stands for
# them where all are null or false: inside a text their quotes would be escaped.
_LEFT_OUT = (
    b',"routes":null,"page_problem":null,"results":null,"too_many":null,"system_first":false'
    b',"down_detail":null,"waited":null',
    b"",
)
_USUAL_PACE = b',"next_within_s":null', b""
_NONE_AVOIDED = b',"avoided":{},"avoided_peers":{},"moving":[]', b""


def longer_s(next_within_s: float | None, usual_s: float = USUAL_S) -> float:
    """How much longer than usual a sender may be silent after a message that says this."""
    if next_within_s is None:
        return 0.0
    return max(0.0, min(next_within_s, NEXT_WITHIN_S_MAX) - usual_s)


def encode_state(message: Heartbeat | Digest | Lease | OfflineState) -> bytes:
    left_out = _NONE_AVOIDED if isinstance(message, Digest) else _LEFT_OUT
    return orjson.dumps(message).replace(*left_out).replace(*_USUAL_PACE)


decode_heartbeat = decoder(Heartbeat)
decode_digest = decoder(Digest)
decode_lease = decoder(Lease)
decode_offline = decoder(OfflineState)
