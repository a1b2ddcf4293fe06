"""When a job will end: speeds, capacities, estimates, and when its lines are raised."""

import pytest

from mesh.core.offline import events as oev
from mesh.core.offline.capacity import KEPT_S, Capacity, Speeds, Throughput, expected
from mesh.core.offline.deadlines import MARGIN_S_MAX, margin
from schemas.exchange import Priority
from schemas.ids import ReplicaId
from tests.mesh.core.build import EU, MODEL
from tests.mesh.core.offline.test_where import IDLE, Mesh, forecast
from tests.mesh.core.offline.world import World

HOUR = 3600


@pytest.mark.parametrize(
    ("hourly", "tokens", "seconds"),
    [
        ((1.0,), 0, 0.0),
        ((2.0,), 100, 50.0),
        ((2.0,), 2 * HOUR * 10, 10 * HOUR),
        ((0.0, 1.0), 1, HOUR + 1),
        ((0.0, 1.0), HOUR, 2 * HOUR),
        ((0.0, 1.0), HOUR + 1, 3 * HOUR + 1),
        ((0.0, 0.0), 1, float("inf")),
        ((1e-6,), 1e9, float("inf")),
    ],
)
def test_time_and_tokens(hourly: tuple[float, ...], tokens: float, seconds: float):
    capacity = Capacity(hourly)
    assert capacity.time_for(tokens) == pytest.approx(seconds)
    if 0 < seconds < float("inf"):
        assert capacity.until(seconds) == pytest.approx(tokens)


def test_a_speed_is_measured_while_there_is_work():
    speed = Throughput()
    for _ in range(20):
        speed.add(10)
        speed.pass_time(1.0, is_busy=True)
    assert speed.per_s() is None, "too short"
    for _ in range(1000):
        speed.add(10)
        speed.pass_time(1.0, is_busy=True)
    assert speed.per_s() == pytest.approx(10, rel=0.02)
    speed.pass_time(KEPT_S - 1, is_busy=False)
    assert speed.per_s() == pytest.approx(10, rel=0.02)
    speed.pass_time(2, is_busy=False)
    assert speed.per_s() is None


def measured(per_s: float | None) -> Throughput:
    speed = Throughput()
    if per_s is not None:
        for _ in range(2000):
            speed.add(round(per_s))
            speed.pass_time(1.0, is_busy=True)
    return speed


@pytest.mark.parametrize(
    ("forecast_h", "promised", "home", "peers", "trusts", "first", "later"),
    [
        ((), (), None, None, True, None, None),
        ((), (), 5, None, True, 5, 5),
        ((), (), 5, 2, True, 7, 7),
        ((20,) * 24, (), None, None, True, 20, 20),
        ((20,) * 24, (), 5, None, True, 5, 20),
        ((20,) * 24, (9,) * 24, None, None, True, 29, 29),
        ((20,) * 24, (9,) * 24, 5, 2, True, 7, 29),
        ((20,) * 24, (9,) * 24, 5, 2, False, 7, 22),
        ((), (9,) * 24, None, None, False, None, None),
    ],
)
def test_what_is_expected(
    forecast_h: tuple[int, ...],
    promised: tuple[float, ...],
    home: float | None,
    peers: float | None,
    trusts: bool,
    first: float | None,
    later: float | None,
):
    """Measured speed goes before all else in the hour under way."""
    speeds = Speeds(measured(home), measured(peers), measured(None))
    hours = [one * HOUR for one in forecast_h]
    there = [one * HOUR for one in promised]
    capacity = expected(hours, there, speeds, is_trusting=trusts)
    if first is None:
        assert capacity is None
        return
    assert capacity is not None
    assert capacity.hourly[0] == pytest.approx(first, rel=0.02)
    assert capacity.hourly[5] == pytest.approx(later, rel=0.02)
    assert capacity.is_forecast is bool(forecast_h)


@pytest.mark.parametrize(
    ("window_s", "seconds"), [(60, 6), (3600, 360), (86_400, MARGIN_S_MAX), (9000, MARGIN_S_MAX)]
)
def test_the_margin_before_a_deadline(window_s: float, seconds: float):
    assert margin(100.0, 100.0 + window_s) == pytest.approx(seconds)


