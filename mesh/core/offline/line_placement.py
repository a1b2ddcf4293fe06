"""Places lines: on a replica at each of its heartbeats, or by a timer while it is at rest; on peers
and as online requests by that timer.

A replica gets lines right after its heartbeat, when its room is known best, as many as fit; one at
rest has the room that it last named. What no replica of the region has room for, or what is cheaper
elsewhere, goes to peers (`line_regions.py`). Lines of jobs that would end too late go out as online
requests besides (`deadlines.py`): to replicas of this region on which nothing waits, one at a time,
as a router would, else to a peer's routers.

Reads: forecast, highest_price, look_again_at, pace, placed_at, planned_at, queues, regions,
replicas, residency, settings, window.
Writes: highest_price, look_again_at, placed_at, planned_at, queues.
"""

from collections.abc import Callable
from math import inf

from mesh.core.offline.attempts import forward, give
from mesh.core.offline.forecast import HOUR_S
from mesh.core.offline.jobs import JobRecord
from mesh.core.offline.line_regions import Home
from mesh.core.offline.lines import LineRecord, region_place
from mesh.core.offline.queues import JobQueue, Wanted
from mesh.core.offline.room import largest_room, may_work, room_at
from mesh.core.offline.state import RunnerState
from mesh.core.view.replica import Replica
from schemas.ids import ModelId, RegionId, ReplicaId

GIVEN_MAX = 32  # lines with one heartbeat, of which there are ten a second
PLACE_S = 0.1  # between two looks at peers and at raised lines
FORWARDED_MAX = 64  # lines at each look, and as many with online priority
NOTHING_FITS_S = 0.5  # a replica for which no line was found is looked at again after that
UNLIMITED = 2**63  # tokens
PLAN_S = 1.0  # how long a job keeps the highest price that was computed for it


# To the region's own replicas.


def to_replica(state: RunnerState, replica: Replica, now: float) -> None:
    """A heartbeat has come, or the replica is at rest."""
    beat = replica.heartbeat
    if now < state.look_again_at.get(beat.replica, -inf):
        return
    for model in beat.models:
        for _ in range(GIVEN_MAX):
            room = room_at(state, replica, model, now)
            if not room or model not in state.window.waiting_lines:
                break
            record = _choose_here(state, model, replica, room, now)
            if record is None:
                state.look_again_at[beat.replica] = now + NOTHING_FITS_S
                break
            give(state, record, beat.replica, now)


def replica_gone(state: RunnerState, replica: ReplicaId) -> None:
    """It is lost: its range of the lines goes to others."""
    state.look_again_at.pop(replica, None)
    state.queues.leave(replica)


def _choose_here(
    state: RunnerState, model: ModelId, replica: Replica, room: int, now: float
) -> LineRecord | None:
    name = replica.heartbeat.replica
    return _choose(
        state,
        model,
        name,
        lambda wanted: state.residency.takes_replica(wanted, replica),
        lambda queue: _affordable(state, queue, state.settings.price, now),
        _fits(state, name, room, now),
    )


def _choose(
    state: RunnerState,
    model: ModelId,
    place: str,
    takes: Callable[[Wanted], bool],
    may_go: Callable[[JobQueue], bool],
    accepts: Callable[[int], bool],
) -> LineRecord | None:
    key = state.queues.choose(model, place, takes, may_go, accepts)
    return None if key is None else state.window.get(key)


def _fits(state: RunnerState, place: str, room: int, now: float) -> Callable[[int], bool]:
    def fits(key: int) -> bool:
        record = state.window.get(key)
        assert record is not None, "a line that waits is in the window"
        return record.line.tokens <= room and not record.avoids(place, now)

    return fits


# To peers.


def place_by_timer(state: RunnerState, now: float) -> None:
    """Time has passed."""
    if now - state.placed_at < PLACE_S or state.replicas.bus.lost_at is not None:
        return
    state.placed_at = now
    if state.window.waiting_lines:
        for replica in state.replicas:
            if replica.silent_from > now:  # at rest: its next heartbeat may be far away
                to_replica(state, replica, now)
    served = state.regions.models()
    for model in state.queues.models():
        if model in served:
            _to_peers(state, model, now)
    _give_raised(state, now)


def _to_peers(state: RunnerState, model: ModelId, now: float) -> None:
    left_s = state.queues.first_deadline(model) - now
    home_room_by_labels: dict[Wanted, int] = {}
    for region in state.regions.in_order(model, state.settings.price, left_s, now):
        price = state.regions.price(region, state.settings.price)
        for _ in range(FORWARDED_MAX):
            room = state.regions.room_tokens(region, model, now)
            if room <= 0:
                break
            record = _choose_there(state, model, region, price, room, home_room_by_labels, now)
            if record is None:
                break
            forward(state, record, region, now)


