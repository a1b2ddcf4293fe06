"""The forecast: a day and a week of load, slack of the next hours, kept from start to start."""

import math

import pytest

from mesh.core.model import events as ev
from mesh.core.offline import events as oev
from mesh.core.offline.forecast import (
    HOUR_S,
    HOURS_AHEAD,
    KEPT_HOURS,
    MODELS_MAX,
    Forecast,
    ForecastInvalid,
    ForecastState,
    ModelHistory,
    idle_share,
    read_forecast,
    write_forecast,
)
from schemas.ids import ModelId
from schemas.state import ReplicaState
from tests.mesh.core.build import MODEL, beat
from tests.mesh.core.offline.world import World

ZERO = 1_700_006_400.0  # a Wednesday, 00:00 UTC
RATE = 50.0  # tokens a second of an idle replica


def idle_at(seconds: float) -> float:
    """Of ten replicas: all of them at midnight, none at noon; two fewer at weekends."""
    day = 5.0 + 5.0 * math.cos(2 * math.pi * seconds / 86_400)
    weekday = int((seconds + ZERO) // 86_400 + 3) % 7
    return max(0.0, day - (2.0 if weekday >= 5 else 0.0))


def watched(days: float, start: float = 0.0, *, step_s: float = 60.0) -> Forecast:
    """A forecast that has seen so many days. Steps count as a second, so all means are right."""
    forecast = Forecast(ZERO)
    now = start
    while now < start + days * 86_400:
        idle = idle_at(now)
        forecast.computed(MODEL, round(RATE * idle))
        forecast.observe({MODEL: idle}, [MODEL], now)
        now += step_s
    return forecast


def test_nothing_is_predicted_before_a_day_is_known():
    early, later = watched(0.8), watched(1.01)
    assert early.slack_tokens(MODEL, 0.8 * 86_400) == []
    assert len(later.slack_tokens(MODEL, 1.01 * 86_400)) == HOURS_AHEAD
    assert later.slack_tokens(ModelId("m2"), 1.01 * 86_400) == []


@pytest.mark.parametrize(("days", "off_max"), [(1, 0.25), (2, 0.25), (8, 0.12), (10, 0.25)])
def test_the_next_day_is_like_the_last_day_and_week(days: int, off_max: float):
    """After 8 days it is Thursday again; after 10 a weekend begins, like the one a week ago."""
    now = days * 86_400 + 1800.0
    forecast = watched(days + 0.02)
    predicted = forecast.slack_tokens(MODEL, now)
    real = [
        RATE * sum(idle_at(now + hour * HOUR_S + minute * 60) * 60 for minute in range(60))
        for hour in range(HOURS_AHEAD)
    ]
    off = sum(abs(one - other) for one, other in zip(predicted, real, strict=True)) / sum(real)
    print(days, off)
    assert off < off_max
    assert predicted.index(max(predicted)) in (22, 23), "midnight"


def test_speed_is_learned_only_while_there_is_more_work_than_room():
    forecast = Forecast(ZERO)
    for second in range(600):
        forecast.observe({MODEL: 2.0}, [MODEL] if second < 300 else [], float(second))
        forecast.computed(MODEL, 100 if second < 300 else 1)
    known = forecast.state().models[MODEL].tokens_per_s
    assert known is not None and 45 <= known <= 51


def test_a_gap_counts_for_nothing():
    forecast = Forecast(ZERO)
    forecast.observe({MODEL: 4.0}, [], 0.0)
    forecast.observe({MODEL: 4.0}, [], 1.0)
    forecast.observe({MODEL: 0.0}, [], 3000.0)
    forecast.observe({MODEL: 0.0}, [], 3700.0)
    assert dict(forecast.state().models[MODEL].hours) == {int(ZERO // HOUR_S): 2.0}


def test_hours_and_models_are_bounded():
    forecast = watched(10.5, step_s=900.0)
    assert len(forecast.state().models[MODEL].hours) <= KEPT_HOURS
    for number in range(MODELS_MAX + 5):
        forecast.observe({ModelId(f"m{number}"): 1.0}, [], 1e6)
    assert len(forecast.state().models) == MODELS_MAX
    read_forecast(write_forecast(forecast.state()))


def test_what_was_written_is_read_and_predicts_the_same():
    now = 2.0 * 86_400
    before = watched(2.0)
    after = Forecast(ZERO)
    after.restore(read_forecast(write_forecast(before.state())), now)
    assert after.slack_tokens(MODEL, now) == before.slack_tokens(MODEL, now) != []


def test_old_hours_and_hours_to_come_are_left_out():
    hour = int(ZERO // HOUR_S)
    history = ModelHistory(((hour - KEPT_HOURS, 1.0), (hour - 1, 2.0), (hour + 5, 3.0)), 1.0)
    forecast = Forecast(ZERO)
    forecast.restore(ForecastState({MODEL: history}), 10.0)
    assert forecast.state().models[MODEL].hours == ((hour - 1, 2.0),)


GOOD = '{"models":{"m":{"hours":[[1,0.5]],"tokens_per_s":1.0}},"v":1}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"v":2}',
        GOOD.replace("0.5", "-0.5"),
        GOOD.replace("0.5", "1e300"),
        GOOD.replace("0.5", "NaN"),
        GOOD.replace("1.0", '"fast"'),
        GOOD.replace("[1,", "[-1,"),
        '{"models":{"m":{"hours":[' + ",".join(["[1,0.5]"] * 300) + "]}}}",
        '{"models":{"m":{}}}' + " " * 300_000,
    ],
)
def test_what_is_no_forecast_is_an_error_that_says_why(text: str):
    assert read_forecast(GOOD.encode()).models[MODEL].tokens_per_s == 1.0
    with pytest.raises(ForecastInvalid, match="forecast"):
        read_forecast(text.encode())


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"kv_used_ratio": 0.25, "batch_occupancy": 0.5}, 0.5),
        ({"kv_used_ratio": 0.25}, 0.75),
        ({"batch_occupancy": 0.0}, 1.0),
        ({}, 0.0),
        ({"batch_occupancy": 0.0, "full": True}, 0.0),
        ({"batch_occupancy": 0.0, "pending": 2}, 0.0),
        ({"batch_occupancy": 0.0, "state": ReplicaState.DRAINING}, 0.0),
    ],
)
def test_which_part_of_a_replica_is_idle(fields: dict, share: float):
    assert idle_share(beat("us-0", **fields)) == share


