"""The router's tunables, with units, where each default comes from, and what it trades.

Those that operators choose in mesh.toml come from `schemas.settings.RoutingTable.as_settings`.
What one policy alone uses is no setting but an option of that policy (`mesh.core.policies`).
"""

from dataclasses import replace
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from mesh.core.model.model_targets import ModelRule
from schemas.exchange import Priority
from schemas.gossip import BLOCKS_MAX
from schemas.ids import RegionId
from schemas.residency import OPEN_GROUND, Ground
from schemas.settings import (
    MBIT_BYTES,
    MBIT_PER_S_LEAST,
    PENDING,
    WHOLE,
    Above0,
    AtLeast0,
    HopsMax,
    IntAbove0,
    IntAtLeast0,
    Option,
    PolicyName,
    PushingRule,
    QueueDelayS,
    TenantWeight,
)

SLOWEST_BYTES_PER_S = MBIT_PER_S_LEAST * MBIT_BYTES  # that a link between regions carries
BlocksMax = Annotated[int, Field(strict=True, gt=0, le=BLOCKS_MAX), WHOLE]  # peers keep no more


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RouterSettings:
    """Validated at construction: a value out of range raises ValueError that names its setting."""

    policy: PolicyName = "mesh"
    # Other policies for some classes of requests, as (priority, policy) pairs.
    policy_by_priority: tuple[tuple[Priority, PolicyName], ...] = ()
    pushing: PushingRule = PENDING
    # Peers with a longer hold queue are not available (SkyWalker Algorithm 1, tau: "small
    # buffer for newly arriving requests"; 10 is what its authors' balancer uses).
    peer_queue_max: IntAtLeast0 = 10
    # Longest time to a first token that peers' requests may cause for this region's clients, in
    # seconds; requests beyond it are refused. None: every request that fits is taken.
    own_ttft_goal_s: Above0 | None = None
    # 1: clients' requests may be forwarded to a peer region, which places them itself; 0: never.
    hops_max: HopsMax = 1
    # Requests held per router; beyond it new ones are shed at once.
    hold_max: Annotated[
        IntAbove0, Option("Most requests held while every replica is full.", "N")
    ] = 1000
    hold_s_max: Annotated[
        Above0,
        Option(
            "Longest time that a request is held, all holds together; of another region's, the "
            "time since a replica serves it.",
            "S",
        ),
    ] = 60.0
    # A request without an objective is refused if, at the rate at which held requests are placed,
    # it would be held longer than this; 0: only hold_max and hold_s_max limit the queue. Users give
    # up after about 10 s without an answer (Nielsen, Usability Engineering, ch. 5), and objectives
    # for first tokens in the literature are 0.2 to 10 s.
    queue_delay_s_max: QueueDelayS = 10.0
    request_s_max: Annotated[
        Above0,
        Option("Deadline of requests that name none, in seconds from arrival to last byte.", "S"),
    ] = 600.0
    failures_max: IntAbove0 = 3  # failed attempts of a request before its client gets an error
    continuations_max: IntAtLeast0 = 3  # times that a stream which broke goes on elsewhere
    refusals_max: IntAbove0 = 32  # per request; a refusal costs a millisecond
    # Three heartbeats late: other replicas are preferred. Twenty: the replica is lost, and its
    # requests that have no first token are placed again.
    heartbeat_late_s: Above0 = 0.3
    heartbeat_lost_s: Above0 = 2.0
    heartbeat_blind_s: Above0 = 30.0  # all replicas silent: the last view is used for so long
    digest_late_s: Above0 = 0.35  # three digests and jitter: the peer's health is yellow
    digest_lost_s: Above0 = 1.0  # ten digests: it is red, and gets no requests
    peer_reply_s: Above0 = 2.0  # beyond the round trip: for a peer to place or refuse a request
    # A hand-off that no heartbeat confirms for so long was lost, or has been answered already.
    handoff_s_max: Above0 = 1.0
    # Hand-offs per heartbeat to an engine that does not report its batch size.
    handoffs_blind_max: IntAbove0 = 4
    index_blocks_max: IntAbove0 = 65_536  # per owner: 16 MiB of prompt text, some 4 M tokens of KV
    relayed_max: IntAbove0 = 4096  # peers' requests followed per replica, to report its loss
    digest_s: Above0 = 0.1
    # While nothing is under way and nothing changes. A region without digests is adopted when they
    # are late by half a lease and its lease has run out: with 0.6 no later than with 0.1.
    digest_rest_s: Above0 = 0.6
    # A lease on a region's replicas lasts for so long after each renewal. A peer adopts the
    # replicas when it has run out. The same in all regions; 0: no region is ever adopted.
    lease_s: AtLeast0 = 1.0
    # Time between prefix deltas for peers: short beside a round trip and the pause before a prompt
    # comes again, and long enough for few, full messages.
    trie_s: Above0 = 0.25
    # On each link, repairs included, and a share of it at most; 0: no prefix gossip.
    trie_bytes_per_s: IntAtLeast0 = 65_536
    # Accepted from one origin: four times the default above, so that peers may differ.
    trie_heard_bytes_per_s: IntAbove0 = 262_144
    # Whole prefix sets for routers of this region that start: a region's 100,000 blocks in a
    # quarter of a second. 0: no gossip between routers of one region.
    siblings_bytes_per_s: IntAtLeast0 = 4_194_304
    trie_blocks_max: BlocksMax = 16_384  # published: 1 M tokens of prompts, 150 kB as one set
    # What the links to peers carry, in bytes a second.
    links: tuple[tuple[RegionId, Above0], ...] = ()
    ground: Ground = OPEN_GROUND  # which region carries which residency labels
    models: tuple[ModelRule, ...] = ()  # what holds for single models, and aliases
    # Of tenants beside others, as (tenant, weight) pairs; others' is 1.
    tenant_weights: tuple[tuple[str, TenantWeight], ...] = ()

    def __post_init__(self) -> None:
        if self.heartbeat_late_s > self.heartbeat_lost_s:
            raise ValueError("heartbeat_late_s must not exceed heartbeat_lost_s")
        if self.digest_late_s > self.digest_lost_s:
            raise ValueError("digest_late_s must not exceed digest_lost_s")

    @property
    def slowest_bytes_per_s(self) -> float:
        """What every link carries: for what all peers are sent alike."""
        return min((rate for _, rate in self.links), default=SLOWEST_BYTES_PER_S)


# What a running router takes over while requests are held and under way. All else is built into
# what was learned, agreed with other routers, or allocated at the start.
CHANGEABLE = (
    "policy",
    "policy_by_priority",
    "pushing",
    "own_ttft_goal_s",
    "hops_max",
    "queue_delay_s_max",
    "models",
    "tenant_weights",
)


def with_changes(settings: RouterSettings, wanted: RouterSettings) -> RouterSettings:
    """These settings, with what can change in a running router as in `wanted`."""
    return replace(settings, **{name: getattr(wanted, name) for name in CHANGEABLE})
