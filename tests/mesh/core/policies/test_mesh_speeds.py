"""What first tokens teach: speeds that are found, priors that are leant on, models kept apart."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import mesh_speeds as module
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.mesh import MODELS_MAX, MeshPolicy
from mesh.core.policies.mesh_speeds import (
    IDLE_HALF_LIFE_S,
    MEMORY,
    RIDGE,
    SPEED_START,
    FittedSpeed,
    SpeedFit,
    SpeedModel,
)
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.ids import ModelId
from schemas.state import PrefillPrior
from tests.mesh.core.build import beat, request, spot

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


def test_what_agrees_with_the_prior_changes_nothing():
    fit = SpeedFit()
    for tokens, running, ttft_s in answers(Random(1), 50, PRIOR):
        fit.add(tokens / 1000, running, ttft_s)
    assert fit.speed(PRIOR) == pytest.approx(PRIOR, abs=1e-9)


def test_each_one_is_nearer_to_the_truth_than_the_fleet_and_the_fleet_than_the_start():
    speeds = SpeedModel()
    for tokens, running, ttft_s in answers(Random(2), 400):
        speeds.began(spot("a"), tokens, running, ttft_s, now=0.0)
    own, fleet = speeds.speed(target("a")).s_per_token, speeds.fleet_speed.s_per_token
    assert SPEED_START.s_per_token < fleet < own < TRUE.s_per_token
    assert own == pytest.approx(TRUE.s_per_token, rel=RIDGE * (1.0 - MEMORY))


def test_a_replica_that_slowed_down_is_noticed_within_its_memory():
    speeds, dice = SpeedModel(), Random(3)
    for tokens, running, ttft_s in answers(dice, 200):
        speeds.began(spot("a"), tokens, running, ttft_s, now=0.0)
    before = speeds.speed(target("a")).s_per_token
    slow = FittedSpeed(TRUE.base_s, 3 * TRUE.s_per_token, TRUE.s_per_decode)
    for tokens, running, ttft_s in answers(dice, round(1 / (1 - MEMORY)), slow):
        speeds.began(spot("a"), tokens, running, ttft_s, now=0.0)
    assert speeds.speed(target("a")).s_per_token > 2 * before


def test_who_has_taught_nothing_is_like_the_fleet():
    speeds = SpeedModel()
    assert speeds.speed(target("b")) == SPEED_START
    for tokens, running, ttft_s in answers(Random(4), 100):
        speeds.began(spot("a"), tokens, running, ttft_s, now=0.0)
    assert speeds.speed(target("b")) == speeds.fleet_speed != SPEED_START


def test_who_is_forgotten_is_like_the_fleet_again():
    speeds = SpeedModel()
    speeds.began(spot("a"), 1000, 0, 5.0, now=0.0)
    speeds.resided(spot("a"), 1.0)
    assert speeds.speed(target("a")) != speeds.fleet_speed
    speeds.forget(spot("a"))
    speeds.forget(spot("a"))
    assert speeds.speed(target("a")) == speeds.fleet_speed
    assert speeds.of(target("a")).residence_s == module.RESIDENCE_START_S


def test_a_region_is_not_the_replica_of_its_name():
    speeds = SpeedModel()
    speeds.began(Destination(CandidateKind.PEER, "a"), 1000, 0, 5.0, now=0.0)
    speeds.forget(spot("a"))
    assert speeds.of(target("a")).speed is None
    assert speeds.of(target("a", peer=object())).speed is not None


def test_an_accident_is_no_speed():
    seconds = []
    for ttft_s in (module.TTFT_S_MAX, 1e9):
        speeds = SpeedModel()
        speeds.began(spot("a"), 1000, 0, ttft_s, now=0.0)
        seconds.append(speeds.speed(target("a")))
    assert seconds[0] == seconds[1]
    speeds = SpeedModel()
    speeds.began(spot("a"), 1000, 0, -3.0, now=0.0)  # it came before it could have
    assert speeds.speed(target("a")).s_per_token > 0.0


def test_averages_are_means_of_the_first_and_then_move_slowly():
    speeds = SpeedModel()
    before = speeds.prefill_tokens
    for count in range(1, 11):
        speeds.prompt(int(before) + 100, goes_on=True)
        mean = before + 100 * count / (count + module.START_COUNTS)
        assert speeds.prefill_tokens == pytest.approx(mean)
    assert speeds.returns == pytest.approx(10 / module.START_COUNTS)  # soon enough to stay home
    for _ in range(500):
        speeds.prompt(int(before), goes_on=False)
    before = speeds.prefill_tokens
    speeds.prompt(int(before) + 100, goes_on=False)
    assert speeds.prefill_tokens - before == pytest.approx(100 * module.WEIGHT, rel=0.02)
    for _ in range(500):
        speeds.answer(spot("a"), 1000, 40)
    assert speeds.output_tokens == pytest.approx(40, abs=0.1)
    assert speeds.kv_tokens == pytest.approx(1040, abs=0.1)


def test_from_short_prompts_alone_nothing_follows_for_long_ones():
    speeds = SpeedModel()
    for _ in range(20):
        speeds.began(spot("a"), 3, 0, 0.25, now=0.0)
    base_s, s_per_token, _ = speeds.speed(target("a"))
    assert base_s + 3 * s_per_token == pytest.approx(0.25, rel=0.3)
    assert s_per_token < 3 * SPEED_START.s_per_token
    assert speeds.speed(target("b")).s_per_token < 3 * SPEED_START.s_per_token


def test_a_conversation_is_expected_to_return_as_often_as_they_do():
    """Of three prompts in four that go on from an answer, three follow each one; of all, many."""
    speeds = SpeedModel()
    assert speeds.returns == 0.0
    for number in range(1000):
        speeds.prompt(100, goes_on=number % 4 > 0)
    assert speeds.returns == pytest.approx(3.0, rel=0.1)
    for _ in range(1000):
        speeds.prompt(100, goes_on=True)
    assert speeds.returns == module.RETURNS_MAX


def speeds_of(policy, model):
    return policy._speeds(request(1, model=ModelId(model)))


def test_models_share_no_speed():
    policy, dice = MeshPolicy(RouterSettings(), Random(1)), Random(5)
    small, large = speeds_of(policy, "8b"), speeds_of(policy, "70b")
    for speeds, factor in ((small, 1.0), (large, 9.0)):
        for tokens, running, ttft_s in answers(dice, 100):
            speeds.began(spot("eu"), tokens, running, factor * ttft_s, now=0.0)
    assert large.fleet_speed.s_per_token > 5 * small.fleet_speed.s_per_token
    policy.forget(spot("eu"))
    assert small.of(target("eu")).speed is large.of(target("eu")).speed is None


def test_models_are_limited():
    policy = MeshPolicy(RouterSettings(), Random(1))
    first = speeds_of(policy, "0")
    for number in range(MODELS_MAX):
        speeds_of(policy, str(number))
    assert speeds_of(policy, "0") is first
    speeds_of(policy, "one more")
    assert speeds_of(policy, "0") is not first


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


def known(name, **fields):
    return Replica(beat(name, **fields), 0.0)


def test_a_replicas_speeds_are_kept_until_they_change():
    """Its own, or the fleet's as long as it has none."""
    speeds = SpeedModel()
    speeds.began(spot("taught"), 1000, 4, 0.2, now=0.0)

    def read(*names):
        for name in names:
            speeds.of_replica(known(name))

    read("taught", "other", "unknown")
    speeds.began(spot("other"), 1000, 4, 0.2, now=0.0)
    assert speeds.kept.keys() == {"taught"}
    read("other", "unknown")
    peer = Destination(CandidateKind.PEER, "eu")
    speeds.began(peer, 1000, 4, 0.2, now=0.0)  # the fleet's speed is another
    assert speeds.kept.keys() == {"taught", "other"}
    speeds.forget(spot("taught"))
    assert speeds.kept.keys() == {"other"}


