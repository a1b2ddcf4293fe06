"""Random events, a model of the world, and what must hold after each."""

from random import Random

import pytest

from mesh.core.model import events as ev
from mesh.core.offline import events as oev
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import AP, EU, MODEL, beat
from tests.mesh.core.offline.world import EUROPE, World, offline_state, peer_line

OTHER = ModelId("other")
STEPS = 500


class Chaos:
    """One random life of a runner."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        choose = self.dice.choice
        self.world = World(
            seed,
            window_lines=choose([5, 40, 400]),
            failures_max=3,
            utility_ratio=choose([0.0, 0.5, 1.0]),
            price=choose([None, 1.0]),
        )
        self.seq = self.peer_lines = 0
        for number in range(self.dice.randint(1, 5)):
            self.world.replica(
                f"r{number}",
                room_max=choose([0, 150, 1000, 5000]),
                models=choose([(MODEL,), (MODEL, OTHER), (OTHER,)]),
            )
        self.acts = [
            (30, self.tick), (20, self.world.beats), (10, self.fetch), (12, self.answer),
            (5, self.refuse), (5, self.fail), (5, self.preempt), (6, self.world.stored),
            (6, self.peer), (4, self.place), (4, self.peer_line), (2, self.submit),
            (3, self.report), (1, self.lose), (1, self.end_job), (1, self.silence),
            (1, self.bus), (2, self.late),
        ]  # fmt: skip

    def step(self) -> None:
        weights = [weight for weight, _ in self.acts]
        self.dice.choices([act for _, act in self.acts], weights)[0]()

    def tick(self) -> None:
        self.world.tick(self.dice.choice([0.05, 0.05, 0.3, 1.5, 20.0]))

    def fetch(self) -> None:
        if self.world.fetches:
            at = self.dice.randrange(len(self.world.fetches))
            self.world.answer_fetch(self.world.fetches.pop(at))

    def some_open(self) -> int | None:
        return self.dice.choice(list(self.world.open)) if self.world.open else None

    def answer(self) -> None:
        if (key := self.some_open()) is not None:
            self.world.end(key)

    def refuse(self) -> None:
        if (key := self.some_open()) is not None:
            self.world.refuse(key, self.dice.choice([*Refusal, "nobody_listens"]))

    def fail(self) -> None:
        if (key := self.some_open()) is not None:
            self.world.fail(key, self.dice.choice([None, None, 429, 500, 501, 503]))

    def preempt(self) -> None:
        if (key := self.some_open()) is not None:
            self.world.fail(key, preempted=True)

    def place(self) -> None:
        if (key := self.some_open()) is not None:
            one = self.world.open[key]
            event = ev.AttemptProgressed(key, one.attempt)
            if one.peer is not None and self.dice.random() < 0.5:
                event = ev.PlacedByPeer(key, one.attempt, ReplicaId("far"))
            self.world.feed(event)

    def late(self) -> None:
        """An event of an attempt that is over, or of a line that nobody has."""
        key = self.dice.randint(0, self.world.keys + 3)
        attempt = self.world.attempts.get(key, 0) - self.dice.choice([1, 1, -1])
        kinds = [ev.AnswerEnded(key, attempt), ev.AttemptFailed(key, attempt, "late")]
        self.world.feed(self.dice.choice([*kinds, oev.LineStored(-key - 1)]))

    def peer(self) -> None:
        self.seq += 1
        region = self.dice.choice([EU, AP, RegionId("unknown")])
        labels = self.dice.choice([None, (), (EUROPE,)])
        self.world.peer_labels[region] = labels or ()
        room = self.dice.choice([0, 500, 10**9])
        slack = tuple([self.dice.choice([0, 10**6])] * self.dice.choice([0, 24]))
        price = self.dice.choice([None, 0.5, 2.0])
        state = offline_state(
            region,
            self.seq,
            room=room,
            slack=slack,
            price=price,
            residency=labels,
            accepting=self.dice.random() < 0.9,
            model=self.dice.choice([MODEL, OTHER]),
        )
        self.world.feed(oev.OfflineStateSeen(state))

    def peer_line(self) -> None:
        self.peer_lines += 1
        self.world.peer_lines[-self.peer_lines] = []
        residency = self.dice.choice([(), (EUROPE,)])
        self.world.feed(ev.RequestArrived(peer_line(-self.peer_lines, residency=residency)))

    def submit(self) -> None:
        if len(self.world.jobs) < 6:
            dice = self.dice
            window_s = self.world.now + dice.choice([30.0, 300.0, 86_400.0])
            self.world.submit(
                f"job-{len(self.world.store)}",
                dice.choice([1, 7, 60]),
                began_at=self.world.now,
                deadline=window_s,
                model=dice.choice([MODEL, MODEL, OTHER, ModelId("nobody's")]),
                residency=dice.choice([(), (), (EUROPE,)]),
                tokens=dice.choice([20, 100, 700]),
                shape=lambda number: tuple(range(number % 5 * 100, number % 5 * 100 + number % 3)),
            )

    def report(self) -> None:
        for one in list(self.world.jobs.values()):
            self.world.feed(oev.JobSeen(one))

    def end_job(self) -> None:
        if self.world.jobs:
            name = self.dice.choice(list(self.world.jobs))
            self.world.feed(oev.JobEnded(name))
            assert not [line for line in self.world.out.values() if line.job == name]
            del self.world.jobs[name]

    def lose(self) -> None:
        name = self.dice.choice(list(self.world.replicas))
        self.world.restart(name)
        if self.dice.random() < 0.5:
            gone = beat(name, 10**6, epoch=self.world.replicas[name].epoch - 1)
            gone = beat(name, 10**6, epoch=gone.epoch, state=ReplicaState.GONE)
            self.world.feed(ev.HeartbeatSeen(gone))

    def silence(self) -> None:
        one = self.world.replicas[self.dice.choice(list(self.world.replicas))]
        one.silent = not one.silent

    def bus(self) -> None:
        self.world.feed(ev.BusLost())
        self.world.tick(self.dice.choice([0.1, 40.0]))
        self.world.feed(ev.BusReturned())

    def check(self) -> None:
        """What holds between events."""
        world, window = self.world, self.world.core.state.window
        assert window.attempted == len(world.open)
        assert len(window) == len(world.out) + len(world.storing)
        waiting = [line for key, line in world.out.items() if key not in world.open]
        assert sum(window.waiting_lines.values()) == len(waiting)
        assert sum(window.waiting_tokens.values()) == sum(line.tokens for line in waiting)
        running = sum(world.out[key].tokens for key in world.open)
        assert sum(window.attempted_tokens.values()) == running
        bodies = sum(line.body_bytes for line in world.out.values())
        assert window.body_bytes >= bodies and (world.storing or window.body_bytes == bodies)
        assert all(len(outcomes) == 1 for outcomes in world.peer_lines.values())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_line_is_in_one_place_and_ends_once(seed: int):
    print("seed", seed)
    chaos = Chaos(seed)
    world = chaos.world
    for _ in range(STEPS):
        chaos.step()
        chaos.check()
    world.feed(ev.Drain())
    assert set(world.out) == set(world.open), "what waits is put back at once"
    for _ in range(50):
        chaos.step()
        chaos.check()
    world.feed(ev.DrainOver())
    world.answer_fetches()
    world.stored()
    assert not world.out and not world.open
    assert not len(world.core.state.window) and not world.core.state.at_replica
    assert world.core.is_idle
    for name, made in world.jobs.items():
        done = {number for one, number in world.results if one == name}
        assert done | set(world.store[name]) == set(range(1, made.total + 1))
        assert not done & set(world.store[name])


def test_chaos_gets_everywhere():
    """Each thing that is counted has happened: the property above says something."""
    seen = World().core.counts
    for seed in range(12):
        chaos = Chaos(seed)
        for _ in range(STEPS):
            chaos.step()
        for name in seen.__slots__:
            setattr(seen, name, getattr(seen, name) + getattr(chaos.world.core.counts, name))
    assert not [name for name in seen.__slots__ if not getattr(seen, name)], seen
