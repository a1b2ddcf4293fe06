"""Which replicas count as slow, how little work they get, and how they come back."""

from itertools import pairwise
from random import Random

import pytest

from mesh.core.model.request import Served
from mesh.core.model.served_names import served_name
from mesh.core.view.replica import Replica
from mesh.core.view.slowness import (
    AGAIN_MAX,
    AGAIN_SHARE,
    ANSWERS_MIN,
    FRESH_S,
    GONE_S,
    GROWTH,
    JUDGE_S,
    RUN,
    SHARE_MIN,
    SlowPlaces,
)
from schemas.http import EMBEDDINGS
from schemas.ids import ModelId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import beat, request

M = ModelId("m")
ALIKE = Served(prompt_tokens=100, cached_tokens=0, output_tokens=17)


class Fleet:
    """Replicas that answer one request each in every round, a second long."""

    def __init__(self, *names: str, **beats: dict[str, object]) -> None:
        self.slow = SlowPlaces()
        self.replicas = {
            ReplicaId(name): Replica(beat(name, **beats.get(name, {})), 0.0) for name in names
        }
        self.now, self.request = 10.0, 0

    def answers(
        self, name: str, ttft_s: float, token_s: float = 0.01, served=ALIKE, streams: bool = True
    ) -> None:
        self.request += 1
        asked = request(self.request, model=M, streams=streams)
        self.slow.sent(asked, self.replicas[ReplicaId(name)], 100, self.now)
        if streams:
            self.slow.began(self.request, self.now + ttft_s)
        last = self.now + ttft_s + token_s * (served.output_tokens - 1)
        self.slow.served(self.request, served, last)
        self.slow.left(self.request)

    def rounds(self, count: int, ttft_s: dict[str, float] | None = None, **given) -> None:
        for _ in range(count):
            for name in self.replicas:
                self.answers(name, (ttft_s or {}).get(name, 0.2), **given)
            self.later(JUDGE_S)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.slow.judge(self.replicas, self.now)

    def share(self, name: str) -> float:
        return self.slow.shares().get(name, 1.0)


def test_first_tokens_three_times_as_late_as_its_likes_are_slow():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(20)
    assert not fleet.slow.by_key
    fleet.rounds(10, {"a": 0.6})
    assert not fleet.slow.by_key, "2.3 times"
    fleet.rounds(10, {"a": 2.0})
    assert fleet.slow.bars("a", M) == "slow: first tokens 7.0× its like"
    assert fleet.slow.bars("b", M) is None
    assert fleet.slow.words() == {"a": "slow: first tokens 7.0× its like"}


def test_slow_tokens_are_slow_and_so_are_streams_that_stall():
    fleet = Fleet("a", "b", "c")
    for _ in range(ANSWERS_MIN):
        fleet.answers("a", 0.2, token_s=0.1)
        fleet.answers("b", 0.2)
        fleet.answers("c", 0.2)
    fleet.later(JUDGE_S)
    assert fleet.slow.bars("a", M) == "slow: tokens 7.0× its like"


def test_tokens_that_come_later_because_the_batch_is_fuller_are_not_slow():
    """Another router's requests are in it: it computes more than its like."""
    fleet = Fleet("a", "b", "c", a={"running": 32}, b={"running": 2}, c={"running": 2})
    for _ in range(3):
        for _ in range(ANSWERS_MIN):
            fleet.answers("a", 0.2, token_s=0.05)
            fleet.answers("b", 0.2)
            fleet.answers("c", 0.2)
        fleet.later(JUDGE_S)
    assert not fleet.slow.by_key


def test_first_tokens_that_wait_for_a_load_are_not_slow():
    fleet = Fleet("a", "b", "c", a={"loading": {"m": 40.0}})
    fleet.rounds(10, {"a": 9.0})
    assert not fleet.slow.by_key


def test_what_only_a_slow_one_can_take_leaves_it_no_long_debt():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(10, {"a": 0.9})
    for _ in range(1000):
        fleet.slow.placed("a", M, 3)
    given = 0
    while fleet.slow.bars("a", M) is not None and given < 40:
        fleet.slow.placed("b", M, 3)
        given += 1
    assert given < 40


def test_plain_answers_are_compared_with_ones_as_long():
    fleet = Fleet("a", "b", "c")
    long = Served(prompt_tokens=100, cached_tokens=0, output_tokens=900)
    for _ in range(10):
        for name, served in (("a", long), ("b", long), ("c", ALIKE), ("c", long)):
            fleet.answers(name, 0.0, served=served, streams=False)
        fleet.later(JUDGE_S)
    assert not fleet.slow.by_key
    fleet.rounds(20, {"a": 2.0}, streams=False)
    assert "plain answers" in (fleet.slow.bars("a", M) or "")


