"""What an agent's core knows: its tables, and the effects of the event at hand. No rules.

The rules are functions of the modules above this one; each one's docstring says what it reads and
writes here. Tables that keep a rule of their own (`requests`, `routers`, `engine_load`, …) know
nothing of this state.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from agents.core.cut_requests import CutRequests
from agents.core.effects import AgentEffect
from agents.core.engine_health import EngineHealth, HangDetector
from agents.core.engine_load import EngineLoad
from agents.core.heartbeat_pace import HeartbeatPace
from agents.core.known_speed import NO_PROMPT, FirstToken, KnownSpeed
from agents.core.offline_admission import OfflineAdmission
from agents.core.replica_config import ReplicaConfig
from agents.core.requests import AgentRequest, RequestTables
from agents.core.routers import Fence, HandoffAcks, RouterLiveness
from schemas import subjects
from schemas.ids import ModelId
from schemas.state import ReplicaState

ENDED_MAX = 4096  # offline requests, remembered between two scrapes


@dataclass(slots=True)
class AdapterLoad:
    """One load under way, with the requests that wait for it and their bodies, by inbox."""

    began_at: float
    instead_of: ModelId | None
    waiting: dict[str, tuple[AgentRequest, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class AdapterTable:
    """LoRA adapters of the engine. Seconds of loads are as measured."""

    models: tuple[ModelId, ...] = ()  # of the engine, without adapters
    used_at: dict[ModelId, float] = field(default_factory=dict)  # of those loaded: last needed
    loads: dict[ModelId, AdapterLoad] = field(default_factory=dict)
    changed_at: float = -inf  # a load ended
    failed_until: dict[ModelId, float] = field(default_factory=dict)
    load_s: dict[ModelId, float] = field(default_factory=dict)
    usual_s: float | None = None  # of any of them


@dataclass(slots=True)
class OfflineTable:
    """What is kept of offline requests beside their records."""

    admission: OfflineAdmission
    bodies: dict[str, bytes] = field(default_factory=dict)  # of those that the admission has queued
    # Of those that have left the engine since the last scrape began: when sent, when ended.
    ended: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=ENDED_MAX))
    done: int = 0
    tokens: int = 0


@dataclass(slots=True)
class MeasuredPrompt:
    """A prompt of the speed probe at the engine."""

    counts: bool = True  # its time is the engine's, for the model that is served now
    stopped: bool = False


@dataclass(slots=True)
class SpeedTable:
    """What the probe of the engine's prefill speed has measured. `dice`: for its prompts."""

    enabled: bool
    dice: Random
    is_wanted: bool
    known: KnownSpeed | None = None  # what it found
    prompt: MeasuredPrompt | None = None  # at the engine now
    ended_at: float = -inf  # of the last prompt
    idle_since: float = inf
    models: tuple[ModelId, ...] = ()  # that the rest is about
    short: list[FirstToken] = field(default_factory=list)
    long: list[FirstToken] = field(default_factory=list)
    before: FirstToken = NO_PROMPT  # whose pace limits the long ones
    stops: int = 0
    not_before: float = -inf


class AgentState:
    """Of one agent. Times are seconds on the clock of its events."""

    def __init__(self, replica: ReplicaConfig) -> None:
        self.replica = replica
        self.work_subject = subjects.work(replica.region, replica.replica)
        self.requests = RequestTables()
        self.routers = RouterLiveness(replica.region)
        self.acks = HandoffAcks()
        self.fence = Fence(replica.region)
        self.engine = EngineLoad(
            outstanding_max=replica.outstanding_max,
            batch_max=replica.batch_max,
            counts_own=replica.counts_own,
        )
        self.health = EngineHealth()
        self.hangs = HangDetector(replica.load_s)
        self.cuts = CutRequests()
        self.adapters = AdapterTable()
        offline = replica.offline
        self.offline = None if offline is None else OfflineTable(OfflineAdmission(offline))
        # Another seed at each start: no prompt comes twice.
        probes = replica.probes_speed and replica.computes(None)
        self.speed = SpeedTable(probes, Random(replica.epoch), probes)
        self.leaving: ReplicaState | None = None  # DRAINING, then GONE
        # Of heartbeats; requests are counted since the epoch began.
        self.seq = self.served_total = self.refused_total = 0
        self.beat_sent_at = self.beat_due_at = -inf
        self.pace = HeartbeatPace(replica.heartbeat_s)
        self.published: tuple[object, ...] | None = None  # what must be published at once
        self.effects: list[AgentEffect] = []  # of the event at hand; the host gets a copy
        self.emit: Callable[[AgentEffect], None] = self.effects.append
        """Ask the host for it, after those before."""
