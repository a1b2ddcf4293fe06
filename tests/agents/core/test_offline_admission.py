"""Which offline requests the engine gets, and which are given back."""

import itertools
import random
from dataclasses import replace

import pytest

from agents.core.events import EngineReading
from agents.core.offline_admission import (
    BATCH_SHARE,
    CROWDED_S,
    KV_FREE_SHARE,
    PASSED_OVER_S,
    RUNNING_MAX,
    Abort,
    Admit,
    GiveBack,
    OfflineAdmission,
)
from agents.core.offline_request import OfflineRequest
from tests.agents.core.test_offline_profile import PROFILE as FITTED

# An iteration of 10 ms, 0.1 ms more for each prompt token and 1 µs for each of context.
LINEAR = replace(
    FITTED,
    computing=(0.010, 1e-4, 1e-6, 0.0, 0.0, 0.0, 0.0),
    waiting=(0.010, 0.0, 1e-6, 0.0, 0.0, 0.0, 0.0),
    latency_budget_s=0.030,
    chunk_tokens=512,
    prefill_tokens_max=400,
)
KV = EngineReading(kv_capacity_tokens=100_000, kv_used_ratio=0.0, batch_max=64)


class Desk:
    """An admission, its clock, and what it decided."""

    def __init__(self, reading: EngineReading = KV, **profile) -> None:
        self.admission = OfflineAdmission(replace(LINEAR, **profile))
        self.now = 100.0
        self.full = False
        self.scrape(reading)

    def scrape(self, reading: EngineReading = KV, online_waiting: int = 0) -> None:
        self.admission.scraped(reading, online_waiting, self.now)

    def offer(self, key, prompt: int = 100, answer: int = 50) -> bool:
        return self.admission.offer(OfflineRequest(key, prompt, answer), self.now)

    def online(self, key, prompt: int = 100) -> None:
        self.admission.online_sent(key, prompt, prompt, self.now, generates=True)

    def begin(self, key) -> None:
        self.admission.began(key, self.now)

    def decide(self, seconds: float = 0.0) -> list:
        self.now += seconds
        return self.admission.decide(self.now, full=self.full)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_idle_engine_gets_them_in_their_order(desk) -> None:
    assert [desk.offer(key) for key in "abc"] == [True] * 3
    assert desk.decide() == [Admit("a"), Admit("b"), Admit("c")]
    assert (desk.admission.waiting, desk.admission.running) == (0, 3)


def test_prompts_under_computation_are_bounded(desk) -> None:
    for key in range(9):
        desk.offer(key)
    assert desk.decide() == [Admit(key) for key in range(4)]  # 400 tokens
    assert desk.decide(0.055) == [Admit(key) for key in range(4, 8)]  # 400 took 50 ms
    assert desk.decide() == []


def test_a_prompt_beyond_the_bound_goes_alone(desk) -> None:
    desk.offer("long", 900)
    desk.offer("next")
    assert desk.decide() == [Admit("long")]
    assert desk.decide() == []


def test_beside_online_requests_iterations_keep_to_the_budget(desk) -> None:
    desk.online("user")
    desk.begin("user")
    desk.offer("long", 250)  # a chunk of 250 takes 25 ms more
    desk.offer("short", 150)
    assert desk.decide() == [Admit("short")]
    assert desk.admission.waiting == 1
    desk.admission.ended("user", desk.now)
    assert desk.decide(0.3) == [Admit("long")]


def test_one_that_fits_later_is_not_overtaken(desk) -> None:
    desk.online("user")
    desk.begin("user")
    for key, prompt in (("first", 150), ("second", 150), ("small", 10)):
        desk.offer(key, prompt)
    assert desk.decide() == [Admit("first")]
    assert desk.decide() == []  # "second" waits for "first", "small" for "second"
    assert desk.decide(0.030) == [Admit("second"), Admit("small")]


def test_a_document_too_long_to_decode_blocks_nobody_and_runs_when_nobody_is_online(desk) -> None:
    desk.online("user")
    desk.begin("user")
    desk.offer("document", 30_000)  # 30 ms of context
    desk.offer("short")
    assert desk.decide() == [Admit("short")]
    assert desk.decide(1.0) == []
    desk.admission.ended("user", desk.now)
    assert desk.decide() == []  # "short" is there
    desk.admission.ended("short", desk.now)
    assert desk.decide() == [Admit("document")]


def test_one_that_is_passed_over_goes_back(desk) -> None:
    desk.online("user")
    desk.begin("user")
    desk.offer("document", 30_000)
    desk.decide()
    assert desk.decide(PASSED_OVER_S - 0.1) == []
    assert desk.decide(0.2) == [GiveBack("document")]


