"""Places lines: on a replica at each of its heartbeats, on peers and as online requests by a timer.

A replica gets lines right after its heartbeat, when its room is known best, as many as fit.
What no replica of the region has room for, or what is cheaper elsewhere, goes to peers
(`regions.py`). Lines of jobs that would end too late go out as online requests besides
(`pace.py`): to replicas of this region on which nothing waits, one at a time, as a router would,
else to a peer's routers.
"""

from collections.abc import Callable
from math import inf

from mesh.core.offline.attempts import Attempts
from mesh.core.offline.forecast import HOUR_S, Forecast
from mesh.core.offline.jobs import JobRecord
from mesh.core.offline.lines import LineRecord, Window, region_place
from mesh.core.offline.pace import Pace
from mesh.core.offline.queues import JobQueue, Queues, Wanted
from mesh.core.offline.regions import Home, Regions
from mesh.core.offline.room import OfflineRoom
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, ReplicaId

GIVEN_MAX = 32  # lines with one heartbeat, of which there are ten a second
PLACE_S = 0.1  # between two looks at peers and at raised lines
FORWARDED_MAX = 64  # lines at each look, and as many with online priority
NOTHING_FITS_S = 0.5  # a replica for which no line was found is looked at again after that
UNLIMITED = 2**63  # tokens
PLAN_S = 1.0  # how long a job keeps the highest price that was computed for it