def test_few_answers_show_nothing_unless_they_are_twice_as_slow():
    for ttft_s, least in ((1.0, ANSWERS_MIN), (9.0, RUN)):
        fleet = Fleet("a", "b", "c")
        fleet.rounds(least - 1, {"a": ttft_s})
        assert not fleet.slow.by_key
        fleet.rounds(1, {"a": ttft_s})
        assert fleet.slow.by_key


def test_one_that_is_alone_has_no_like_nor_has_another_engine():
    fleet = Fleet("a")
    fleet.rounds(20, {"a": 9.0})
    assert not fleet.slow.by_key
    fleet = Fleet("a", "b", a={"engine": "llamacpp"})
    fleet.rounds(20, {"a": 9.0})
    assert not fleet.slow.by_key


def test_a_first_token_that_does_not_come_is_noticed_before_it_does():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(10)
    for _ in range(5):
        fleet.request += 1
        asked = request(fleet.request, model=M)
        fleet.slow.sent(asked, fleet.replicas[ReplicaId("a")], 100, fleet.now)
    fleet.later(JUDGE_S)
    fleet.later(JUDGE_S)
    assert "first tokens" in (fleet.slow.bars("a", M) or "")


def test_the_share_falls_by_halves_at_most_and_comes_back_by_degrees():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(10)
    shares = []
    for _ in range(12):
        fleet.rounds(1, {"a": 20.0})
        shares.append(fleet.share("a"))
    assert shares[-1] == SHARE_MIN
    assert all(after >= before / 2.0 for before, after in zip([1.0, *shares], shares, strict=False))
    shares = [SHARE_MIN]
    while fleet.slow.by_key:
        fleet.rounds(1)
        shares.append(fleet.share("a"))
    assert 10 < len(shares) < 40
    assert all(b <= a * GROWTH * 1.001 for a, b in pairwise(shares))


def test_without_newer_answers_it_gets_work_again():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(20, {"a": 20.0})
    assert fleet.slow.by_key
    for _ in range(int(FRESH_S) + 25):
        fleet.later(JUDGE_S)
    assert not fleet.slow.by_key


@pytest.mark.parametrize(("slow", "least"), [("ab", 2), ("abc", 0), ("abcd", 0)])
def test_at_most_half_are_slow(slow, least):
    fleet = Fleet("a", "b", "c", "d")
    fleet.rounds(20, dict.fromkeys(slow, 5.0))
    assert least <= len(fleet.slow.words()) <= 2


def test_the_worst_half_is_slow():
    fleet = Fleet("a", "b", "c", "d", "e")
    fleet.rounds(20, {"a": 9.0, "b": 30.0, "c": 0.25})
    assert set(fleet.slow.words()) == {"a", "b"}


def test_a_queue_that_the_replica_tells_of_is_no_slowness():
    fleet = Fleet("a", "b", "c", a={"pending": 7})
    fleet.rounds(20, {"a": 9.0})
    assert not fleet.slow.by_key


def test_one_that_computes_more_than_its_like_is_not_judged():
    fleet = Fleet("a", "b", "c")
    for _ in range(20):
        for _ in range(3):
            fleet.answers("a", 2.0, token_s=0.05)
        fleet.rounds(1, {"a": 2.0})
    assert not fleet.slow.by_key


def test_a_longer_prompt_is_compared_with_longer_ones():
    fleet = Fleet("a", "b", "c")
    long = Served(prompt_tokens=9000, cached_tokens=0, output_tokens=17)
    cached = Served(prompt_tokens=9000, cached_tokens=8900, output_tokens=17)
    for _ in range(20):
        fleet.answers("b", 0.2)
        fleet.answers("b", 1.8, served=long)
        fleet.answers("c", 0.2, served=cached)
        fleet.answers("c", 1.8, served=long)
        fleet.answers("a", 1.8, served=long)
        fleet.later(JUDGE_S)
    assert not fleet.slow.by_key


def test_it_is_given_its_share_of_an_equal_part_whoever_chooses():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(20, {"a": 2.0})
    share, given = fleet.share("a"), 0
    assert share == pytest.approx((3 / 7) ** 2, rel=0.05)
    for _ in range(3000):
        name = "b" if fleet.slow.bars("a", M) else "a"
        given += name == "a"
        fleet.slow.placed(name, M, 3)
    assert given == pytest.approx(1000 * share, rel=0.1)