def test_with_a_burst_the_budget_is_a_mean() -> None:
    desk = Desk(burst_s=0.5)
    desk.online("user")
    desk.begin("user")
    desk.offer("long", 400)  # an iteration of 50 ms, 20 over the budget
    assert desk.decide() == []
    assert desk.decide(0.005) == []
    assert desk.decide(0.1) == [Admit("long")]  # ten of 10 ms each saved 20


def test_memory_holds_them_to_a_share_and_leaves_some_free(desk) -> None:
    free = int((1.0 - KV_FREE_SHARE) * 100_000)
    desk.scrape(replace(KV, kv_used_ratio=0.85))
    desk.offer("large", 10, 5001)
    assert desk.decide() == []
    desk.scrape(replace(KV, kv_used_ratio=0.85))
    desk.admission.withdraw("large")
    desk.offer("fits", 10, free - 85_000 - 10)
    assert desk.decide() == [Admit("fits")]
    desk = Desk(queued_tokens_max=90_000)
    desk.offer("half", 10, 49_990)
    assert desk.decide() == [Admit("half")]
    desk.offer("more", 10, 10)
    assert desk.decide() == []


def test_the_batch_is_shared() -> None:
    desk = Desk(replace(KV, batch_max=8), prefill_tokens_max=10_000)
    for key in range(20):
        desk.offer(key, 10, 10)
    assert len(desk.decide()) == 8 * BATCH_SHARE
    desk = Desk(EngineReading(), prefill_tokens_max=100_000, queued_requests_max=4096)
    for key in range(RUNNING_MAX + 10):
        desk.offer(key, 1, 1)
    admitted = [desk.decide() for _ in range(40)]
    assert sum(map(len, admitted)) == RUNNING_MAX


def test_the_queue_is_bounded_in_number_and_tokens() -> None:
    desk = Desk(queued_requests_max=3, latency_budget_s=1e-4)
    desk.online("user")
    assert [desk.offer(key) for key in range(4)] == [True, True, True, False]
    assert desk.admission.room_tokens(desk.now) == 0
    desk = Desk(queued_tokens_max=1000, latency_budget_s=1e-4)
    desk.online("user")
    assert [desk.offer(key, 350, 150) for key in range(3)] == [True, True, False]


def test_an_empty_queue_takes_one_up_to_its_share_of_the_memory() -> None:
    desk = Desk(queued_tokens_max=1000)
    assert desk.admission.room_tokens(desk.now) == 50_000
    assert not desk.offer("beyond", 50_000, 1)
    assert desk.offer("long", 49_999, 1)
    assert not desk.offer("next", 1, 1)


# Online bursts.


def test_a_full_replica_gives_back_all_that_has_not_begun(desk) -> None:
    desk.online("user")
    desk.begin("user")
    for key in range(3):
        desk.offer(key, 5000)
    desk.full = True
    assert desk.decide() == [GiveBack(0), GiveBack(1), GiveBack(2)]
    assert desk.admission.room_tokens(desk.now) == 0
    desk.full = False
    assert desk.decide() == []
    assert desk.admission.room_tokens(desk.now) > 0


def test_a_lasting_burst_gives_back_a_short_one_does_not(desk) -> None:
    desk.online("user", 100_000)  # 10 s of prefill
    desk.offer("line")
    assert desk.decide() == []
    assert desk.decide(CROWDED_S - 0.1) == []
    assert desk.decide(0.2) == [GiveBack("line")]
    assert desk.admission.room_tokens(desk.now) == 0
    desk.admission.ended("user", desk.now)
    desk.decide()
    assert desk.admission.room_tokens(desk.now) > 0


def test_a_prompt_that_has_hardly_begun_leaves_before_an_online_one(desk) -> None:
    desk.offer("line", 5000)
    desk.decide()
    desk.now += 0.1
    desk.online("user")
    assert desk.decide() == [Abort("line")]
    assert desk.decide() == []  # once
    desk.admission.ended("line", desk.now)
    assert desk.admission.running == 0


def test_a_prompt_that_is_nearly_done_stays(desk) -> None:
    desk.offer("line", 5000)
    desk.decide()
    desk.now += 0.5
    desk.online("user")
    assert desk.decide() == []


def test_one_sent_after_an_online_one_stays(desk) -> None:
    desk.online("user", 100)
    desk.offer("line", 50)
    assert desk.decide() == [Admit("line")]
    assert desk.decide() == []


