"""AgentCore with offline work: who takes it, how it ends, and that nobody's load counts it."""

import random
from dataclasses import replace

import pytest

from agents.core import effects, events
from agents.core.events import EngineReading, TokenUsage
from agents.core.offline_admission import CROWDED_S
from agents.core.offline_request import PARSED_BYTES_MAX
from agents.core.requests import PART_TIMEOUT_S
from agents.core.routers import SILENCE_S
from schemas.exchange import BODY_BYTES_MAX, Outcome, Refusal
from schemas.state import ReplicaState
from tests.agents.core.bench import IDLE, Bench, inbox
from tests.agents.core.test_offline_admission import LINEAR

USAGE = TokenUsage(prompt_tokens=100, cached_tokens=0, completion_tokens=50)
# Longer than this an online prompt leaves no room beside it.
LONG = {"Mesh-Prefill-Tokens": "100000"}


def bench_with(reading=IDLE, **replica) -> Bench:
    bench = Bench(**{"offline": LINEAR, **replica})
    bench.read(reading)
    return bench


@pytest.fixture
def bench() -> Bench:
    return bench_with()


def kinds(done: list) -> list[type]:
    return [type(effect) for effect in done]


def outcomes(done: list) -> dict[str, Outcome]:
    ends = (effects.SendEnd, effects.AbortRelay)
    return {effect.inbox: effect.outcome for effect in done if isinstance(effect, ends)}


def crowded() -> Bench:
    """An online request computes a long prompt, and an offline one waits here."""
    bench = bench_with(outstanding_max=64)
    bench.work(1, **LONG)
    assert kinds(bench.offline(2)) == [effects.HoldWork]
    return bench


def test_without_a_profile_offline_work_is_refused() -> None:
    bench = Bench()
    bench.read()
    [refuse] = bench.offline(1)
    assert refuse.message.reason == Refusal.NO_OFFLINE_ROOM
    assert bench.beat.offline_room_tokens is None
    assert bench.beat.queue_s is None
    assert bench.beat.refused_total == 0


def test_heartbeats_carry_the_predicted_wait_of_an_online_prompt(bench) -> None:
    assert bench.beat.queue_s == 0.0
    bench.work(1, **LONG)
    alone = bench.beat.queue_s
    assert alone is not None and alone > 0.0
    bench.work(2, **LONG)
    assert bench.beat.queue_s == pytest.approx(2 * alone, rel=0.1)


def test_an_idle_engine_gets_it_at_once_and_no_load_counts_it(bench) -> None:
    before = bench.beat
    assert before.offline_room_tokens > 0
    hold, relay = bench.offline(1, b'{"max_tokens":5}')
    assert hold == effects.HoldWork(inbox(1))
    assert (relay.inbox, relay.work.path, relay.body) == (
        inbox(1),
        "/v1/completions",
        b'{"max_tokens":5}',
    )
    assert bench.core.outstanding == 1  # for the host: it drains, and scrapes as while busy
    beat = bench.beat
    assert (beat.offline_waiting, beat.offline_running) == (0, 1)
    ours = {"offline_running": 0, "offline_room_tokens": before.offline_room_tokens}
    assert replace(beat, **ours) == before
    bench.now += 1.0
    bench.feed(events.RelayBegan(inbox(1)))
    bench.end(1, usage=USAGE, streamed=True)
    bench.read()
    beat = bench.beat
    assert (beat.served_total, beat.decode_tokens_per_s, beat.prefix_hit_ratio) == (0, None, None)
    assert (beat.offline_waiting, beat.offline_running) == (0, 0)
    assert bench.core.offline_totals == (1, 0, 1, 150)


def test_the_engines_priority_is_added_to_its_body() -> None:
    bench = bench_with(offline_priority=7)
    _, relay = bench.offline(1, b'{"model":"m","priority":0}')
    assert relay.body == b'{"model":"m","priority":7}'
    online, *_ = bench.work(2, b'{"model":"m"}')
    assert online.body == b'{"model":"m"}'
    _, broken = bench.offline(3, b"no json")
    assert broken.body == b"no json"  # the engine says what is wrong


def test_a_long_body_is_not_parsed() -> None:
    bench = bench_with(offline_priority=-1)
    long = b'{"max_tokens":1,"prompt":"' + b"x" * PARSED_BYTES_MAX + b'"} '
    tokens = {"Mesh-Prefill-Tokens": "100"}
    _, relay = bench.offline(1, long, **tokens)
    assert relay.body == long[:-2] + b',"priority":-1}'
    assert bench.core.offline_totals.admitted == 1