def test_a_replica_has_its_own_speed_or_the_one_it_reports_or_the_fleets():
    speeds = SpeedModel()
    reported = speeds.of_replica(known("a", prefill_s_per_token=3e-4, prefill_base_s=0.07))
    assert (reported.base_s, reported.s_per_token) == (0.07, 3e-4)
    speeds.began(spot("b"), 1000, 4, 0.9, now=0.0)
    for name, speed in (("a", speeds.fleet_speed), ("b", speeds.speed(target("b")))):
        one = speeds.of_replica(known(name))
        assert (one.base_s, one.s_per_token) == speed[:2]


def test_prompts_alone_are_priced_without_an_answer():
    def priced(answer_tokens):
        policy = MeshPolicy(RouterSettings(), Random(1))
        full = Replica(
            beat("a", running=4, kv_capacity_tokens=1000, kv_used_ratio=0.8, batch_max=64), 0.0
        )
        busy = Target("a", 4, replica=full)
        asked = request(1, "AA", answer_tokens=answer_tokens)  # 128 tokens, 200 are free
        [score] = policy.choose(asked, [busy], 0.0).scores
        return score.terms

    chat, embeddings = priced(None), priced(0)
    assert chat["prefill_s"] == embeddings["prefill_s"]
    assert chat["memory_s"] > 0.0 == embeddings["memory_s"]
    assert chat["others_s"] == embeddings["others_s"] > 0.0, "decodes wait for both prompts"


