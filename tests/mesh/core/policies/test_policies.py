"""Policies by name."""

from random import Random

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, make_policy
from mesh.core.policies.base import Destination, Target
from mesh.core.view.replica import Replica
from tests.mesh.core.build import beat, request


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_picks_one_of_its_targets_with_a_reason(name):
    policy = make_policy(name, RouterSettings(), Random(1))
    targets = [Target(name, 1, replica=Replica(beat(name), 0.0)) for name in "ab"]
    for number in range(10):
        choice = policy.choose(request(number, "AB"), targets, 0.0)
        assert choice.name in ("a", "b") and choice.reason
        spot = Destination(choice.target.kind, choice.target.name)
        policy.placed(request(number, "AB"), spot, 0.0)
        if number % 3 == 0:
            policy.forget(spot)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown policy 'fast'; there are round-robin"):
        make_policy("fast", RouterSettings(), Random(1))
