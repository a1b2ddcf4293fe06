"""A replica's engine in the twin: the model of time, its clock, and the agent's metric scrapes.

Busy time is exact: from each change of the batch to the next. Occupancy is sampled at every scrape
of a busy engine: the larger of running sequences over the most that may run and KV in use over
KV there is, because on small GPUs memory is full long before the batch is.
"""

from collections.abc import Callable
from math import inf

from agents.core.effects import LoadAdapter
from agents.core.events import EngineReading, EngineScraped, ScrapeFailed
from agents.sim.adapters import LoadedAdapters
from agents.sim.batch import EngineInternals
from agents.sim.engine import EngineSim
from agents.sim.events import SimEvent, SimRequest
from agents.sim.profiles import Profile
from mesh.sim.config import MODEL
from mesh.sim.event_queue import EventQueue
from schemas.ids import ModelId

SCRAPE_S = 0.002  # from its beginning to its reading
SCRAPE_EVERY_S = 0.05  # of an engine whose agent holds answers: the agents' default
IDLE_SCRAPE_EVERY_S = 0.1
SCRAPE_GAP_S = 0.01
MODELS_EVERY_S = 1.0
REFUSED_CONNECTION = "connection refused"


class EngineClock:
    """Maps the world's seconds to the engine's; at rate 0 it stops. Never goes back."""

    __slots__ = ("_anchor", "_latest", "_rate", "_world", "_world_anchor")

    def __init__(self, world: Callable[[], float]) -> None:
        self._world = world
        self._rate = 1.0
        self._anchor = self._world_anchor = self._latest = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can happen in the engine."""
        return self._rate == 0.0

    def now(self, at_least: float = 0.0) -> float:
        """The engine's time; `at_least` the time of its wake-up, which rounding must not miss."""
        return self.at(self._world(), at_least)

    def at(self, world_s: float, at_least: float = 0.0) -> float:
        """Its time at that moment of the world: not before the last one that was asked for."""
        now = self._anchor + (world_s - self._world_anchor) * self._rate
        if at_least > now:
            now = at_least
        if now > self._latest:
            self._latest = now
        return self._latest

    def set_rate(self, rate: float) -> None:
        """From now on so many engine seconds pass in one of the world's."""
        self._anchor, self._world_anchor = self.now(), self._world()
        self._rate = rate

    def world_at(self, at: float) -> float:
        """When the engine's clock will show `at`. Only while it isn't stopped."""
        return self._world_anchor + (at - self._anchor) / self._rate


class ReplicaEngine:
    """An EngineSim on a clock of its own, with the sums that reports need."""

    def __init__(
        self,
        profile: Profile,
        world: Callable[[], float],
        kv_tokens: int | None = None,
        adapters_max: int = 0,
    ) -> None:
        """`world`: the world's clock. `kv_tokens` replaces the profile's own."""
        self.profile = profile
        self.adapters = LoadedAdapters(adapters_max)
        self.adapter_loads = 0
        self.is_down = False
        self.busy_s = 0.0
        self.occupancy_sum = 0.0
        self.occupancy_samples = 0
        self._kv_tokens = kv_tokens
        self._world = world
        self._clock = EngineClock(world)
        self.sim = EngineSim(profile, kv_tokens=kv_tokens)
        self._idle_page: EngineReading | None = None
        self._woken_for = 0.0
        self._was_busy = False
        self._changed_at = 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether it produces no token, whatever requests it holds."""
        return self.is_down or self._clock.is_stopped

    @property
    def is_steady(self) -> bool:
        """Whether it answers, and all its requests run."""
        return not self.is_stuck and self.sim.nobody_waits

    @property
    def has_events(self) -> bool:
        """Whether something has happened that `step` has not returned yet."""
        wake_at = self.sim.wake_at
        return wake_at is not None and wake_at <= self._clock.now()

    @property
    def wake_at(self) -> float | None:
        """When to step next, in the world's time."""
        if self.is_stuck or (wake_at := self.sim.wake_at) is None:
            return None
        self._woken_for = wake_at
        return self._clock.world_at(wake_at)

    def submit(self, request: SimRequest) -> None:
        """Raises NeverFits or QueueFull."""
        self.sim.submit(request, self._clock.now())
        self._account()

    def abort(self, number: int) -> None:
        self.sim.abort(number, self._clock.now())
        self._account()

    def begin_load(self, effect: LoadAdapter) -> LoadedAdapters:
        """The adapters of this process, of which one is being loaded, instead of another one."""
        self.adapters.paths.pop(effect.instead_of or "", None)
        self.adapters.begin(effect.adapter)
        self.adapter_loads += 1
        return self.adapters

    def end_load(self, effect: LoadAdapter, into: LoadedAdapters) -> bool:
        """Its time is over. `into`: what `begin_load` returned. False if that process is gone."""
        good = into is self.adapters and not self.is_down
        into.finish(effect.adapter, effect.path if good else None)
        return good

    def step(self) -> list[SimEvent]:
        """What has happened since the last step."""
        if self.is_stuck:
            return []
        wake_at = self._woken_for
        due = self._clock.world_at(wake_at) <= self._world()
        events = self.sim.step(self._clock.now(wake_at if due else 0.0)).events
        self._account()
        return events

    def reading(self, at: float) -> EngineReading:
        """One scrape of the metrics page at that time of the world: not before the last `step`.

        While an engine is idle its page stays as it is.
        """
        if self._idle_page is not None:
            return self._idle_page
        stats = self.sim.stats(self._clock.at(at))
        queried, kv = stats.queried_tokens, stats.kv_utilization
        if stats.running:
            self.occupancy_sum += max(kv, stats.running / self.profile.max_seqs)
            self.occupancy_samples += 1
        page = EngineReading(
            waiting=stats.waiting,
            running=stats.running,
            kv_used_ratio=kv,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            prefix_hit_ratio=stats.hit_tokens / queried if queried else None,
            progress=(stats.prompt_tokens, stats.generated_tokens, kv),
        )
        if self.sim.wake_at is None:
            self._idle_page = page
        return page

    def inside(self) -> EngineInternals:
        """The state that no page of metrics shows."""
        return self.sim.inside(self._clock.now())

    def set_rate(self, rate: float) -> None:
        """Run at this share of full speed."""
        self._clock.set_rate(rate)

    def crash(self) -> None:
        self._account()
        self.is_down = True
        self.adapters = LoadedAdapters(self.adapters.most)
        self.sim = EngineSim(self.profile, kv_tokens=self._kv_tokens)
        self._was_busy = False

    def restart(self) -> None:
        self.is_down = False
        self._changed_at = self._world()

    def _account(self) -> None:
        self._idle_page = None
        now = self._world()
        if self._was_busy:
            self.busy_s += now - self._changed_at
        self._changed_at = now
        self._was_busy = self.sim.running > 0