FAST, SLOW = (
    PrefillPrior(
        short_tokens=100,
        short_s=base_s + slope * 100,
        more_tokens=1000,
        more_s=slope * 1000,
        error=0.2,
    )
    for base_s, slope in ((0.02, 5e-5), (0.04, 5e-4))
)


def with_prior(name, prior, now=100.0, **fields):
    return Replica(beat(name, prefill_prior=prior, **fields), now)


def at(replica):
    return Target(replica.heartbeat.replica, replica.load, replica=replica)


def test_priors_are_speeds_from_the_start_and_keep_replicas_apart():
    speeds = SpeedModel()
    fast, slow = with_prior("fast", FAST), with_prior("slow", SLOW)
    assert speeds.of_replica(fast).s_per_token == pytest.approx(5e-5)
    assert speeds.of_replica(slow).s_per_token == pytest.approx(5e-4)
    for number in range(8):
        speeds.began(spot("fast"), 2000.0, 0.0, 0.12, now=100.0 + number)
    assert speeds.of_replica(slow).s_per_token == pytest.approx(5e-4)
    speeds.began(spot("slow"), 10.0, 0.0, 0.045, now=108.0)
    slow.update(beat("slow", 2, prefill_prior=SLOW), 108.1)
    assert speeds.of_replica(slow).s_per_token == pytest.approx(5e-4, rel=0.5)


def test_a_false_prior_is_let_go():
    speeds, replica = SpeedModel(), with_prior("a", FAST)
    for number, (tokens, running, ttft_s) in enumerate(answers(Random(2), 60)):
        speeds.of_replica(replica)
        speeds.began(spot("a"), tokens, running, ttft_s, now=101.0 + number / 100)
    assert speeds.speed(at(replica)).s_per_token == pytest.approx(TRUE.s_per_token, rel=0.1)


@pytest.mark.parametrize(("error", "least"), [(0.01, 32.0), (0.25, 16.0), (10.0, 1.0)])
def test_a_prior_is_worth_few_answers_whatever_its_agent_claims(error, least):
    own = module.CandidateSpeed()
    own.lean_on(PrefillPrior(short_tokens=1, short_s=0, more_tokens=1, more_s=1, error=error))
    assert own.prior_answers == pytest.approx(least)


