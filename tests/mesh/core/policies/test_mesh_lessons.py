"""What first tokens teach: speeds that are found, priors that are leant on, models kept apart."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.policies import mesh_lessons as module
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.mesh_lessons import (
    MEMORY,
    RIDGE,
    SPEED_START,
    FittedSpeed,
    ReplicaSpeeds,
    SpeedFit,
    SpeedModel,
    SpeedModels,
)
from schemas.decision import CandidateKind
from schemas.ids import ModelId
from tests.mesh.core.build import beat, spot

TRUE = FittedSpeed(base_s=0.03, s_per_token=2e-4, s_per_decode=0.001)
PRIOR = FittedSpeed(base_s=0.05, s_per_token=1e-4, s_per_decode=0.0)


def target(name, peer=None):
    return Target(name, 0, peer=peer)


def answers(dice, count, speed=TRUE):
    """Tokens, running and the seconds they take at that speed."""
    for _ in range(count):
        tokens, running = dice.randrange(10, 8000), dice.randrange(40)
        ttft_s = speed.base_s + speed.s_per_token * tokens + speed.s_per_decode * running
        yield tokens, running, ttft_s


def test_nothing_taught_is_the_prior():
    assert SpeedFit().speed(PRIOR) == PRIOR


def test_one_answer_by_hand():
    """Only a base to learn: (w + RIDGE) × d = y - base."""
    fit = SpeedFit()
    fit.add(0.0, 0.0, 0.05 + 0.9)
    speed = fit.speed(PRIOR)
    assert speed.base_s == pytest.approx(0.05 + 0.9 / (1.0 + RIDGE))
    assert (speed.s_per_token, speed.s_per_decode) == (pytest.approx(1e-4), 0.0)


def test_a_speed_that_is_told_has_every_field_at_its_place():
    """It is made past the constructor, which would see to that."""
    lessons = SpeedModel()
    told = lessons.told_by(beat("a", prefill_s_per_token=2e-4, prefill_base_s=0.03))
    assert told == FittedSpeed(
        base_s=0.03, s_per_token=2e-4, s_per_decode=lessons.fleet_speed.s_per_decode
    )


def test_what_agrees_with_the_prior_changes_nothing():
    fit = SpeedFit()
    for tokens, running, ttft_s in answers(Random(1), 50, PRIOR):
        fit.add(tokens / 1000, running, ttft_s)
    assert fit.speed(PRIOR) == pytest.approx(PRIOR, abs=1e-9)


def test_each_one_is_nearer_to_the_truth_than_the_fleet_and_the_fleet_than_the_start():
    lessons = SpeedModel()
    for tokens, running, ttft_s in answers(Random(2), 400):
        lessons.began(spot("a"), tokens, running, ttft_s)
    own, fleet = lessons.speed(target("a")).s_per_token, lessons.fleet_speed.s_per_token
    assert SPEED_START.s_per_token < fleet < own < TRUE.s_per_token
    assert own == pytest.approx(TRUE.s_per_token, rel=RIDGE * (1.0 - MEMORY))


def test_a_replica_that_slowed_down_is_noticed_within_its_memory():
    lessons, dice = SpeedModel(), Random(3)
    for tokens, running, ttft_s in answers(dice, 200):
        lessons.began(spot("a"), tokens, running, ttft_s)
    before = lessons.speed(target("a")).s_per_token
    slow = FittedSpeed(TRUE.base_s, 3 * TRUE.s_per_token, TRUE.s_per_decode)
    for tokens, running, ttft_s in answers(dice, round(1 / (1 - MEMORY)), slow):
        lessons.began(spot("a"), tokens, running, ttft_s)
    assert lessons.speed(target("a")).s_per_token > 2 * before


def test_who_has_taught_nothing_is_like_the_fleet():
    lessons = SpeedModel()
    assert lessons.speed(target("b")) == SPEED_START
    for tokens, running, ttft_s in answers(Random(4), 100):
        lessons.began(spot("a"), tokens, running, ttft_s)
    assert lessons.speed(target("b")) == lessons.fleet_speed != SPEED_START


def test_who_is_forgotten_is_like_the_fleet_again():
    lessons = SpeedModel()
    lessons.began(spot("a"), 1000, 0, 5.0)
    lessons.resided(spot("a"), 1.0)
    assert lessons.speed(target("a")) != lessons.fleet_speed
    lessons.forget(spot("a"))
    lessons.forget(spot("a"))
    assert lessons.speed(target("a")) == lessons.fleet_speed
    assert lessons.of(target("a")).residence_s == module.RESIDENCE_START_S


def test_a_region_is_not_the_replica_of_its_name():
    lessons = SpeedModel()
    lessons.began(Destination(CandidateKind.PEER, "a"), 1000, 0, 5.0)
    lessons.forget(spot("a"))
    assert lessons.of(target("a")).speed is None
    assert lessons.of(target("a", peer=object())).speed is not None


def test_an_accident_is_no_speed():
    seconds = []
    for ttft_s in (module.TTFT_S_MAX, 1e9):
        lessons = SpeedModel()
        lessons.began(spot("a"), 1000, 0, ttft_s)
        seconds.append(lessons.speed(target("a")))
    assert seconds[0] == seconds[1]
    lessons = SpeedModel()
    lessons.began(spot("a"), 1000, 0, -3.0)  # it came before it could have
    assert lessons.speed(target("a")).s_per_token > 0.0


def test_averages_are_means_of_the_first_and_then_move_slowly():
    lessons = SpeedModel()
    before = lessons.prefill_tokens
    for count in range(1, 11):
        lessons.prompt(int(before) + 100, goes_on=True)
        mean = before + 100 * count / (count + module.START_COUNTS)
        assert lessons.prefill_tokens == pytest.approx(mean)
    assert lessons.returns == pytest.approx(10 / module.START_COUNTS)  # soon enough to stay home
    for _ in range(500):
        lessons.prompt(int(before), goes_on=False)
    before = lessons.prefill_tokens
    lessons.prompt(int(before) + 100, goes_on=False)
    assert lessons.prefill_tokens - before == pytest.approx(100 * module.WEIGHT, rel=0.02)
    for _ in range(500):
        lessons.answer(1000, 40)
    assert lessons.output_tokens == pytest.approx(40, abs=0.1)
    assert lessons.kv_tokens == pytest.approx(1040, abs=0.1)


def test_from_short_prompts_alone_nothing_follows_for_long_ones():
    lessons = SpeedModel()
    for _ in range(20):
        lessons.began(spot("a"), 3, 0, 0.25)
    base_s, s_per_token, _ = lessons.speed(target("a"))
    assert base_s + 3 * s_per_token == pytest.approx(0.25, rel=0.3)
    assert s_per_token < 3 * SPEED_START.s_per_token
    assert lessons.speed(target("b")).s_per_token < 3 * SPEED_START.s_per_token


def test_a_conversation_is_expected_to_return_as_often_as_they_do():
    """Of three prompts in four that go on from an answer, three follow each one; of all, many."""
    lessons = SpeedModel()
    assert lessons.returns == 0.0
    for number in range(1000):
        lessons.prompt(100, goes_on=number % 4 > 0)
    assert lessons.returns == pytest.approx(3.0, rel=0.1)
    for _ in range(1000):
        lessons.prompt(100, goes_on=True)
    assert lessons.returns == module.RETURNS_MAX


def test_models_share_no_speed():
    courses, dice = SpeedModels(), Random(5)
    small, large = courses.of(ModelId("8b")), courses.of(ModelId("70b"))
    for lessons, factor in ((small, 1.0), (large, 9.0)):
        for tokens, running, ttft_s in answers(dice, 100):
            lessons.began(spot("eu"), tokens, running, factor * ttft_s)
    slopes = [courses.of(ModelId(m)).fleet_speed.s_per_token for m in ("8b", "70b")]
    assert slopes[1] > 5 * slopes[0]
    courses.forget(spot("eu"))
    assert all(courses.of(ModelId(m)).of(target("eu")).speed is None for m in ("8b", "70b"))


def test_models_are_limited():
    courses = SpeedModels()
    first = courses.of(ModelId("0"))
    for number in range(module.MODELS_MAX):
        courses.of(ModelId(str(number)))
    assert courses.of(ModelId("0")) is first
    courses.of(ModelId("one more"))
    assert courses.of(ModelId("0")) is not first


SIZES = st.floats(0.0, 1e7, allow_subnormal=False)


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.floats(0, 1e4), st.floats(0, 60)), max_size=40))
def test_no_answers_make_a_speed_that_can_not_be(seen):
    fit = SpeedFit()
    for tokens, running, ttft_s in seen:
        fit.add(tokens / 1000, running, ttft_s)
    speed = fit.speed(PRIOR)
    assert all(value == value and value < float("inf") for value in speed)
    assert speed.base_s >= 0.1 * PRIOR.base_s
    assert speed.s_per_token >= 0.0999 * PRIOR.s_per_token
    assert speed.s_per_decode >= 0.0


def test_a_standing_is_kept_until_its_replica_has_another_speed():
    """Its own, or the fleet's as long as it has none."""
    lessons = SpeedModel()
    lessons.began(spot("taught"), 1000, 4, 0.2)

    def stand(*names):
        for name in names:
            base_s, s_per_token, _ = lessons.speed_to_stand(beat(name))
            standing = ReplicaSpeeds(
                beat(name), s_per_token, 0, base_s, 0.0, 0.0, math.inf, None, math.inf
            )
            lessons.standings[name] = standing

    stand("taught", "other", "leans")
    lessons.began(spot("other"), 1000, 4, 0.2)
    assert lessons.standings.keys() == {"taught"}
    stand("other", "leans")
    lessons.began(
        Destination(CandidateKind.PEER, "eu"), 1000, 4, 0.2
    )  # the fleet's speed is another
    assert lessons.standings.keys() == {"taught", "other"}
    lessons.forget(spot("taught"))
    assert lessons.standings.keys() == {"other"}


def test_a_replica_has_its_own_speed_or_the_one_it_told_or_the_fleets():
    lessons = SpeedModel()
    told = beat("a", prefill_s_per_token=3e-4, prefill_base_s=0.07)
    assert lessons.speed_to_stand(told) == FittedSpeed(0.07, 3e-4, 0.0)
    lessons.began(spot("b"), 1000, 4, 0.9)
    assert lessons.speed_to_stand(beat("a")) == lessons.fleet_speed
    assert lessons.speed_to_stand(beat("b")) == lessons.speed(target("b"))