class MetricScrapes:
    """An agent's scrapes of its engine. `begin` and `end` with the agent; `scrape_now` for one now.

    The live cadence (agents.runtime): every SCRAPE_EVERY_S while the agent holds answers, half as
    often while it holds none, and at once when an effect of its core demands it. A scrape is
    one event, at the moment of its reading; it carries the time when it began, because what was
    dispatched meanwhile may be missing in it.

    While no request waits in the engine, a scrape changes nothing but the numbers that the agent's
    next heartbeat or decision reads. Then scrapes are no events: of those due since the last event
    of the agent or its engine, `catch_up` makes the last one, as of its time.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        queue: EventQueue,
        on_result: Callable[[EngineScraped | ScrapeFailed, float], None],
        is_busy: Callable[[], bool],
    ) -> None:
        """`on_result` is called with each scrape's result and time; `is_busy`: the agent holds
        answers."""
        self._engine = engine
        self._queue = queue
        self._on_result = on_result
        self._is_busy = is_busy
        self._each = False
        self._due_at = inf  # the next scrape
        self._number = 0  # of the event that makes it; another number's is dropped
        self._is_event = False
        self._scraped_at = self._models_due_at = -inf

    def begin(self, *, each: bool) -> None:
        """`each`: the agent decides by every scrape, so all are events."""
        self._each, self._models_due_at = each, -inf
        self._make(self._queue.now)

    def end(self) -> None:
        self._due_at = inf
        self._number += 1

    def scrape_now(self) -> None:
        """Scrape at once, the models too."""
        self._models_due_at = -inf
        self._due_at = self._scraped_at + SCRAPE_GAP_S
        self._schedule()

    def catch_up(self) -> None:
        """The agent or its engine is about to change: make the last scrape that was due."""
        now = self._queue.now
        if self._due_at >= now or self._is_event:  # of this very moment: after what happens now
            return
        at, every_s = self._due_at, self._every_s
        while at + every_s < now:
            at += every_s
        self._make(at)

    def follow(self) -> None:
        """The engine has changed: while a request waits there, each scrape is an event."""
        if not self._is_event and self._due_at < inf and (self._each or not self._engine.is_steady):
            self._schedule()

    @property
    def _every_s(self) -> float:
        return SCRAPE_EVERY_S if self._is_busy() else IDLE_SCRAPE_EVERY_S

    def _schedule(self) -> None:
        self._number += 1
        self._is_event = True
        self._queue.at(self._due_at, self._scrape, self._number)

    def _scrape(self, number: int) -> None:
        if number == self._number:
            self._make(self._queue.now)

    def _make(self, at: float) -> None:
        self._scraped_at, self._due_at, self._is_event = at, inf, False
        number = self._number
        self._on_result(self._failed(at) if self._engine.is_down else self._read(at), at)
        if number == self._number:  # else `scrape_now` or `end` was called meanwhile
            self._due_at = at + self._every_s
            self.follow()

    def _read(self, now: float) -> EngineScraped:
        models, adapters = None, frozenset[ModelId]()
        if now >= self._models_due_at:
            adapters = frozenset(map(ModelId, self._engine.adapters.paths))
            models = (MODEL, *sorted(adapters))
            self._models_due_at = now + MODELS_EVERY_S
        reading = self._engine.reading(now)
        return EngineScraped(now - SCRAPE_S, reading, models, adapters=adapters)

    def _failed(self, now: float) -> ScrapeFailed:
        self._models_due_at = -inf
        return ScrapeFailed(
            began_at=now - SCRAPE_S,
            last_content_at=-inf,
            timed_out=False,
            detail=REFUSED_CONNECTION,
        )
