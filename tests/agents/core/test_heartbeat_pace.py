"""How soon heartbeats come: seldom from a replica at rest, at once with whatever changes."""

import pytest

from agents.core import events
from agents.core.events import EngineReading
from agents.core.heartbeat_pace import ALIVE_WITHIN_S, REST_S
from schemas.exchange import ALIVE_S
from schemas.state import USUAL_S, ModelCard, ReplicaState
from tests.agents.core.bench import IDLE, MODEL, Bench

CARDS = {MODEL: ModelCard(created=1)}
R1, R2 = ("us", "r1", 1), ("eu", "r2", 1)


class Timed(Bench):
    """A bench that notes when each heartbeat left; routers say that they are alive."""

    def __init__(self, **replica) -> None:
        super().__init__(**replica)
        self.left_at, self.reading = [], IDLE
        self.routers = {R1: ALIVE_S, R2: ALIVE_S}  # and what their keep-alives say of the next one

    def feed(self, event) -> list:
        known = len(self.beats)
        done = super().feed(event)
        self.left_at += [self.now] * (len(self.beats) - known)
        return done

    def read(self, reading=IDLE, models=(MODEL,)) -> list:
        return self.feed(events.EngineScraped(self.now, reading, models, CARDS))

    def alive(self) -> None:
        for router, said_s in self.routers.items():
            self.feed(events.AliveArrived(*router, next_within_s=said_s))

    def live(self, seconds: float) -> int:
        """Let time pass with keep-alives and scrapes. How many heartbeats left meanwhile."""
        known = len(self.beats)
        for _ in range(round(seconds / ALIVE_S)):
            self.alive()
            self.read(self.reading)
            self.tick(ALIVE_S)
        return len(self.beats) - known


@pytest.fixture
def bench() -> Timed:
    bench = Timed()
    bench.live(5.0)
    assert bench.beats[-1].next_within_s == 2 * REST_S
    return bench


def test_at_rest_two_a_second_leave(bench) -> None:
    assert bench.live(20.0) == 20 / REST_S


def test_any_two_come_within_the_time_that_the_one_before_said(bench) -> None:
    """One may be lost."""
    bench.live(5.0)
    bench.work(1)
    bench.live(2.0)
    bench.end(1)
    bench.live(10.0)
    said = [beat.next_within_s or 2 * USUAL_S for beat in bench.beats]
    for number, left_at in enumerate(bench.left_at[:-2]):
        after_s = bench.left_at[number + 2] - left_at
        assert after_s <= said[number] + USUAL_S / 2 or said[number] < said[number + 1], number
    assert sorted(set(said)) == [0.2, 0.4, 0.8, 1.0]


def test_with_a_request_they_come_as_usual(bench) -> None:
    bench.tick(0.3)
    bench.work(1)
    assert bench.left_at[-1] == bench.now
    assert (bench.beats[-1].outstanding, bench.beats[-1].next_within_s) == (1, None)
    assert bench.live(4.0) == 40
    bench.end(1)
    bench.tick(USUAL_S)
    assert bench.beats[-1].outstanding == 0
    assert bench.live(1.0) == 10, "it may get the next one at once"


def busy_engine(bench) -> None:
    bench.read(EngineReading(waiting=0, running=1))


def other_models(bench) -> None:
    bench.read(models=("another",))


def refusal(bench) -> None:
    bench.work(1, **{"Mesh-Model": "another"})


def a_router_starts(bench) -> None:
    bench.feed(events.AliveArrived("us", "r9", 1, next_within_s=ALIVE_S))


def a_router_restarts(bench) -> None:
    bench.feed(events.AliveArrived("us", "r1", 2, next_within_s=ALIVE_S))


def adoption(bench) -> None:
    bench.feed(events.AliveArrived("eu", "r2", 1, 5, next_within_s=ALIVE_S))


def bus_away(bench) -> None:
    bench.feed(events.BusDisconnected())
    bench.feed(events.BusReconnected())


@pytest.mark.parametrize(
    "change",
    [
        *(busy_engine, other_models, refusal, adoption, bus_away),
        *(a_router_starts, a_router_restarts),
    ],
)
def test_a_change_is_told_at_once(bench, change) -> None:
    bench.tick(0.3)
    change(bench)
    assert bench.left_at[-1] == bench.now
    bench.tick(USUAL_S)
    assert bench.left_at[-1] == bench.now


def test_of_an_engine_that_works_for_others_they_come_as_usual(bench) -> None:
    bench.reading = EngineReading(waiting=0, running=1)
    bench.live(5.0)
    assert bench.live(4.0) == 40


def test_of_an_engine_that_is_gone_they_come_as_usual(bench) -> None:
    bench.fail()
    assert bench.beats[-1].state is ReplicaState.DOWN
    sent = len(bench.beats)
    for _ in range(8):
        bench.alive()
        bench.tick(ALIVE_S)
    assert len(bench.beats) - sent == 40


def test_what_is_sent_once_a_second_is_sent_no_more_seldom(bench) -> None:
    bench.live(5.0)
    assert [beat.cards for beat in bench.beats[-5:]] == [CARDS] * 5


def test_a_router_of_the_last_release_keeps_the_pace(bench) -> None:
    """It would take a replica for late after three heartbeats of its time."""
    bench.routers["ap", "r3", 1] = 0.0
    bench.live(1.0)
    assert bench.live(ALIVE_WITHIN_S + 5.0) == round(10 * (ALIVE_WITHIN_S + 5.0))
    assert all(beat.next_within_s is None for beat in bench.beats[-100:])
    del bench.routers["ap", "r3", 1]
    bench.live(ALIVE_WITHIN_S + 5.0)
    assert bench.beats[-1].next_within_s == 2 * REST_S, "it is gone"


def test_without_routers_they_come_as_usual() -> None:
    bench = Timed()
    bench.routers.clear()
    assert bench.live(20.0) == pytest.approx(200, abs=1)


def test_a_pace_that_was_set_slower_stays_the_slowest() -> None:
    bench = Timed(heartbeat_s=2.0)
    bench.live(60.0)
    assert bench.live(20.0) == 10 and bench.beats[-1].next_within_s is None
