"""The engine of one replica in the twin: the model of time, its clock, and what it adds up to.

Busy time is exact: from each change of the batch to the next. Occupancy is sampled at every look
at a busy engine: the larger of running sequences over the most that may run and KV in use over
KV there is, because on small GPUs memory is full long before the batch is.
"""

from collections.abc import Callable

from agents.core.reading import EngineReading
from agents.sim.batch import Inside
from agents.sim.engine import EngineSim
from agents.sim.events import SimEvent, SimRequest
from agents.sim.profile import Profile
from mesh.sim.engine_clock import EngineClock


class Engine:
    """submit, abort, step, reading: all now."""

    def __init__(
        self, profile: Profile, world: Callable[[], float], kv_tokens: int | None = None
    ) -> None:
        self.profile = profile
        self.is_down = False
        self.busy_s = 0.0
        self.occupancy_sum = 0.0
        self.occupancy_samples = 0
        self._kv_tokens = kv_tokens
        self._world = world
        self._clock = EngineClock(world)
        self.sim = self._new()
        self._idle_page: EngineReading | None = None
        self._woken_for = 0.0
        self._was_busy = False
        self._changed_at = 0.0

    @property
    def stands_still(self) -> bool:
        """Whether no token comes out, whatever is in it."""
        return self.is_down or self._clock.stands_still

    @property
    def owes_events(self) -> bool:
        """Whether something has happened that `step` has not told yet."""
        wake_at = self.sim.wake_at
        return wake_at is not None and wake_at <= self._clock.now()

    @property
    def wake_at(self) -> float | None:
        """When to step next, in the world's time."""
        if self.stands_still or (wake_at := self.sim.wake_at) is None:
            return None
        self._woken_for = wake_at
        return self._clock.world_at(wake_at)

    def submit(self, request: SimRequest) -> None:
        """Raises NeverFits or QueueFull."""
        self.sim.submit(request, self._clock.now())
        self._account()

    def abort(self, number: int) -> None:
        """Drop a request."""
        self.sim.abort(number, self._clock.now())
        self._account()

    def step(self) -> list[SimEvent]:
        """What has happened since the last step."""
        if self.stands_still:
            return []
        wake_at = self._woken_for
        due = self._clock.world_at(wake_at) <= self._world()
        events = self.sim.step(self._clock.now(wake_at if due else 0.0)).events
        self._account()
        return events

    def reading(self) -> EngineReading:
        """One look at the metrics page. While an engine is idle its page stays as it is."""
        if self._idle_page is not None:
            return self._idle_page
        stats = self.sim.stats(self._clock.now())
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

    def inside(self) -> Inside:
        """What no page of metrics shows."""
        return self.sim.inside(self._clock.now())

    def set_rate(self, rate: float) -> None:
        """Run at this share of full speed."""
        self._clock.set_rate(rate)

    def crash(self) -> None:
        """The process is gone, and all it held."""
        self._account()
        self.is_down = True
        self.sim = self._new()
        self._was_busy = False

    def restart(self) -> None:
        """A new process, empty."""
        self.is_down = False
        self._changed_at = self._world()

    def _new(self) -> EngineSim:
        return EngineSim(self.profile, kv_tokens=self._kv_tokens)

    def _account(self) -> None:
        self._idle_page = None
        now = self._world()
        if self._was_busy:
            self.busy_s += now - self._changed_at
        self._changed_at = now
        self._was_busy = self.sim.running > 0
