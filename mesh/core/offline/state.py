"""What a batch runner's core knows: its tables, without a rule.

The rules are functions of the other modules of this folder; the docstring of each says what it
reads and writes here. Tables that keep a rule of their own (`lines`, `queues`, `jobs`, `regions`,
`forecast`, `pace`, `backoff`, `prefixes`) know nothing of this state.
"""

from dataclasses import dataclass
from math import inf
from random import Random

from mesh.core.model.settings import RouterSettings
from mesh.core.offline.backoff import Backoff
from mesh.core.offline.deadlines import Pace
from mesh.core.offline.effects import OfflineEffect
from mesh.core.offline.forecast import Forecast
from mesh.core.offline.jobs import Jobs, UnservedModels
from mesh.core.offline.line_regions import Regions
from mesh.core.offline.lines import Window
from mesh.core.offline.prefixes import PrefixMemory
from mesh.core.offline.queues import Queues
from mesh.core.offline.settings import OfflineSettings
from mesh.core.placement.residency import Residency
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Lease

# Of a replica that refused or failed: another runner of the region may have taken its room.
BACKOFF_S, BACKOFF_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class OfflineCounts:
    """Since the start."""

    given: int = 0  # attempts at replicas of this region
    forwarded: int = 0  # attempts through peers
    raised: int = 0  # of both, with online priority
    answered: int = 0
    refused: int = 0
    preempted: int = 0
    failed: int = 0
    errors: int = 0  # lines whose result is an error of ours
    released: int = 0
    peer_lines: int = 0  # peers' lines placed here
    tokens: int = 0  # prompts and answers of lines answered


class RunnerState:
    """Of one runner. Times are seconds on its clock."""

    def __init__(
        self,
        *,
        region: RegionId,
        runner: RouterId,
        epoch: int,
        settings: OfflineSettings,
        dice: Random,
        unix_at_zero: float,
    ) -> None:
        """`runner`: the name in `Heartbeat.taken` and of its inboxes. `unix_at_zero`: seconds since
        1970 when the runner's clock shows 0, for the time of day."""
        self.region, self.runner, self.epoch, self.settings = region, runner, epoch, settings
        self.effects: list[OfflineEffect] = []
        self.emit = self.effects.append
        self.counts = OfflineCounts()
        # The region's replicas. One whose last heartbeat is older than `late_s` gets no lines.
        of_routers = RouterSettings(ground=settings.ground)
        self.replicas, self.late_s = ReplicaTable(runner, of_routers), of_routers.heartbeat_late_s
        self.backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self.residency = Residency(region, settings.ground)
        self.lease: Lease | None = None  # by which some region owns them
        self.leased_at = -inf
        self.memory = PrefixMemory()  # which of them was given which prompts of this region
        self.regions = Regions(region, settings.ground)
        # Lines and jobs.
        self.queues = Queues(
            dice, utility_ratio=settings.utility_ratio, fair_share=settings.fair_share
        )
        self.window = Window(settings.window_lines, settings.window_bytes, self.queues)
        self.jobs = Jobs(self.window, settings.fair_share)
        self.unserved = UnservedModels(settings.unserved_s_max)
        self.forecast = Forecast(unix_at_zero)
        self.pace = Pace(self.forecast, self.regions)
        # Attempts by the line's key, the oldest first: when each began; when its last frame came;
        # when a peer was asked. And those at each replica.
        self.began_at: dict[int, float] = {}
        self.last_frame_at: dict[int, float] = {}
        self.asked_at: dict[int, float] = {}
        self.at_replica: dict[ReplicaId, dict[int, None]] = {}
        # Placement: when peers were looked at; when a replica for which no line was found may be
        # looked at again; the highest price at which each job's lines go out.
        self.placed_at = -inf
        self.look_again_at: dict[ReplicaId, float] = {}
        self.highest_price: dict[tuple[str, ModelId], float] = {}
        self.planned_at = -inf
        # Peers' lines: the prompts of them that replicas were given; and since the last look,
        # tokens placed, and models of which some were refused for want of room.
        self.peer_memory = PrefixMemory()
        self.peer_tokens: dict[ModelId, int] = {}
        self.lacked_room: dict[ModelId, None] = {}
        # The core's own course.
        self.drain_until: float | None = None
        self.fetched_at = self.second_at = -inf
        self.saved_at: float | None = None
        self.published = 0  # states

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.drain_until is not None
