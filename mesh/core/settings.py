"""The router's tunables. Each says its unit, where its default comes from, and what it trades."""

from dataclasses import dataclass
from math import isfinite

from mesh.core.region.pushing import PENDING, Pushing
from mesh.core.waiting.hold_order import HoldOrder
from schemas.exchange import HOPS_MAX, Priority
from schemas.gossip import BLOCKS_MAX
from schemas.residency import OPEN_GROUND, Ground

MAY_BE_ZERO = (
    "peer_queue_max",
    "hops_max",
    "trie_bytes_per_s",
    "siblings_bytes_per_s",
    "lease_s",
    "warm_idle_share",
    "queue_delay_s_max",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Validated at construction: a value out of range raises ValueError and says what fits."""

    policy: str = "mesh"
    # Other policies for some classes of requests, as (priority, policy) pairs.
    policy_by_priority: tuple[tuple[Priority, str], ...] = ()
    pushing: Pushing = PENDING  # when a replica may be given work
    hold_order: HoldOrder = HoldOrder.FIRST_COME
    # Peers with a longer hold queue are not available (SkyWalker Algorithm 1, tau: "small
    # buffer for newly arriving requests"; 10 is what its authors' balancer uses).
    peer_queue_max: int = 10
    # What a client of this region may wait for a first token because of foreign work, in seconds:
    # peers' requests that would make it longer are refused. None takes whatever fits.
    own_ttft_goal_s: float | None = None
    # Regions that a request may pass: 1 forwards it once, 2 lets the peer that was asked forward it
    # once more, and so on, up to HOPS_MAX.
    hops_max: int = 1
    hold_max: int = 1000  # requests held per router; beyond it new ones are shed at once
    hold_s_max: float = 60.0  # a held request is shed after this long
    # A request that names no objective is refused once it would be held longer than this, as far as
    # the pace of the line tells; 0: only hold_max and hold_s_max bound the line. People stay with a
    # dialogue for about ten seconds without an answer (Nielsen, Usability Engineering, ch. 5), and
    # objectives for first tokens in the literature are 0.2 to 10 s: whoever waits longer has mostly
    # left or asked again, and what is computed for them is missing elsewhere.
    queue_delay_s_max: float = 10.0
    request_s_max: float = 600.0  # default deadline, from arrival to last byte
    failures_max: int = 3  # attempts that may fail under one request before its client hears of it
    refusals_max: int = 32  # refusals cost a millisecond, but not for ever
    # Three heartbeats late: choose others first. Twenty: the replica is lost, and what it has
    # not begun to answer is placed again.
    heartbeat_late_s: float = 0.3
    heartbeat_lost_s: float = 2.0
    heartbeat_blind_s: float = 30.0  # nobody is heard at all: work on with the last view so long
    digest_late_s: float = 0.35  # three digests and a link's jitter; a peer that late is yellow
    digest_lost_s: float = 1.0  # ten digests; a peer that silent is red and gets no work
    peer_reply_s: float = 2.0  # beyond the round trip: a peer must place or refuse in this time
    # A hand-off that no heartbeat has confirmed after this long was lost or has been served.
    handoff_s_max: float = 1.0
    # Engines that don't say how large their batch is get this many hand-offs per heartbeat.
    handoffs_blind_max: int = 4
    index_blocks_max: int = 65_536  # per owner: 16 MiB of prompt text, some 4 M tokens of KV
    relayed_max: int = 4096  # foreign answers watched per replica, to tell peers of its loss
    digest_s: float = 0.1
    # Who owns a region's replicas is settled for so long. A region without routers is served by a
    # neighbour soon after; a router that stands still for longer finds its replicas adopted.
    # The same in all regions; 0: no region is ever adopted.
    lease_s: float = 1.0
    # Prefixes told to peers. 0.25 s is little beside a round trip and the time that a prompt
    # needs to be asked for again, and makes few, full messages.
    trie_s: float = 0.25
    trie_bytes_per_s: int = 65_536  # on each link, repairs included; 0 tells nothing
    # Heard of one origin: four times what it tells by default, so that peers may differ.
    trie_heard_bytes_per_s: int = 262_144
    # Whole sets for routers of the same region that start, over its own bus: a region's 100,000
    # blocks in a quarter of a second. 0: siblings are told nothing.
    siblings_bytes_per_s: int = 4_194_304
    trie_blocks_max: int = 16_384  # told at a time: 1 M tokens of prompts, 150 kB as a whole
    e2_window_s: float = 180.0  # e2: how far back a target's load reaches (Preble 3.2: H)
    explore_below: float = 0.5  # skywalker: a match under one half does not bind (SkyWalker 3.2)
    # Proactive warming (GORGO 8), off at 0: of the seconds that replicas stand idle, the share
    # that may be spent on computing hot prefixes before they are asked for.
    warm_idle_share: float = 0.0
    warm_kv_used_max: float = 0.5  # a replica that uses more of its KV memory is not warmed
    warm_bytes_max: int = 67_108_864  # of the beginnings of requests that are kept for it
    warm_trend_s: float = 900.0  # demand rises if it does over this; uses fade with it
    ground: Ground = OPEN_GROUND  # which region carries which residency labels

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float):
                _check(name, value)
        if self.explore_below > 1.0:
            raise ValueError(f"explore_below is a part of one, not {self.explore_below}")
        for name in ("warm_idle_share", "warm_kv_used_max"):
            if getattr(self, name) > 1.0:
                raise ValueError(f"{name} is a part of one, not {getattr(self, name)}")
        if self.trie_blocks_max > BLOCKS_MAX:
            raise ValueError(f"trie_blocks_max must be at most {BLOCKS_MAX}: peers keep no more")
        if self.hops_max > HOPS_MAX:
            raise ValueError(f"hops_max is at most {HOPS_MAX}: no request says more of its way")
        if self.heartbeat_late_s > self.heartbeat_lost_s:
            raise ValueError("heartbeat_late_s must not exceed heartbeat_lost_s")
        if self.digest_late_s > self.digest_lost_s:
            raise ValueError("digest_late_s must not exceed digest_lost_s")


def _check(name: str, value: float) -> None:
    if not isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}; a large number will do")
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        fits = "0 or more" if name in MAY_BE_ZERO else "more than 0"
        raise ValueError(f"{name} must be {fits}, not {value}")
