"""GORGO: the paper's cost by hand, for all candidates alike."""

from collections import Counter
from random import Random

import pytest

from mesh.core.model.prompt import Prompt
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, make_policy
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.gorgo import Gorgo, Terms, TunedWeights
from mesh.core.view.peers import Peer, RoundTripEstimate
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.state import ModelCapacity
from tests.mesh.core.build import MODEL, ROUTER, beat, digest, prompt, request, spot

BLOCK = 100  # tokens
EU = Destination(CandidateKind.PEER, "eu")


def asked(key, text):
    return request(key, prompt=Prompt(BLOCK * len(text), prompt(text).hashes, float(BLOCK)))


def replica(name, rtt_s=0.0, **fields):
    idle = {"prefill_queued_tokens": 0, "kv_used_ratio": 0.0, "kv_capacity_tokens": 10_000}
    one = Replica(beat(name, **(idle | fields)), 0.0)
    return Target(name, one.load, CandidateKind.REPLICA, rtt_s, one)


def peer(name, rtt_s, **fields):
    known = Peer(pings=RoundTripEstimate(rtt_s))
    known.digests[ROUTER] = digest(name, **({"kv_used_ratio": 0.0} | fields))
    return Target(name, 0, CandidateKind.PEER, rtt_s, peer=known)


def gorgo():
    return Gorgo(Random(1), blocks_max=1000)


def costs(policy, text, *targets):
    scores = policy.choose(asked(1, text), targets, 0.0).scores
    return {score.target.name: score for score in scores}


def test_the_papers_example():
    """§2.4: 6,500 running tokens are some 300 ms, 281 ms away with nothing running are 295.75."""
    us = replica("us-0", 0.003, kv_used_ratio=0.65)
    germany = replica("de-0", 0.281)
    one = request(1, prompt=Prompt(157, ()))
    choice = gorgo().choose(one, [us, germany], 0.0)
    seconds = {score.target.name: score.seconds for score in choice.scores}
    assert choice.name == "de-0"
    assert seconds["de-0"] == pytest.approx(0.29575, abs=1e-4)
    assert seconds["us-0"] - 157 * 0.0938e-3 == pytest.approx(0.303, abs=0.01)


def test_residual_prefill_is_of_what_is_not_cached_at_the_targets_own_speed():
    policy = gorgo()
    for name, text in (("a", "AAAA"), ("b", "AA")):
        policy.placed(asked(1, text), spot(name), 0.0)
    fast = replica("b", prefill_s_per_token=1e-4)
    of = costs(policy, "AAAABBBB", replica("a", prefill_s_per_token=1e-3), fast, replica("c"))
    prefill_s = {name: score.terms["prefill_s"] for name, score in of.items()}
    assert prefill_s == {
        "a": pytest.approx(0.4),
        "b": pytest.approx(0.06),
        "c": pytest.approx(800 * 0.0938e-3),
    }
    assert {name: score.matched_blocks for name, score in of.items()} == {"a": 4, "b": 2, "c": 0}


def test_the_wait_is_weighed_tokens_queued_and_running():
    busy = replica("a", prefill_s_per_token=1e-3, prefill_queued_tokens=500, kv_used_ratio=0.1)
    score = costs(gorgo(), "A", busy)["a"]
    assert score.terms["queue_s"] == pytest.approx(0.5 * (500 + 1000) * 1e-3)
    assert score.seconds == pytest.approx(sum(score.terms.values()))


def test_a_replica_that_counts_no_tokens_is_not_idle():
    """Three running, two waiting, each as long as usual: 100 tokens."""
    fields = {"prefill_queued_tokens": None, "kv_used_ratio": None, "prefill_s_per_token": 1e-3}
    score = costs(gorgo(), "A", replica("a", running=3, pending=2, **fields))["a"]
    assert score.terms["queue_s"] == pytest.approx(0.5 * 0.5)


def test_a_peer_has_all_three_terms():
    """Three held, one on its way, four ready: 100 tokens each; a tenth of a cache like ours."""
    far = peer("eu", 0.1, queue=3, kv_used_ratio=0.1, prefill_s_per_token=1e-3)
    far.peer.forwarded_at.append(0.0)
    far.peer.digests[ROUTER].models[MODEL] = ModelCapacity(ready=4, free=1, wait_s=0.2)
    score = costs(gorgo(), "A", replica("a"), far)["eu"]
    assert score.terms == {
        "rtt_s": pytest.approx(0.1),
        "prefill_s": pytest.approx(0.1),
        "queue_s": pytest.approx(0.5 * (0.2 + 0.1 + 1.0)),
    }


