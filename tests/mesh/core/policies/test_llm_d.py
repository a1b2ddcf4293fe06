"""llm-d: three scores, their weights, and what happens without reports."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.policies.base import Target
from mesh.core.policies.llm_d import SCORES_MAX, LlmD, LlmDOptions
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from tests.mesh.core.build import beat, digest, request, spot

AFRESH = LlmDOptions()


def target(name, pending=0, kv=0.0):
    replica = Replica(beat(name, pending=pending, kv_used_ratio=kv), 0.0)
    return Target(name, replica.load, replica=replica)


def peer(name, queue=0, kv=(0.0,)):
    said = {f"r{number}": digest(name, kv_used_ratio=one) for number, one in enumerate(kv)}
    return Target(name, queue, CandidateKind.PEER, 0.1, peer=Peer(digests=said))


def choose(targets, text="ABCD", held=(), options=AFRESH, seed=1):
    policy = LlmD(Random(seed), 100, options)
    for owner, prompt in held:
        policy.placed(request(1, prompt), spot(owner, targets[0].kind), 0.0)
    return policy.choose(request(1, text), targets, 0.0)


def terms(choice):
    return {score.target.name: tuple(score.terms.values()) for score in choice.scores}


def test_each_score_is_normalised():
    targets = [target("a", 4, 0.25), target("b", 1, 0.5), target("c", 0, 1.0)]
    choice = choose(targets, held=[("b", "ABZZ"), ("c", "ABCD")])
    assert terms(choice) == {"a": (0.0, 0.75, 0.0), "b": (0.75, 0.5, 0.5), "c": (1.0, 0.0, 1.0)}
    # a: 1.5; b: 1.5 + 1.0 + 1.5 = 4.0; c: 2.0 + 3.0 = 5.0
    assert (choice.name, choice.matched_blocks) == ("c", 4)
    assert choice.reason == "score 5.00: queue 1.00, kv 0.00, prefix 1.00"
    assert [score.target.name for score in choice.scores] == ["c", "b", "a"]
    assert all(score.seconds is None for score in choice.scores)


def test_equal_queues_all_score_one():
    targets = [target("a", 3, 0.5), target("b", 3, 0.4)]
    assert terms(choose(targets)) == {"b": (1.0, 0.6, 0.0), "a": (1.0, 0.5, 0.0)}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (LlmDOptions(), "queue"),  # 2 against 2 x 0.9 and 3 x 0.5
        (LlmDOptions(queue=1), "kv"),
        (LlmDOptions(prefix=4), "queue"),  # 2.0 + 0.2 against 2.0 + 0.0
        (LlmDOptions(prefix=5), "prefix"),
        (LlmDOptions(1, 0, 0), "queue"),
        (LlmDOptions(0, 1, 0), "kv"),
        (LlmDOptions(0, 0, 1), "prefix"),
    ],
)
def test_weights_decide(options, name):
    targets = [target("queue", 0, 0.9), target("kv", 9, 0.05), target("prefix", 9, 1.0)]
    assert choose(targets, held=[("prefix", "ABZZ")], options=options).name == name


def test_what_waits_on_the_way_is_queue():
    busy, idle = target("a"), target("b")
    busy.replica.on_the_way.add(1, 100, 100, 0.0)
    assert choose([busy, idle]).name == "b"


@pytest.mark.parametrize("lacking", [{"pending": None}, {"kv": None}])
def test_a_target_without_reports_comes_last(lacking):
    """Read as zero, a missing queue or cache would make the best score."""
    known = target("known", 50, 0.99)
    assert choose([target("silent", **lacking), known]).name == "known"
    assert choose([target("silent", **lacking), known], held=[("silent", "ABCD")]).name == "known"


def test_tiers_are_by_how_much_is_missing():
    mute = target("mute", None, None)
    half = target("half", None, 0.9)
    assert choose([mute, half]).name == "half"
    choice = choose([mute])
    assert (choice.name, choice.reason) == (
        "mute",
        "score 0.00: queue unknown, kv unknown, prefix 0.00",
    )


def test_where_all_lack_the_same_the_rest_decides():
    targets = [target("a", 2, None), target("b", 1, None)]
    assert choose(targets).name == "b"
    assert choose(targets, held=[("a", "ABCD")]).name == "a"


def test_a_weight_of_nothing_misses_nothing():
    targets = [target("silent", 0, None), target("known", 5, 0.0)]
    assert choose(targets, options=LlmDOptions(kv=0)).name == "silent"


def test_peers_are_scored_by_their_queues_and_mean_caches():
    targets = [peer("eu", 2, (0.2, 0.6)), peer("ap", 0, (None, 0.5)), peer("sa", 4, (None,))]
    assert terms(choose(targets)) == {"ap": (1.0, 0.5, 0.0), "eu": (0.5, 0.6, 0.0),
                                      "sa": (0.0, None, 0.0)}  # fmt: skip


def test_equals_share():
    targets = [target(name) for name in "abcd"]
    assert {choose(targets, seed=seed).name for seed in range(40)} == set("abcd")


def test_so_many_scores_are_in_the_receipt():
    targets = [target(f"r{number}", number % 7, 0.5) for number in range(3 * SCORES_MAX)]
    assert len(choose(targets).scores) == SCORES_MAX


maybe = st.none() | st.integers(0, 50)
ratio = st.none() | st.floats(0.0, 1.0)


@given(st.lists(st.tuples(maybe, ratio), min_size=1, max_size=12), st.integers(0, 99))
def test_no_better_known_target_scores_better(signals, seed):
    targets = [target(f"r{place}", *one) for place, one in enumerate(signals)]
    choice = choose(targets, seed=seed)
    assert choice.target in targets
    missing = [sum(one is None for one in pair) for pair in signals]
    chosen = targets.index(choice.target)
    assert missing[chosen] == min(missing)
    for pending, kv in signals:  # nor is any better in everything
        mine = signals[chosen]
        if None not in (*mine, pending, kv):
            assert not (pending < mine[0] and kv < mine[1])


@pytest.mark.parametrize("weights", [(0, 0, 0), (-1, 1, 1), (1, 1, float("nan"))])
def test_weights_out_of_range_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be"):
        LlmDOptions(*weights)
