"""Two choices: never the worse of the two, and far more even than one."""

from collections import Counter
from random import Random

import pytest

from mesh.core.policies.base import Target
from mesh.core.policies.power_of_two import PowerOfTwo
from tests.mesh.core.build import request


def pick(policy, loads):
    return policy.choose(request(1), [Target(name, load) for name, load in loads.items()], 0.0)


def test_the_only_one_is_taken():
    choice = pick(PowerOfTwo(Random(1)), {"a": 9})
    assert (choice.name, choice.reason) == ("a", "less loaded of two: 9 requests")


def test_of_two_the_less_loaded_always():
    policy = PowerOfTwo(Random(1))
    assert {pick(policy, {"a": 2, "b": 1}).name for _ in range(50)} == {"b"}


def test_it_looks_at_two_and_at_no_more():
    policy, seen = PowerOfTwo(Random(2)), Counter()
    for _ in range(6000):
        choice = pick(policy, {"a": 0, "b": 1, "c": 2, "d": 3})
        assert len(choice.scores) == 2
        assert min(choice.scores, key=lambda score: score.target.load).target.name == choice.name
        seen[choice.name] += 1
    # Of the 6 pairs, a is the best of 3, b of 2, c of 1 and d of none.
    for name, pairs in {"a": 3, "b": 2, "c": 1}.items():
        assert seen[name] == pytest.approx(1000 * pairs, abs=160)  # over four sigma
    assert "d" not in seen


def test_equals_share_evenly():
    policy, seen = PowerOfTwo(Random(3)), Counter()
    for _ in range(3000):
        seen[pick(policy, {"a": 1, "b": 1, "c": 1}).name] += 1
    assert all(abs(count - 1000) < 120 for count in seen.values()) and len(seen) == 3


def test_ten_thousand_balls_stay_almost_level():
    """The classic result: two choices keep the fullest bin near the mean, one does not."""
    policy, dice = PowerOfTwo(Random(4)), Random(4)
    two, one = dict.fromkeys(map(str, range(50)), 0), Counter()
    for _ in range(5000):
        two[pick(policy, two).name] += 1
        one[dice.randrange(50)] += 1
    assert max(two.values()) - 100 <= 4 < max(one.values()) - 100