def _choose_there(
    state: RunnerState,
    model: ModelId,
    region: RegionId,
    price: float,
    room: int,
    home_room_by_labels: dict[Wanted, int],
    now: float,
) -> LineRecord | None:
    place = region_place(region)
    is_cheaper = state.settings.price is not None and price < state.settings.price
    fits = _fits(state, place, room, now)

    def home_room(queue: JobQueue) -> int:
        """Home goes first while it has room and its price is not higher."""
        if is_cheaper or not _affordable(state, queue, state.settings.price, now):
            return 0
        if queue.wanted not in home_room_by_labels:
            home_room_by_labels[queue.wanted] = largest_room(state, model, queue.wanted, now)
        return home_room_by_labels[queue.wanted]

    def is_better_there(key: int) -> bool:
        record = state.window.get(key)
        return fits(key) and record is not None and record.line.tokens > home_room(record.queue)

    return _choose(
        state,
        model,
        place,
        lambda wanted: state.regions.may_go(region, wanted),
        lambda queue: _affordable(state, queue, price, now),
        is_better_there,
    )


def _affordable(state: RunnerState, queue: JobQueue, price: float | None, now: float) -> bool:
    """Whether the job's lines go out at that price now, or wait for a lower one."""
    if state.settings.price is None or price is None:
        return True
    if now - state.planned_at >= PLAN_S:
        state.highest_price.clear()
        state.planned_at = now
    name = queue.job, queue.model
    highest_price = state.highest_price.get(name)
    if highest_price is None:
        left_s = queue.needed_by - now
        home = Home(state.settings.price, _home_slack(state, queue.model, left_s, now))
        work = state.pace.work_until(*name)
        highest_price = state.regions.highest_price(
            home, queue.model, queue.wanted, work, left_s, now
        )
        state.highest_price[name] = highest_price
    return price <= highest_price


def _home_slack(state: RunnerState, model: ModelId, left_s: float, now: float) -> float:
    hours = state.forecast.slack_tokens(model, now)
    parts = (min(1.0, max(0.0, left_s / HOUR_S - hour)) for hour in range(len(hours)))
    return sum(tokens * part for tokens, part in zip(hours, parts, strict=True))


# With online priority.


def _give_raised(state: RunnerState, now: float) -> None:
    """Hand out lines of jobs that would be late, as many as are missing."""
    idle: dict[ModelId, list[Replica]] = {}
    left = FORWARDED_MAX
    for job in state.pace.raised:
        for model in job.models:
            queue = state.queues.get(job.job.id, model)
            if queue is None:
                continue
            if model not in idle:
                idle[model] = _idle(state, model, now)
            while left > 0 and job.raise_tokens > 0 and len(queue.order):
                if not _give_raised_line(state, job, queue, idle[model], now):
                    break
                job.raise_tokens -= job.line_tokens
                left -= 1


def _idle(state: RunnerState, model: ModelId, now: float) -> list[Replica]:
    """Replicas on which nothing waits, the most loaded first."""
    free, _ = state.replicas.partition_available(model, now)
    usable = [one for one in free if may_work(state, one, model, now)]
    return sorted(usable, key=lambda one: (-one.load, one.heartbeat.replica))


def _give_raised_line(
    state: RunnerState, job: JobRecord, queue: JobQueue, idle: list[Replica], now: float
) -> bool:
    """One line to a replica of `idle`, which leaves the list, or to the routers of a peer."""
    assert job.raised_to is not None, "it is raised"
    for at in range(len(idle) - 1, -1, -1):
        name = idle[at].heartbeat.replica
        if not state.residency.takes_replica(queue.wanted, idle[at]):
            continue
        record = _next_of(state, queue, name, UNLIMITED, now)
        if record is not None:
            del idle[at]
            give(state, record, name, now, job.raised_to)
            return True
    left_s = queue.deadline - now
    for region in state.regions.in_order(queue.model, None, left_s, now):
        if not state.regions.may_go(region, queue.wanted):
            continue
        room = state.regions.allowance(region)
        record = _next_of(state, queue, region_place(region), room, now)
        if record is not None:
            forward(state, record, region, now, job.raised_to)
            return True
    return False


def _next_of(
    state: RunnerState, queue: JobQueue, place: str, room: int, now: float
) -> LineRecord | None:
    key = queue.ranges.next_for(place, _fits(state, place, room, now))
    return None if key is None else state.window.get(key)