def test_people_are_told_for_a_while_of_a_model_that_a_ready_replica_no_longer_lists():
    fleet = Fleet("a", "b")
    fleet.rounds(1)
    assert fleet.slow.words() == {}
    on_path = served_name(M, EMBEDDINGS)
    asked = request(99, model=on_path, streams=False)
    fleet.slow.sent(asked, fleet.replicas[ReplicaId("a")], 100, fleet.now)
    fleet.slow.served(99, ALIKE, fleet.now)
    for fields, says in (
        ({"models": (M, "other")}, {}),
        ({"models": ("other",), "loadable": {M: 1.0}}, {}),
        ({"models": (), "state": ReplicaState.DOWN}, {}),
        ({"models": ("other",)}, {"a": "no longer serves 'm'"}),
    ):
        fleet.replicas[ReplicaId("a")] = Replica(beat("a", **fields), fleet.now)
        fleet.later(JUDGE_S)
        assert fleet.slow.words() == says
    fleet.later(GONE_S)
    assert fleet.slow.words() == {}


def test_what_is_gone_is_forgotten():
    fleet = Fleet("a", "b", "c")
    fleet.rounds(20, {"a": 9.0})
    fleet.slow.forget(ReplicaId("a"))
    assert not fleet.slow.by_key
    del fleet.replicas[ReplicaId("b")]
    fleet.later(JUDGE_S)
    fleet.rounds(20, {"a": 9.0})
    assert fleet.slow.by_key


@pytest.mark.parametrize("seed", range(20))
def test_equal_replicas_are_never_slow(seed):
    dice, fleet = Random(seed), Fleet("a", "b", "c", "d")
    for _ in range(300):
        for name in fleet.replicas:
            if dice.random() < 0.7:
                fleet.answers(name, 0.1 + dice.expovariate(4.0), dice.uniform(0.01, 0.025))
        fleet.later(JUDGE_S)
        assert not fleet.slow.by_key


class Silent(Fleet):
    """Of three alike, `a` has fallen silent; what waits there is placed again if it is overdue."""

    def __init__(self, rounds: int = 20, **beats: dict[str, object]) -> None:
        super().__init__("a", "b", "c", **beats)
        self.rounds(rounds)
        self.sent_at: dict[int, float] = {}
        self.again: dict[int, float] = {}  # how long each had waited

    def send(self, name: str, tokens: int = 100, streams: bool = True) -> int:
        self.request += 1
        asked = request(self.request, model=M, streams=streams)
        self.slow.sent(asked, self.replicas[ReplicaId(name)], tokens, self.now)
        self.sent_at[self.request] = self.now
        return self.request

    def run(self, seconds: float, *answering: str) -> None:
        """Each of these answers a request every 0.1 s, in 0.2 s."""
        for _ in range(round(seconds / 0.1)):
            for name in answering:
                self.answers(name, 0.2)
            self.later(0.1)
            for key in self.slow.overdue(self.replicas, self.now):
                if self.slow.may_place_again:
                    self.slow.placed_again(key, self.now)
                    self.slow.left(key)
                    self.again[key] = self.now - self.sent_at[key]


def test_a_request_at_a_silent_replica_is_overdue_once_its_like_answered_later_ones():
    fleet = Silent()
    stuck = fleet.send("a")
    fleet.run(3.0)
    assert not fleet.again, "nobody answers: the region may be slow, or this router stood still"
    fleet.run(0.2, "b")
    assert set(fleet.again) == {stuck}


def test_it_takes_twice_what_any_of_its_like_took():
    fleet = Silent()
    fleet.answers("c", 0.9)
    fleet.later(JUDGE_S)
    stuck = fleet.send("a")
    fleet.run(10.0, "b", "c")
    assert 1.2 < fleet.again[stuck] < 2.0


def test_a_replica_that_brings_something_is_not_silent():
    fleet = Silent()
    stuck = fleet.send("a")
    fleet.run(10.0, "a", "b", "c")
    assert not fleet.again
    fleet.run(2.0, "b", "c")
    assert set(fleet.again) == {stuck}, "it has fallen silent since"


def test_the_first_answers_of_a_kind_say_not_how_long_others_may_take():
    """They wait for connections and compilers."""
    fleet = Silent(rounds=0)
    fleet.rounds(2, dict.fromkeys("abc", 9.0))
    fleet.rounds(20)
    stuck = fleet.send("a")
    fleet.run(3.0, "b", "c")
    assert fleet.again[stuck] < 1.0


@pytest.mark.parametrize("field", [{"pending": 3}, {"loading": {"m": 40.0}}])
def test_what_waits_for_others_or_for_a_load_is_not_overdue(field):
    fleet = Silent(a=field)
    fleet.send("a")
    fleet.run(30.0, "b", "c")
    assert not fleet.again