def test_the_bytes_of_waiting_bodies_are_bounded() -> None:
    bench = crowded()
    parts = {"Mesh-Body-Bytes": str(BODY_BYTES_MAX), "Mesh-Prefill-Tokens": "100"}
    found = [kinds(bench.offline(number, b"", **parts)) for number in range(3, 6)]
    assert found == [[effects.RequestBody], [effects.Refuse], [effects.Refuse]]
    assert kinds(bench.work(9, b"", **parts)) == [effects.RequestBody]  # online ones have their own


@pytest.mark.parametrize(
    ("prepare", "headers", "reason"),
    [
        (lambda b: b.feed(events.DrainRequested()), {}, Refusal.DRAINING),
        (lambda b: b.fail(), {}, Refusal.ENGINE_DOWN),
        (lambda b: b.read(models=("other",)), {}, Refusal.WRONG_MODEL),
        (lambda b: b.read(EngineReading(waiting=1, running=3)), {}, Refusal.NO_OFFLINE_ROOM),
        (lambda b: None, {"Mesh-Prefill-Tokens": "70000"}, Refusal.NO_OFFLINE_ROOM),
        (lambda b: None, {"Mesh-Path": "/metrics"}, Refusal.WRONG_MODEL),
        (lambda b: b.feed(events.AliveArrived("eu", "r1", 1, 9)), {}, Refusal.NOT_OWNER),
    ],
)
def test_refusals(bench, prepare, headers, reason) -> None:
    prepare(bench)
    bench.tick(0.01)
    [refuse] = bench.offline(1, **headers)
    assert refuse.message.reason == reason
    assert bench.beat.refused_total == (reason is Refusal.BAD_WORK), "a count of online requests"


def test_it_is_refused_when_the_queue_is_full() -> None:
    bench = bench_with(offline=replace(LINEAR, queued_requests_max=3))
    bench.work(1, **LONG)
    found = [kinds(bench.offline(number)) for number in range(2, 6)]
    assert found == [[effects.HoldWork]] * 3 + [[effects.Refuse]]
    assert bench.beat.offline_waiting == 3


def test_an_answer_without_a_bound_counts_as_a_long_one() -> None:
    bench = bench_with(offline=replace(LINEAR, queued_tokens_max=600))
    assert outcomes(bench.offline(1, b'{"n":2}')) == {inbox(1): Outcome.PREEMPTED}
    assert kinds(bench.offline(2, b'{"max_tokens":100,"n":2}'))[0] is effects.HoldWork
    assert kinds(bench.offline(3, b'{"max_completion_tokens":100}'))[0] is effects.HoldWork
    assert kinds(bench.offline(4, b'{"max_output_tokens":100}'))[0] is effects.HoldWork


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"max_tokens":10,"n":3,"best_of":5}', 50),
        (b'{"max_tokens":10,"prompt":["a","b","c"]}', 30),
        (b'{"max_tokens":10,"n":2,"prompt":[[1,2],[3]]}', 40),
        (b'{"max_tokens":10,"prompt":[1,2,3]}', 10),
        (b'{"max_tokens":10,"prompt":[]}', 10),
        (b'{"max_tokens":1,"n":1000,"prompt":["a","b"]}', 2 * 128),
    ],
)
def test_every_answer_of_a_request_counts(body, tokens) -> None:
    bench = bench_with(offline=replace(LINEAR, prefill_tokens_max=1))
    bench.work(1, **LONG)
    bench.offline(2, body, **{"Mesh-Prefill-Tokens": "1"})
    assert bench.beat.offline_room_tokens == LINEAR.queued_tokens_max - 1 - tokens


def test_a_waiting_one_is_given_back_when_the_burst_lasts() -> None:
    bench = crowded()
    assert outcomes(bench.tick(CROWDED_S + 0.2)) == {inbox(2): Outcome.PREEMPTED}
    assert bench.beat.offline_room_tokens == 0
    assert bench.core.outstanding == 1
    assert outcomes(bench.tick(1.0)) == {}


def test_one_that_waits_before_an_online_request_is_aborted(bench) -> None:
    bench.offline(1, **{"Mesh-Prefill-Tokens": "30000"})
    done = bench.work(2)
    assert done[0].inbox == inbox(2)
    assert outcomes(done) == {inbox(1): Outcome.PREEMPTED}
    assert bench.beat.offline_running == 1  # until its relay has ended
    bench.end(1, Outcome.PREEMPTED)
    assert bench.beat.offline_running == 0
    assert bench.core.offline_totals.preempted == 1