class LinePlacement:
    """Decides which line goes where, for one region's runner."""

    def __init__(
        self,
        *,
        price: float | None,
        window: Window,
        queues: Queues,
        replicas: ReplicaTable,
        room: OfflineRoom,
        regions: Regions,
        pace: Pace,
        forecast: Forecast,
        attempts: Attempts,
    ) -> None:
        self._price = price
        self._window = window
        self._queues = queues
        self._replicas = replicas
        self._room = room
        self._regions = regions
        self._pace = pace
        self._forecast = forecast
        self._attempts = attempts
        self._placed_at = -inf
        self._look_again_at: dict[ReplicaId, float] = {}
        self._highest_price: dict[tuple[str, ModelId], float] = {}
        self._planned_at = -inf

    # To the region's own replicas.

    def to_replica(self, replica: Replica, now: float) -> None:
        """A heartbeat has come."""
        beat = replica.heartbeat
        if now < self._look_again_at.get(beat.replica, -inf):
            return
        for model in beat.models:
            for _ in range(GIVEN_MAX):
                room = self._room.at(replica, now)
                if not room or model not in self._window.waiting_lines:
                    break
                record = self._choose_here(model, replica, room, now)
                if record is None:
                    self._look_again_at[beat.replica] = now + NOTHING_FITS_S
                    break
                self._attempts.give(record, beat.replica, now)

    def gone(self, replica: ReplicaId) -> None:
        """It is lost: its range of the lines goes to others."""
        self._look_again_at.pop(replica, None)
        self._queues.leave(replica)

    def _choose_here(
        self, model: ModelId, replica: Replica, room: int, now: float
    ) -> LineRecord | None:
        name = replica.heartbeat.replica
        return self._choose(
            model,
            name,
            lambda wanted: self._room.carries(replica, wanted),
            lambda queue: self._affordable(queue, self._price, now),
            self._fits(name, room, now),
        )

    def _choose(
        self,
        model: ModelId,
        place: str,
        takes: Callable[[Wanted], bool],
        may_go: Callable[[JobQueue], bool],
        accepts: Callable[[int], bool],
    ) -> LineRecord | None:
        key = self._queues.choose(model, place, takes, may_go, accepts)
        return None if key is None else self._window.get(key)

    def _fits(self, place: str, room: int, now: float) -> Callable[[int], bool]:
        def fits(key: int) -> bool:
            record = self._window.get(key)
            assert record is not None, "a line that waits is in the window"
            return record.line.tokens <= room and not record.avoids(place, now)

        return fits

    # To peers.

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now - self._placed_at < PLACE_S or self._replicas.bus.lost_at is not None:
            return
        self._placed_at = now
        served = self._regions.models()
        for model in self._queues.models():
            if model in served:
                self._to_peers(model, now)
        self._give_raised(now)

    def _to_peers(self, model: ModelId, now: float) -> None:
        left_s = self._queues.first_deadline(model) - now
        home_room_by_labels: dict[Wanted, int] = {}
        for region in self._regions.in_order(model, self._price, left_s, now):
            price = self._regions.price(region, self._price)
            for _ in range(FORWARDED_MAX):
                room = self._regions.room_tokens(region, model, now)
                if room <= 0:
                    break
                record = self._choose_there(model, region, price, room, home_room_by_labels, now)
                if record is None:
                    break
                self._attempts.forward(record, region, now)

    def _choose_there(
        self,
        model: ModelId,
        region: RegionId,
        price: float,
        room: int,
        home_room_by_labels: dict[Wanted, int],
        now: float,
    ) -> LineRecord | None:
        place = region_place(region)
        is_cheaper = self._price is not None and price < self._price
        fits = self._fits(place, room, now)

        def home_room(queue: JobQueue) -> int:
            """Home goes first while it has room and its price is not higher."""
            if is_cheaper or not self._affordable(queue, self._price, now):
                return 0
            if queue.wanted not in home_room_by_labels:
                home_room_by_labels[queue.wanted] = self._room.largest(model, queue.wanted, now)
            return home_room_by_labels[queue.wanted]

        def is_better_there(key: int) -> bool:
            record = self._window.get(key)
            return fits(key) and record is not None and record.line.tokens > home_room(record.queue)

        return self._choose(
            model,
            place,
            lambda wanted: self._regions.may_go(region, wanted),
            lambda queue: self._affordable(queue, price, now),
            is_better_there,
        )

    def _affordable(self, queue: JobQueue, price: float | None, now: float) -> bool:
        """Whether the job's lines go out at that price now, or wait for a lower one."""
        if self._price is None or price is None:
            return True
        if now - self._planned_at >= PLAN_S:
            self._highest_price.clear()
            self._planned_at = now
        name = queue.job, queue.model
        highest_price = self._highest_price.get(name)
        if highest_price is None:
            left_s = queue.needed_by - now
            home = Home(self._price, self._home_slack(queue.model, left_s, now))
            work = self._pace.work_until(*name)
            highest_price = self._regions.highest_price(
                home, queue.model, queue.wanted, work, left_s, now
            )
            self._highest_price[name] = highest_price
        return price <= highest_price

    def _home_slack(self, model: ModelId, left_s: float, now: float) -> float:
        hours = self._forecast.slack_tokens(model, now)
        parts = (min(1.0, max(0.0, left_s / HOUR_S - hour)) for hour in range(len(hours)))
        return sum(tokens * part for tokens, part in zip(hours, parts, strict=True))

    # With online priority.

    def _give_raised(self, now: float) -> None:
        """Hand out lines of jobs that would be late, as many as are missing."""
        idle: dict[ModelId, list[Replica]] = {}
        left = FORWARDED_MAX
        for job in self._pace.raised:
            for model in job.models:
                queue = self._queues.get(job.job.id, model)
                if queue is None:
                    continue
                if model not in idle:
                    idle[model] = self._idle(model, now)
                while left > 0 and job.raise_tokens > 0 and len(queue.order):
                    if not self._give_raised_line(job, queue, idle[model], now):
                        break
                    job.raise_tokens -= job.line_tokens
                    left -= 1

    def _idle(self, model: ModelId, now: float) -> list[Replica]:
        """Replicas on which nothing waits, the most loaded first."""
        free, _ = self._replicas.partition_available(model, now)
        usable = [one for one in free if self._room.may_work(one, now)]
        return sorted(usable, key=lambda one: (-one.load, one.heartbeat.replica))

    def _give_raised_line(
        self, job: JobRecord, queue: JobQueue, idle: list[Replica], now: float
    ) -> bool:
        """One line to a replica of `idle`, which leaves the list, or to the routers of a peer."""
        assert job.raised_to is not None, "it is raised"
        for at in range(len(idle) - 1, -1, -1):
            name = idle[at].heartbeat.replica
            if not self._room.carries(idle[at], queue.wanted):
                continue
            record = self._next_of(queue, name, UNLIMITED, now)
            if record is not None:
                del idle[at]
                self._attempts.give(record, name, now, job.raised_to)
                return True
        left_s = queue.deadline - now
        for region in self._regions.in_order(queue.model, None, left_s, now):
            if not self._regions.may_go(region, queue.wanted):
                continue
            room = self._regions.allowance(region)
            record = self._next_of(queue, region_place(region), room, now)
            if record is not None:
                self._attempts.forward(record, region, now, job.raised_to)
                return True
        return False

    def _next_of(self, queue: JobQueue, place: str, room: int, now: float) -> LineRecord | None:
        key = queue.ranges.next_for(place, self._fits(place, room, now))
        return None if key is None else self._window.get(key)