def test_what_came_behind_an_overdue_one_is_overdue_too():
    fleet = Silent()
    first = fleet.send("a")
    beat_of = fleet.replicas[ReplicaId("a")]
    beat_of.update(beat("a", 2, pending=1), fleet.now)
    second = fleet.send("a")
    fleet.run(3.0, "b", "c")
    assert list(fleet.again) == [first, second]


def test_those_that_were_sent_before_the_first_was_overdue_have_no_longer_for_it():
    fleet = Silent()
    for _ in range(7):
        fleet.send("a")
    fleet.run(20.0, "b", "c")
    waits = sorted(fleet.again.values())
    assert len(waits) == 7
    steps = [after - before for before, after in pairwise(waits)]
    assert max(steps) < 1.5 * min(step for step in steps if step), "each has those before it"


def test_its_own_slow_answers_give_it_no_more_time():
    fleet = Silent()
    fleet.rounds(5, {"a": 5.0})
    fleet.later(5.0)
    stuck = fleet.send("a")
    fleet.run(3.0, "b", "c")
    assert fleet.again[stuck] < 1.0


def test_many_that_are_overdue_together_count_once_for_those_that_follow():
    fleet = Silent()
    for _ in range(7):
        fleet.send("a")
    fleet.run(10.0, "b", "c")
    assert len(fleet.again) == 7
    following = fleet.send("a")
    fleet.run(3.0, "b", "c")
    assert fleet.again[following] < 1.0


def test_long_prompts_have_longer_whosever_they_are():
    fleet = Silent()
    fleet.send("a", tokens=3200)
    fleet.run(8.0, "b", "c")
    assert not fleet.again
    fleet = Silent(a={"prefill_queued_tokens": 3200})
    fleet.send("a")
    fleet.run(8.0, "b", "c")
    assert not fleet.again, "another router's prompt is before it"
    fleet = Silent()
    fleet.send("a", tokens=3200)
    fleet.later(0.1)
    fleet.send("a")
    fleet.run(8.0, "b", "c")
    assert not fleet.again, "it waits for the one before"


def test_a_long_plain_answer_is_no_silence():
    """Its like answer only short ones meanwhile."""
    fleet = Silent()
    short = Served(prompt_tokens=100, cached_tokens=0, output_tokens=5)
    for _ in range(30):
        for name in "bc":
            fleet.answers(name, 0.01, served=short, streams=False)
        fleet.later(JUDGE_S)
    fleet.send("a", streams=False)
    fleet.run(30.0, "b", "c")
    assert not fleet.again


def test_a_plain_answer_at_a_replica_that_was_late_has_as_long_as_the_longest_ones():
    fleet = Silent()
    long = Served(prompt_tokens=100, cached_tokens=0, output_tokens=900)
    for _ in range(10):
        fleet.answers("b", 0.0, served=long, streams=False)
        fleet.answers("c", 0.0, served=ALIKE, streams=False)
        fleet.later(JUDGE_S)
    stream, stuck = fleet.send("a"), fleet.send("a", streams=False)
    fleet.run(30.0, "b", "c")
    assert fleet.again[stream] < 2.0
    assert fleet.again[stuck] >= 9.0


def test_of_plain_answers_alone_it_takes_three():
    fleet = Silent(rounds=0)
    fleet.rounds(20, streams=False)
    stuck = [fleet.send("a", streams=False) for _ in range(2)]
    fleet.run(10.0, "b", "c")
    assert not fleet.again, "two may be long ones"
    stuck.append(fleet.send("a", streams=False))
    fleet.run(3.0, "b", "c")
    assert set(fleet.again) == set(stuck)


@pytest.mark.parametrize("seed", range(5))
def test_few_requests_are_placed_again_whatever_a_replica_does(seed):
    """And one that was late often has longer each time: it may have to load its model."""
    dice, fleet, sent = Random(seed), Silent(), 0
    for _ in range(600):
        if dice.random() < 0.5:
            fleet.send("a")
        fleet.run(0.1, *(name for name in "bc" if dice.random() < 0.9))
        sent = fleet.request
    assert 0 < len(fleet.again) <= AGAIN_SHARE * sent + AGAIN_MAX
    waits = list(fleet.again.values())
    assert max(waits) > 20 * min(waits)


@pytest.mark.parametrize("seed", range(20))
def test_in_a_region_whose_replicas_are_alike_few_are_overdue(seed):
    """Whatever load slows all of them down."""
    dice, fleet = Random(seed), Silent()
    for step in range(400):
        slower = 5.0 if 100 < step < 300 else 1.0
        for name in fleet.replicas:
            fleet.answers(name, slower * (0.1 + dice.expovariate(10.0)), 0.01)
        fleet.run(0.5)
    assert not fleet.again