def test_the_runner_saves_and_publishes_what_it_has_learned():
    world = World()
    hours = tuple((int(1e9 // HOUR_S) - back, 2.0) for back in range(1, 25))
    world.feed(oev.ForecastRestored(ForecastState({MODEL: ModelHistory(hours, 10.0)})))
    world.replica("us-0", room_max=700)
    world.replica("us-1", room_max=300)
    world.run(3.0)
    capacity = world.published[-1].models[MODEL]
    assert capacity.slack_tokens == (2 * 10 * HOUR_S,) * HOURS_AHEAD
    assert capacity.room_tokens == 1000
    assert len(world.published) == 3 and [one.seq for one in world.published] == [1, 2, 3]
    assert not world.saved
    world.run(302.0, step_s=0.3)
    assert len(world.saved) == 1
    assert read_forecast(write_forecast(world.saved[0].state)).models[MODEL].tokens_per_s == 10.0
    world.feed(ev.Drain())
    assert len(world.saved) == 2


def test_what_is_published_of_jobs():
    world = World()
    world.replica("us-0", room_max=500)
    world.submit(lines=40)
    world.store["j"] = {number: world.store["j"][number] for number in range(1, 31)}
    world.run(3.0)  # ten are with another runner
    state = world.published[-1]
    assert (state.jobs, state.lines_running, state.lines_waiting) == (1, 5, 35)
    assert state.models[MODEL].waiting_tokens == 3500
    assert state.models[MODEL].room_tokens == 0
    assert state.accepting