def test_a_decoding_one_leaves_if_that_costs_less_than_it_costs_the_online_ones() -> None:
    desk = Desk(prefill_tokens_max=100_000)
    for key in range(4):
        desk.offer(key, 4000, 2000)
    assert len(desk.decide()) == 4
    for key in range(4):
        desk.begin(key)
    for user in range(30):
        desk.online(f"user {user}", 500)
        desk.begin(f"user {user}")
    # 41 ms: each costs 30 users 4 ms a token for 2,000 tokens.
    assert desk.decide() == [Abort(3), Abort(2), Abort(1)]


def test_a_decoding_one_that_ends_soon_stays() -> None:
    desk = Desk(prefill_tokens_max=100_000)
    desk.offer("line", 25_000, 3)
    desk.decide()
    desk.begin("line")
    desk.online("user", 100)
    desk.begin("user")
    assert desk.decide() == []


PACKED = replace(KV, kv_used_ratio=0.95, running=9)


@pytest.mark.parametrize(
    ("reading", "leaves"),
    [
        (PACKED, True),
        (replace(PACKED, kv_used_ratio=0.5), False),
        (replace(PACKED, kv_used_ratio=0.5, running=64), True),
        (EngineReading(), True),
    ],
)
def test_the_newest_leave_with_each_scrape_while_online_requests_queue(
    desk, reading, leaves
) -> None:
    for key in range(4):
        desk.offer(key)
    desk.decide()
    for key in range(4):
        desk.begin(key)
    desk.full = True
    desk.scrape(reading, online_waiting=1)
    assert desk.decide() == [Abort(3)] * leaves
    assert desk.decide() == []
    desk.scrape(reading, online_waiting=2)
    assert desk.decide() == [Abort(2), Abort(1)] * leaves
    desk.scrape(reading, online_waiting=9)
    assert desk.decide() == [Abort(0)] * leaves
    desk.scrape(reading, online_waiting=0)
    assert desk.decide() == []


UNSIZED = replace(KV, kv_used_ratio=0.1, running=2, batch_max=None)


def test_lines_that_have_not_begun_leave_a_batch_of_unknown_size_for_online_requests(desk) -> None:
    for key in range(4):
        desk.offer(key)
    desk.decide()
    desk.full = True
    desk.scrape(UNSIZED, online_waiting=1)
    assert desk.decide(CROWDED_S / 2) == []
    desk.scrape(UNSIZED)  # they wait no more
    desk.scrape(UNSIZED, online_waiting=1)
    assert desk.decide(CROWDED_S / 2) == []
    desk.admission.restart_clock(desk.now)
    desk.scrape(UNSIZED, online_waiting=1)
    assert desk.decide(CROWDED_S / 2) == []
    desk.scrape(UNSIZED, online_waiting=1)
    assert desk.decide(CROWDED_S / 2) == [], "all lines have begun"
    desk.scrape(replace(UNSIZED, waiting=2), online_waiting=1)
    assert desk.decide() == [Abort(3)]
    desk.scrape(replace(UNSIZED, waiting=2), online_waiting=1)
    assert desk.decide() == [], "it still counts as one that waits"


def test_those_that_wait_in_the_engine_before_online_ones_leave_together(desk) -> None:
    for key in range(4):
        desk.offer(key)
    desk.decide()
    desk.full = True
    desk.scrape(replace(PACKED, waiting=4), online_waiting=1)
    assert desk.decide() == [Abort(3), Abort(2), Abort(1)]


# The pace.


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.5, 9.0])
def test_the_pace_is_learned_within_bounds(speed) -> None:
    desk = Desk()
    for number in range(100):
        desk.online(number, 100)
        desk.now += 0.020 * speed
        desk.begin(number)
        desk.now += 100 * 0.0101 * speed
        desk.admission.ended(number, desk.now, 101)
    assert desk.admission.pace == pytest.approx(min(speed, 2.0), rel=0.05)


def test_in_a_run_that_looks_for_a_budget_the_pace_stays() -> None:
    admission = OfflineAdmission(LINEAR, refreshes=False)
    for number in range(50):
        admission.online_sent(number, 100, 100, number * 10.0, generates=True)
        admission.began(number, number * 10.0 + 1.0)
        admission.ended(number, number * 10.0 + 9.0, 100)
    assert admission.pace == 1.0


def test_after_a_stop_nothing_is_learned_from_what_ran() -> None:
    desk = Desk()
    desk.online("user")
    desk.begin("user")
    desk.now += 60.0
    desk.admission.restart_clock(desk.now)
    desk.admission.ended("user", desk.now, 200)
    assert desk.admission.pace == 1.0