def test_the_estimate_of_a_jobs_end_is_honest_and_seldom_repeated():
    """Five lines of 100 tokens a second."""
    world = World()
    world.replica("us-0", room_max=500)
    world.submit(lines=1000, window_s=3600.0)
    told = []
    while len(world.results) < 1000:
        world.paced.clear()
        world.run(1.0, step_s=0.25)
        for key in list(world.open):
            world.end(key)
        world.stored()
        world.feed(oev.JobSeen(world.jobs["j"]))
        if "j" in world.paced:
            told.append((world.now, world.paced["j"].end_at, world.paced["j"].late))
    assert world.now == pytest.approx(200, rel=0.1)
    settled = [end for at, end, _ in told if at > 60]
    assert all(end == pytest.approx(world.now, rel=0.15) for end in settled), settled
    assert not any(late for _, _, late in told)
    assert 3 < len(told) < 100


def test_no_end_is_told_while_no_replica_serves_what_is_left():
    world = World()
    world.replica("us-0", room_max=500)
    world.submit(lines=1000, window_s=3600.0)

    def run(seconds: float) -> None:
        until = world.now + seconds
        while world.now < until:
            world.run(1.0, step_s=0.25)
            for key in list(world.open):
                world.end(key)
            world.stored()
            world.feed(oev.JobSeen(world.jobs["j"]))

    run(90.0)
    assert world.paced["j"].end_at is not None
    gone = world.replicas.pop(ReplicaId("us-0"))
    run(60.0)
    assert world.paced["j"].end_at is None
    world.replicas[ReplicaId("us-0")] = gone
    run(30.0)
    assert world.paced["j"].end_at is not None


def run_raised(world: Mesh, seconds: float) -> dict[Priority | None, int]:
    """Tokens handed out as online work by priority, as offline work by None; all are answered."""
    tokens: dict[Priority | None, int] = {}
    until = world.now + seconds
    while world.now < until:
        world.say()
        world.run(2.0, step_s=0.2)
        for key, one in list(world.open.items()):
            kind = None if one.request.offline else one.request.priority
            tokens[kind] = tokens.get(kind, 0) + world.out[key].tokens
            world.end(key)
        world.stored()
        for made in list(world.jobs.values()):
            world.feed(oev.JobSeen(made))
    return tokens


def test_as_many_tokens_rise_as_are_missing():
    """The forecast leaves room for half the job."""
    world = Mesh()
    world.tick()
    forecast(world, 1.0, tokens_per_s=10.0)
    world.replica("us-0", room_max=0, fields={"kv_used_ratio": 0.0})
    world.submit(lines=800, window_s=4400.0)  # 80,000 tokens; 40,000 fit in what is left of 4,000 s
    tokens = run_raised(world, 400.0)
    # Nothing is computed as offline work; what is measured replaces the forecast's first hour.
    share = tokens[Priority.LOW] / 80_000
    assert 0.05 <= share <= 0.2, tokens
    assert set(tokens) == {Priority.LOW}


@pytest.mark.parametrize(("began_at", "kinds"), [(-1000.0, set()), (-90_000.0, {Priority.LOW})])
def test_promises_of_a_peer_count_until_half_the_window_is_gone(
    began_at: float, kinds: set[Priority]
):
    """It has no room now and promises plenty for the hours to come."""
    world = Mesh()
    world.tick()
    forecast(world, 1e-3, tokens_per_s=1.0)
    world.peer(EU, room=0, slack=IDLE)
    world.replica("us-0", room_max=0)
    world.submit(lines=200, began_at=began_at, deadline=80_000.0)
    assert set(run_raised(world, 100.0)) == kinds


def test_a_job_behind_others_counts_their_work():
    world = World()
    world.replica("us-0", room_max=500)
    world.submit("first", lines=300, window_s=3600.0)
    world.submit("second", lines=300, window_s=7200.0)
    while world.now < 60:
        world.run(1.0, step_s=0.25)
        for key in list(world.open):
            world.end(key)
        world.stored()
        for made in list(world.jobs.values()):
            world.feed(oev.JobSeen(made))
    first, second = (world.core.state.jobs.get(name) for name in ("first", "second"))
    assert first is not None and second is not None
    assert first.end_at is not None and second.end_at is not None
    assert second.end_at == pytest.approx(world.now + (first.left + second.left) / 5, rel=0.2)
    assert first.end_at < second.end_at
    assert first.line_tokens == pytest.approx(100, abs=1)
    assert first.left_tokens(MODEL) == pytest.approx(100 * first.left, rel=0.01)
