"""Policies by name."""

from random import Random

import pytest

from mesh.core.policies import POLICIES, make_policy
from mesh.core.policies.base import Target
from mesh.core.settings import RouterSettings
from tests.mesh.core.build import MODEL, prompt


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_picks_one_of_its_targets_and_says_why(name):
    policy = make_policy(RouterSettings(policy=name), Random(1))
    targets = [Target("a", 1), Target("b", 2)]
    for number in range(10):
        choice = policy.choose(MODEL, prompt("AB"), targets)
        assert choice.name in ("a", "b") and choice.reason
        policy.placed(MODEL, prompt("AB"), choice.name)
        if number % 3 == 0:
            policy.forget(choice.name)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'fast'; one of round-robin, least-load, prefix-tree"):
        make_policy(RouterSettings(policy="fast"), Random(1))