def test_routers_of_what_was_given_back_are_judged_no_more() -> None:
    bench = crowded()
    assert outcomes(bench.tick(CROWDED_S + 0.2)) == {inbox(2): Outcome.PREEMPTED}
    bench.end(1)
    assert list(bench.core.state.routers.silent(bench.now + 100.0)) == []


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        (lambda b: b.feed(events.CancelArrived(inbox(2))), Outcome.CANCELLED),
        (lambda b: b.tick(5.1), Outcome.DEADLINE),
        (lambda b: b.feed(events.AliveArrived("us", "r1", 2)), Outcome.CANCELLED),
        (lambda b: b.feed(events.DrainRequested()), Outcome.PREEMPTED),
        (lambda b: b.feed(events.StopRequested()), Outcome.PREEMPTED),
        (lambda b: b.fail(3) or b.tick(0.1), Outcome.PREEMPTED),
    ],
)
@pytest.mark.parametrize("at_engine", [False, True])
def test_its_other_ends(happens, outcome, at_engine) -> None:
    bench = bench_with(outstanding_max=64)
    if not at_engine:
        bench.work(1, **LONG)
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.offline(2, **{"Mesh-Deadline-Ms": "400" if outcome is Outcome.DEADLINE else "60000"})
    seen = bench.beats
    done = happens(bench) or []
    if outcome is Outcome.PREEMPTED and bench.core.replica_state is ReplicaState.DOWN:
        assert bench.beat.offline_waiting == 0  # those at the engine may still be answered
        return
    if at_engine and done == [] and bench.core.replica_state is ReplicaState.DRAINING:
        return  # what runs is finished
    assert outcomes(done).get(inbox(2)) is outcome
    assert seen is bench.beats


def test_a_silent_router_has_its_offline_work_ended() -> None:
    bench = bench_with(outstanding_max=64)
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.offline(1)
    bench.offline(2, **{"Mesh-Prefill-Tokens": "350"})
    assert bench.beat.offline_running + bench.beat.offline_waiting == 2
    assert outcomes(bench.tick(SILENCE_S + 0.2)) == {
        inbox(1): Outcome.CANCELLED,
        inbox(2): Outcome.CANCELLED,
    }


def test_an_agent_that_was_stopped_ends_nothing(bench) -> None:
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.offline(1)
    assert outcomes(bench.stand_still(4.0)) == {}


def test_its_body_may_come_in_parts(bench) -> None:
    [request] = bench.offline(1, b"", **{"Mesh-Body-Bytes": "8"})
    assert isinstance(request, effects.RequestBody)
    assert bench.feed(events.BodyPartArrived(inbox(1), 0, b'{"a"')) == []
    hold, relay = bench.feed(events.BodyPartArrived(inbox(1), 4, b": 1}"))
    assert (type(hold), relay.body) == (effects.HoldWork, b'{"a": 1}')
    bench.offline(2, b"", **{"Mesh-Body-Bytes": "8", "Mesh-Deadline-Ms": "60000"})
    bench.end(1)
    done = []
    for _ in range(int(PART_TIMEOUT_S) + 1):
        bench.feed(events.AliveArrived("us", "r1", 1))
        done += bench.tick(1.0)
    assert outcomes(done) == {inbox(2): Outcome.BODY_LOST}


def test_an_engine_that_hangs_on_it_is_noticed() -> None:
    busy = EngineReading(waiting=0, running=1, progress=(1.0,))
    bench = bench_with(replace(busy, progress=(0.0,)))
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.offline(1, **{"Mesh-Deadline-Ms": "600000"})
    done = []
    for _ in range(150):
        bench.feed(events.AliveArrived("us", "r1", 1))
        bench.now += 0.1
        done += bench.read(busy)
    assert bench.core.replica_state is ReplicaState.DOWN
    [abort] = [effect for effect in done if isinstance(effect, effects.AbortRelay)]
    assert (abort.inbox, abort.refused.reason) == (inbox(1), Refusal.ENGINE_DOWN)
    assert effects.ProbeEngine in kinds(bench.feed(events.TimerFired()))


# What the engine reports.


def test_the_engines_numbers_are_shown_without_offline_requests() -> None:
    reading = EngineReading(
        waiting=0, running=3, batch_max=8, kv_used_ratio=0.05, kv_capacity_tokens=10_000
    )
    bench = bench_with(replace(reading, running=0, kv_used_ratio=0.0), outstanding_max=64)
    for number in (1, 2):
        bench.offline(number, b'{"max_tokens":10}', **{"Mesh-Prefill-Tokens": "150"})
        bench.feed(events.RelayBegan(inbox(number)))
    bench.work(3)
    bench.feed(events.RelayBegan(inbox(3)))
    bench.now += 0.1
    bench.read(reading)
    beat = bench.beat
    assert (beat.running, beat.offline_running, beat.batch_occupancy) == (1, 2, 1 / 8)
    assert beat.kv_used_ratio == pytest.approx(0.05 - 0.03, abs=0.005)


def test_of_the_engines_queue_the_last_ones_sent_wait() -> None:
    bench = bench_with(EngineReading(waiting=0, running=0), outstanding_max=64)
    bench.work(1)
    bench.offline(2)  # behind it
    bench.now += 0.1
    bench.read(EngineReading(waiting=1, running=1))
    assert (bench.beat.pending, bench.beat.running, bench.beat.full) == (0, 1, False)