# Whatever happens.


class Chance:
    """Random events at a desk, and an engine that does what was decided."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.queued_max = dice.choice((2, 16))
        self.desk = Desk(
            latency_budget_s=dice.choice((0.012, 0.02, 0.05, 0.2)),
            prefill_tokens_max=dice.choice((100, 2000)),
            queued_requests_max=self.queued_max,
            burst_s=dice.choice((0.0, 0.5)),
        )
        self.numbers = itertools.count()
        self.offered: set[int] = set()
        self.ended: list[int] = []
        self.at_engine: set[int] = set()
        self.online: set[str] = set()

    def offer(self) -> None:
        key, prompt = next(self.numbers), self.dice.choice((10, 300, 4000))
        if self.desk.offer(key, prompt, self.dice.choice((1, 100))):
            self.offered.add(key)

    def come_online(self) -> None:
        key = f"user {next(self.numbers)}"
        self.online.add(key)
        self.desk.online(key, self.dice.choice((10, 1000)))

    def begin(self) -> None:
        if keys := [*sorted(self.online), *sorted(self.at_engine)]:
            self.desk.begin(self.dice.choice(keys))

    def end_online(self) -> None:
        if self.online:
            key = self.dice.choice(sorted(self.online))
            self.online.discard(key)
            self.desk.admission.ended(key, self.desk.now, self.dice.choice((-1, 50)))

    def end_offline(self) -> None:
        if self.at_engine:
            self._end(self.dice.choice(sorted(self.at_engine)))

    def scrape(self) -> None:
        reading = replace(KV, kv_used_ratio=self.dice.random())
        self.desk.scrape(reading, self.dice.randrange(3))
        self.desk.full = self.dice.random() < 0.2

    def act(self) -> None:
        self.desk.now += self.dice.expovariate(20.0)
        few = (self.begin, self.end_online, self.end_offline, self.scrape, self.come_online)
        few = (*few, self.end_online, self.end_online)
        self.dice.choice((self.offer, self.offer, self.offer, *few))()
        for decision in self.desk.decide():
            self._perform(decision)

    def _perform(self, decision) -> None:
        match decision:
            case Admit(key):
                assert not self.desk.full
                self.at_engine.add(key)
            case GiveBack(key):
                assert key not in self.at_engine
                self.ended.append(key)
            case Abort(key):
                self._end(key)

    def _end(self, key) -> None:
        self.at_engine.remove(key)
        self.ended.append(key)
        self.desk.admission.ended(key, self.desk.now)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_and_every_request_ends_once(seed) -> None:
    chance = Chance(random.Random(seed))
    desk, admission = chance.desk, chance.desk.admission
    for _ in range(600):
        chance.act()
        assert admission.waiting <= chance.queued_max
        assert admission.running == len(chance.at_engine)
        assert admission.waiting == 0 or not desk.full
        assert 0 <= admission.room_tokens(desk.now) <= 65_536
    chance.ended += [decision.key for decision in admission.give_back_all()]
    assert sorted([*chance.ended, *chance.at_engine]) == sorted(chance.offered)
    assert len(chance.offered) > 20
    assert admission.admitted_total > 5


def test_a_prompt_alone_never_decodes() -> None:
    """Beside an online request the next document has room as soon as the last one is computed."""
    for answer_tokens, admits in ((0, True), (50, False)):
        desk = Desk()
        desk.online("user")
        desk.begin("user")
        for key in ("first", "second"):  # each takes 28 ms while it is computed
            answers = int(answer_tokens > 0)
            document = OfflineRequest(key, 100, answer_tokens, kv_tokens=8000, answers=answers)
            assert desk.admission.offer(document, desk.now)
        assert desk.decide() == [Admit("first")]
        assert desk.decide(0.2) == ([Admit("second")] if admits else [])
        assert (desk.admission.offline_kv_tokens() < 8000) == admits, "of the second alone"
        desk.admission.ended("first", desk.now)
        assert desk.admission.running == admits


def test_online_embeddings_are_no_decode_that_others_must_spare() -> None:
    desk = Desk()
    desk.admission.online_sent("document", 100, 30_000, desk.now, generates=False)
    desk.decide(0.5)  # computed by now
    desk.offer("long", 250)  # too long beside one that decodes
    assert desk.decide() == [Admit("long")]
    desk.begin("document")
    desk.admission.ended("document", desk.now)
    assert desk.decide(0.1) == []
