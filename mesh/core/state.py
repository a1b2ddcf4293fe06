"""What a router's core knows: its tables, without a rule.

The rules are functions over it, in `lifecycle`, `cluster_events` and `router`: the docstring of
each of these modules says what it reads and writes here, its callees' share not included, and a
test holds it to that. Tables that keep a rule of their own (the placer, the hold queue, leases,
gossip, …) stand on lower floors and know nothing of this state.
"""

from collections.abc import Callable, Mapping
from random import Random

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.held_prefixes import HeldPrefixes
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.membership.adoption import Ownership
from mesh.core.membership.handed_back import HandedBack
from mesh.core.membership.known_models import KnownModels
from mesh.core.membership.region_digest import RegionalDigest
from mesh.core.model import effects as fx
from mesh.core.model.model_targets import ModelTargets
from mesh.core.model.rates import EventRate, ReleasePace
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import Placer
from mesh.core.policies import PolicyMakers
from mesh.core.policies.base import Destination
from mesh.core.requests.fair_shares import FairShares
from mesh.core.requests.hold_queue import HoldQueue, Need, Turn
from mesh.core.requests.record import RequestRecord
from mesh.core.requests.retry_after import RetryAfter
from mesh.core.requests.retry_budget import RetryBudget
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, RouterId

BEGUN_WINDOW_S = 10.0
NO_KEY = -1

Reports = dict[tuple[str, ...], tuple[object, ...]]  # by replica, or region and router


class RouterState:
    """Of one router. Times are seconds on its clock."""

    def __init__(
        self,
        *,
        region: RegionId,
        router: RouterId,
        epoch: int,
        settings: RouterSettings,
        dice: Random,
        makers: PolicyMakers | None = None,
        peers: tuple[RegionId, ...] = (),
    ) -> None:
        """`makers`: policies by name, `mesh.core.policies.POLICIES` unless given.

        `peers`: regions that this one adopts when they lose their routers, and that adopt it.
        """
        self.region, self.settings, self.dice = region, settings, dice
        self.draining = False  # own clients are served to the end, and no new ones
        self.effects: list[fx.Effect] = []  # of the event in hand
        self.emit: Callable[[fx.Effect], None] = self.effects.append
        # What this router believes of others.
        self.replicas = ReplicaTable(router, settings)
        self.peers = PeerTable(settings, region)
        self.models = KnownModels()
        self.gossip = Gossip(
            Origin(region, router), epoch, settings, self.emit, self.replicas.remembers
        )
        self.held_prefixes = HeldPrefixes(self.replicas)
        # Placing.
        self.targets = ModelTargets(settings.models)
        self.placer = Placer(settings, self.replicas, self.peers, dice, makers, region, self.gossip)
        # A request that has gone to a replica, and that policies are still to learn of: when, too.
        self.unlearned: tuple[Request, Destination, float] | None = None
        # Requests, by key: all that have not ended; the held ones; when a peer's router was last
        # sent HELD of its held one.
        self.inflight: dict[int, RequestRecord] = {}
        self.held = HoldQueue(settings.hold_max, self.targets.hold_max)
        self.told_held_at: dict[int, float] = {}
        self.retries = RetryBudget()
        # Trying held requests: those for which a place was available when last tried; when that
        # was; what replicas and peers had reported when last compared, and whether it has changed.
        self.choosy: dict[int, Need] = {}
        self.tried_at = float("-inf")
        self.replica_reports: Reports = {}
        self.peer_reports: Reports = {}
        self.has_news = False
        # The order of tries: by key, of the first held ones; when a prompt's tokens to compute were
        # estimated, and how many; the same of one newcomer; seconds a token on the middle replica.
        self.turns: dict[int, Turn] = {}
        self.uncached: dict[int, tuple[float, float]] = {}
        self.newcomer: tuple[int, float] = NO_KEY, 0.0
        self.s_per_token: dict[ModelId, float] = {}
        # What tenants were given, by work, where several have requests; weights that are not 1.
        self.shares: dict[ModelId, FairShares] = {}
        self.weights: Mapping[str, float] = dict(settings.tenant_weights)
        # How fast queues move, by work, and who was told to retry; attempts begun, held before or
        # not; held needs that no replica serves now.
        self.paces: dict[ModelId, ReleasePace] = {}
        self.retry_after: dict[ModelId, RetryAfter] = {}
        self.begun = EventRate(BEGUN_WINDOW_S)
        self.absent: set[Need] = set()
        # Membership: leases; this region's digest; replicas that were handed back; regions whose
        # heartbeats are received.
        self.ownership = Ownership(region, router, peers, settings, self.peers, dice)
        self.digest = RegionalDigest(
            region, router, epoch, settings, self.replicas, self.held, self.peers
        )
        self.handed_back = HandedBack(region, settings)
        self.subscribed: set[RegionId] = set()