def test_an_online_request_behind_it_waits() -> None:
    bench = bench_with(EngineReading(waiting=0, running=0), outstanding_max=64)
    bench.offline(1)
    bench.now += 0.008
    bench.work(2)
    bench.now += 0.001
    bench.read(EngineReading(waiting=1, running=1))
    assert (bench.beat.pending, bench.beat.running) == (1, 0)


@pytest.mark.parametrize("offline_first", [True, False])
def test_first_tokens_behind_an_offline_prompt_teach_no_prefill_speed(offline_first) -> None:
    bench = bench_with(outstanding_max=64)
    for number in range(40):
        if offline_first:
            bench.offline(100 + number, **{"Mesh-Prefill-Tokens": "300"})
        bench.now += 0.02
        bench.work(number)
        prompt = 100 + 300 * (number % 5)
        bench.now += 0.05 + 1e-4 * prompt
        bench.feed(events.RelayBegan(inbox(number)))
        bench.end(number, usage=TokenUsage(prompt, 0, 50), streamed=True)
        if offline_first:
            bench.end(100 + number)
    assert (bench.beat.prefill_s_per_token is None) is offline_first


# Without and with.


class Player:
    """Random events of online requests at a bench; offline ones between them, if there are."""

    def __init__(self, seed: int, *, with_offline: bool) -> None:
        self.dice, self.other = random.Random(seed), random.Random(seed + 1)
        self.with_offline = with_offline
        profile = replace(LINEAR, latency_budget_s=0.06) if with_offline else None
        self.bench = bench_with(outstanding_max=8, offline=profile)
        self.online: list[int] = []
        self.begun: set[int] = set()
        self.offline: list[int] = []
        self.taken: set[int] = set()
        self.ended: list[int] = []
        self.numbers = iter(range(10_000))

    def play(self) -> list[tuple]:
        """What each heartbeat says of online load."""
        said = []
        for _ in range(400):
            self.bench.feed(events.AliveArrived("us", "r1", 1))
            self.bench.now += self.dice.expovariate(10.0)
            self._online_event()
            if self.with_offline:
                self._offline_event()
            beat = self.bench.beat
            said.append(
                (beat.outstanding, beat.pending, beat.running, beat.full, beat.served_total)
            )
            said.append((beat.prefill_queued_tokens, beat.refused_total, beat.state))
        return said

    def _online_event(self) -> None:
        chance = self.dice.random()
        if chance < 0.4:
            number = next(self.numbers)
            headers = {"Mesh-Prefill-Tokens": str(self.dice.randrange(2000))}
            done = self.bench.work(number, **headers, **{"Mesh-Deadline-Ms": "900000"})
            self.online += [number] * isinstance(done[0], effects.StartRelay)
            self._perform(done)
        elif chance < 0.6 and (waiting := [n for n in self.online if n not in self.begun]):
            self.begun.add(waiting[0])
            self._perform(self.bench.feed(events.RelayBegan(inbox(waiting[0]))))
        elif chance < 0.9 and self.online:
            number = self.online.pop(self.dice.randrange(len(self.online)))
            self._perform(self.bench.end(number, usage=USAGE, streamed=True))
        else:
            running = len(self.online) + self.bench.beat.offline_running
            self._perform(self.bench.read(EngineReading(waiting=0, running=running)))

    def _offline_event(self) -> None:
        number = 100_000 + len(self.taken)
        done = self.bench.offline(number, b'{"max_tokens":9}', **{"Mesh-Deadline-Ms": "900000"})
        if not isinstance(done[0], effects.Refuse):
            self.taken.add(number)
        self._perform(done)
        if self.offline and self.other.random() < 0.5:
            self._end(self.offline[0], Outcome.DONE)

    def _perform(self, done: list) -> None:
        for effect in done:
            number = int(getattr(effect, "inbox", "0").rsplit(".", 1)[-1])
            if number < 100_000:
                continue
            if isinstance(effect, effects.StartRelay):
                self.offline.append(number)
            elif isinstance(effect, effects.AbortRelay):
                self._end(number, effect.outcome)
            elif isinstance(effect, effects.SendEnd):
                self.ended.append(number)

    def _end(self, number: int, outcome: Outcome) -> None:
        self.offline.remove(number)
        self.ended.append(number)
        self._perform(self.bench.end(number, outcome))


@pytest.mark.parametrize("seed", range(10))
def test_online_numbers_are_those_of_a_run_without_offline_work(seed) -> None:
    player = Player(seed, with_offline=True)
    assert player.play() == Player(seed, with_offline=False).play()
    assert len(player.taken) > 20
    player._perform(player.bench.feed(events.StopRequested()))
    assert sorted(player.ended) == sorted(player.taken)  # each of them once
    assert player.bench.beat.offline_waiting == player.bench.beat.offline_running == 0
