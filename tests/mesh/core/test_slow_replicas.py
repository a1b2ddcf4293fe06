"""A router one of whose replicas answers far slower than its like: who gets the requests."""

from heapq import heappop, heappush
from random import Random

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from tests.mesh.core.build import ROUTER, beat, core, request

NAMES = ("a", "b", "c")
POLICIES = [
    "mesh", "least-load", "round-robin", "power-of-two", "consistent-hash", "cache-aware", "smg",
    "skywalker", "llm-d", "e2", "gorgo",
]  # fmt: skip
PER_S = 6.0


class World:
    """Three replicas under steady streams; each takes its `ttft_s` and then its `rest_s`."""

    def __init__(self, policy: str) -> None:
        self.router, self.now, self.dice = core(policy=policy), 10.0, Random(1)
        self.ttft_s, self.rest_s = dict.fromkeys(NAMES, 0.2), dict.fromkeys(NAMES, 0.5)
        self.seq = self.key = self.order = 0
        self.due: list[tuple[float, int, object]] = []
        self.inside: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.taken: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.given: list[str] = []
        self.where: dict[tuple[int, int], str] = {}  # attempts under way
        self.waited_s: dict[int, float] = {}  # by request: to its first token
        self.again: dict[int, str] = {}  # why each was moved
        self.begun: set[tuple[int, int]] = set()  # attempts that bring tokens
        self.digests: list[fx.PublishDigest] = []

    def run(self, seconds: float) -> None:
        until, asked_at, tick_at = self.now + seconds, self.now, self.now
        while self.now < until:
            events = min(asked_at, tick_at, self.due[0][0] if self.due else until)
            self.now = events
            if self.due and self.due[0][0] <= self.now:
                event = heappop(self.due)[2]
                if isinstance(event, ev.AnswerEnded):
                    self.left(event.key, event.attempt)
                elif (event.key, event.attempt) in self.where:
                    self.waited_s[event.key] += self.now
                    self.begun.add((event.key, event.attempt))
                self.take(self.router.handle(event, self.now))
            elif tick_at <= self.now:
                tick_at += 0.1
                self.seq += 1
                for name in NAMES:
                    count, taken = self.inside[name], {ROUTER: self.taken[name]}
                    now = beat(name, self.seq, outstanding=count, running=count, taken=taken)
                    self.take(self.router.handle(ev.HeartbeatSeen(now), self.now))
                for key, attempt in self.begun & self.where.keys():
                    progressed = ev.AttemptProgressed(key, attempt)
                    self.take(self.router.handle(progressed, self.now))
                self.take(self.router.handle(ev.Tick(), self.now))
            else:
                asked_at += 1.0 / PER_S
                self.key += 1
                text = "".join(self.dice.choice("ABCDEFGH") for _ in range(40))
                self.waited_s[self.key] = -self.now
                asked = request(self.key, text, arrived_at=self.now, session=text)
                self.take(self.router.handle(ev.RequestArrived(asked), self.now))
                self.take(self.router.finish())

    def take(self, effects) -> None:
        for one in effects:
            if isinstance(one, fx.PublishDigest):
                self.digests.append(one)
            if isinstance(one, fx.Dispatch):
                self.given.append(one.replica)
                self.where[one.key, one.attempt] = one.replica
                self.inside[one.replica] += 1
                self.taken[one.replica] = one.handoff
                first_at = self.now + self.ttft_s[one.replica]
                answered = ev.AnswerEnded(one.key, one.attempt, Served(100, 0, 16))
                self.at(first_at, ev.AnswerStarted(one.key, one.attempt))
                self.at(first_at + self.rest_s[one.replica], answered)
            if isinstance(one, fx.CancelAttempt):
                self.left(one.key, one.attempt)
                self.again[one.key] = one.why

    def left(self, key: int, attempt: int) -> None:
        if (name := self.where.pop((key, attempt), None)) is not None:
            self.inside[name] -= 1

    def at(self, when: float, event: object) -> None:
        self.order += 1
        heappush(self.due, (when, self.order, event))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_one_gets_less_and_comes_back(policy):
    world = World(policy)
    world.run(20.0)
    assert not world.router.replicas.slow.by_key
    [name, *_] = world.given
    world.ttft_s[name] = 4.0
    world.run(10.0)
    before = len(world.given)
    world.run(30.0)
    given = world.given[before:].count(name)
    assert given <= 0.05 * (len(world.given) - before), "of a third"
    whys = [one.digest.avoided.get(name, "") for one in world.digests]
    assert any(why.startswith(("slow: first tokens ", "failing: ")) for why in whys)
    world.ttft_s[name] = 0.2
    world.run(70.0)
    assert not world.router.replicas.slow.by_key
    assert world.digests[-1].digest.avoided == {}


def test_the_receipt_says_why():
    world = World("least-load")
    world.run(10.0)
    world.rest_s["a"] = 5.0
    world.run(20.0)
    effects = world.router.handle(ev.RequestArrived(request(world.key + 1)), world.now)
    [decided] = [one for one in effects if isinstance(one, fx.Decided)]
    whys = {one.name: one.why for one in decided.decision.candidates}
    assert whys["a"].startswith("slow: tokens ")


@pytest.mark.parametrize("policy", ["mesh", "least-load", "gorgo"])
def test_what_waits_at_a_silent_one_is_answered_by_others(policy):
    world = World(policy)
    world.run(20.0)
    assert not world.again
    [name, *_], before = world.given, world.key
    world.ttft_s[name] = float("inf")
    world.run(60.0)
    waits = sorted(wait for key, wait in world.waited_s.items() if key > before)
    assert 1 <= len(world.again) <= 15
    assert all(wait < 0.0 or wait < 1.5 for wait in waits[: int(0.98 * len(waits))])
    whys = [one.digest.avoided.get(name, "") for one in world.digests]
    assert any(why.startswith("failing: 3 of its last ") and "nothing in" in why for why in whys)
    world.ttft_s[name] = 0.2
    world.run(200.0)
    assert world.digests[-1].digest.avoided == {}
    assert world.given[-60:].count(name) >= 5


@pytest.mark.parametrize("goes_on", [True, False])
def test_one_that_goes_on_with_a_stream_is_late_and_does_not_fail(goes_on):
    world = World("round-robin")
    world.run(20.0)
    [name, *_] = world.given
    world.rest_s[name] = 60.0
    world.run(3.0)
    world.ttft_s[name] = float("inf")
    world.run(0.5)
    if not goes_on:  # its streams have stopped
        world.begun = {one for one in world.begun if world.where.get(one) != name}
    world.again.clear()
    world.run(10.0)
    kind, how = ("late", " and went on with others") if goes_on else ("failing", "")
    assert world.digests[-1].digest.avoided[name].startswith(f"{kind}: ")
    why = [*world.again.values()][-1]
    assert why.startswith(f"{name} brought nothing in ")
    assert why.endswith(f" s{how}, while other replicas answered: moved")


@pytest.mark.parametrize("policy", ["mesh", "least-load"])
def test_where_all_are_slow_nothing_is_placed_again(policy):
    world = World(policy)
    world.run(20.0)
    world.ttft_s = dict.fromkeys(NAMES, 4.0)
    world.run(30.0)
    assert not world.again
