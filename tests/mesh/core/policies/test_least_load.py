"""Least load: the least, and chance among equals."""

from collections import Counter
from random import Random

from mesh.core.policies.base import Target, least_loaded
from mesh.core.policies.power_of_two import LeastLoad
from tests.mesh.core.build import request


def test_the_least_loaded_is_chosen():
    targets = [Target("a", 3), Target("b", 1), Target("c", 2)]
    choice = LeastLoad(Random(1)).choose(request(1), targets, 0.0)
    assert (choice.name, choice.reason, choice.matched_blocks) == ("b", "least load: 1 requests", 0)


def test_equals_share_evenly():
    dice, counts = Random(5), Counter()
    targets = [Target("a", 0), Target("b", 7), Target("c", 0), Target("d", 0)]
    for _ in range(3000):
        counts[least_loaded(targets, dice).name] += 1
    assert set(counts) == {"a", "c", "d"}
    assert all(abs(count - 1000) < 120 for count in counts.values())  # over four sigma


def test_the_same_dice_fall_the_same():
    targets = [Target(name, 0) for name in "abcdef"]
    runs = [
        [least_loaded(targets, dice).name for _ in range(20)] for dice in (Random(9), Random(9))
    ]
    assert runs[0] == runs[1]