def test_a_busy_peer_does_not_attract_all_requests():
    """The fault of the authors' code: it costs a peer only its distance and prefill."""
    idle, busy = peer("eu", 0.12), peer("ap", 0.08, queue=8, ready=1)
    assert gorgo().choose(asked(1, "A" * 20), [idle, busy], 0.0).name == "eu"


def test_a_cached_prefix_is_worth_a_distance_and_no_more():
    policy = gorgo()
    policy.placed(asked(1, "A" * 20), EU, 0.0)  # 2,000 tokens: 188 ms
    for rtt_s, expected in ((0.15, "eu"), (0.25, "a")):
        choice = policy.choose(asked(2, "A" * 20), [replica("a"), peer("eu", rtt_s)], 0.0)
        assert choice.name == expected


def test_here_and_there_it_is_the_same_name_for_different_places():
    policy = gorgo()
    policy.placed(asked(1, "AA"), EU, 0.0)
    of = costs(policy, "AA", replica("eu"))
    assert of["eu"].matched_blocks == 0


def test_an_unknown_round_trip_comes_after_all_known_ones():
    policy = gorgo()
    unknown = peer("eu", None)
    assert policy.choose(asked(1, "A"), [unknown, peer("ap", 3.0)], 0.0).name == "ap"
    choice = policy.choose(asked(1, "A"), [unknown], 0.0)
    assert choice.name == "eu" and choice.scores[0].seconds is None
    assert choice.reason == "no round trip is known; least of prefill and queue"


def test_the_reason_adds_up():
    choice = gorgo().choose(asked(1, "A" * 10), [replica("a", 0.05)], 0.0)
    assert choice.reason == "least cost: 144 ms = round trip 50 + prefill 94 + queue 0"


def test_ties_are_broken_at_random():
    policy = gorgo()
    names = [policy.choose(asked(1, "A"), [replica(n) for n in "abc"], 0.0).name for _ in range(60)]
    assert set(Counter(names)) == {"a", "b", "c"}


def test_who_is_gone_is_forgotten():
    policy = gorgo()
    policy.placed(asked(1, "AA"), spot("a"), 0.0)
    assert policy.hit_ratio(asked(1, "AAAA")) == 0.5
    policy.forget(spot("a"))
    assert policy.hit_ratio(asked(1, "AAAA")) == 0.0


def test_it_learns_from_first_tokens_of_what_it_chose_itself():
    weights = TunedWeights()
    policy, dice, now = Gorgo(Random(1), blocks_max=1000, weights=weights), Random(2), 0.0
    truth = Terms(1.5, 2.0, 1.0)
    for key in range(1500):
        text = "".join(dice.choice("ABCDEFGH") for _ in range(dice.randint(1, 9)))
        queued = dice.choice((0, dice.randint(0, 20_000)))
        target = replica("a", dice.choice((0.0, 0.1, 0.2)), prefill_queued_tokens=queued)
        score = policy.choose(asked(key, text), [target], 0.0).scores[0]
        own = Terms(**score.terms)
        seen = Terms(*(part / weight for part, weight in zip(own, weights.present, strict=True)))
        policy.placed(asked(key, text), spot("a"), now)
        now += seen.sum(truth) + dice.gauss(0.05, 0.005)
        policy.began(asked(key, text), spot("a"), now)
        policy.left(asked(key, text), spot("a"), now)
    assert weights.present == pytest.approx(truth, abs=0.1)


def test_what_another_chose_or_never_began_teaches_nothing():
    taught = []

    class Listening(TunedWeights):
        def learn(self, terms, ttft_s):
            taught.append(ttft_s)

    policy = Gorgo(Random(1), blocks_max=1000, weights=Listening())
    for key, end in ((1, policy.left), (2, policy.began)):
        policy.choose(asked(key, "A"), [replica("a")], 0.0)
        policy.placed(asked(key, "A"), spot("a"), 1.0)
        end(asked(key, "A"), spot("a"), 3.0)
    policy.choose(asked(3, "A"), [replica("a")], 0.0)
    policy.placed(asked(4, "A"), spot("a"), 1.0)
    policy.began(asked(4, "A"), spot("a"), 2.0)
    assert taught == [2.0]


@pytest.mark.parametrize("name", ["gorgo", "gorgo-proxy", "gorgo-tuned"])
def test_it_sees_both_layers_at_once(name):
    assert name in POLICIES and make_policy(name, RouterSettings(), Random(1)).joint