def test_what_was_learned_fades_while_a_replica_has_no_work():
    speeds, replica = SpeedModel(), with_prior("a", FAST)
    speeds.of_replica(replica)
    for number in range(20):
        speeds.began(spot("a"), 20.0, 0.0, 0.9, now=100.0 + number / 10)
    busy = {"running": 1, "outstanding": 1, "prefill_prior": FAST}
    replica.update(beat("a", 2, **busy), 102.0)
    inflated = speeds.of_replica(replica).base_s
    replica.update(beat("a", 3, **busy), 102.0 + 10 * IDLE_HALF_LIFE_S)
    assert speeds.of_replica(replica).base_s == pytest.approx(inflated), "it has work"
    for beats in range(1, 12):
        replica.update(beat("a", 3 + beats, prefill_prior=FAST), 402.0 + IDLE_HALF_LIFE_S * beats)
        speeds.of_replica(replica)
    replica.update(beat("a", 99), replica.seen_at + 9999.0)
    usual = speeds.speed(at(replica))
    speeds.of_replica(replica)
    assert speeds.speed(at(replica)).base_s < 0.8 * inflated
    assert usual.base_s >= speeds.speed(at(replica)).base_s > 0.0


class Region:
    """Replicas whose heartbeats come once a second, and what was learned of them."""

    def __init__(self, names="abcd"):
        self.speeds, self.now, self.seq = SpeedModel(), 100.0, 1
        self.replicas = {name: Replica(beat(name), self.now) for name in names}

    def ttft_s(self, name, tokens=200):
        known = self.speeds.of_replica(self.replicas[name])
        return known.base_s + tokens * known.s_per_token

    def second(self, busy=()):
        self.now, self.seq = self.now + 1.0, self.seq + 1
        for name, replica in self.replicas.items():
            replica.update(beat(name, self.seq, outstanding=int(name in busy)), self.now)
            self.ttft_s(name)

    def rest(self, seconds):
        for _ in range(int(seconds)):
            self.second()

    def answer(self, ttft_s, names="abcd"):
        """One request at each; its first token came so long after it was placed."""
        self.second(busy=names)
        for name in names:
            self.speeds.began(spot(name), 200.0, 0.0, ttft_s, now=self.now)


@pytest.mark.parametrize(("again_s", "least_s", "most_s"), [(0.15, 0.0, 0.2), (0.6, 0.4, 0.6)])
def test_a_region_whose_replicas_were_all_slow_is_tried_again(again_s, least_s, most_s):
    """Else peers get all its work for ever, since only answers of its own teach it."""
    region = Region()
    for _ in range(20):
        region.answer(0.6)
    region.rest(module.FLEET_REST_S - 1)
    assert region.ttft_s("a") > 0.5, "a pause is no reason to forget"
    region.rest(6 * IDLE_HALF_LIFE_S)
    assert region.ttft_s("a") < 0.2
    region.answer(again_s, "a")
    region.rest(2)
    assert least_s < region.ttft_s("b") < most_s


def test_what_one_replica_answers_keeps_what_is_known_of_all():
    region = Region()
    for _ in range(20):
        region.answer(0.6)
    for _ in range(20):
        region.answer(0.6, "a")
        region.rest(module.FLEET_REST_S - 5)
    assert region.ttft_s("b") > 0.5


def test_an_agent_without_a_slope_is_not_believed():
    flat = PrefillPrior(short_tokens=1, short_s=1, more_tokens=1, more_s=0, error=0.2)
    speeds, replica = SpeedModel(), with_prior("a", flat)
    assert speeds.of_replica(replica).s_per_token == SPEED_START.s_per_token
    speeds.began(spot("a"), 1000.0, 0.0, 0.2, now=100.0)
    assert speeds.of_replica(replica).s_per_token > 0.0
