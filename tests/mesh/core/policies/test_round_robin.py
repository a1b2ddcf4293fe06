"""Round robin: all in turn, whichever come and go, for each model."""

from collections import Counter
from random import Random

from mesh.core.policies import power_of_two as round_robin
from mesh.core.policies.base import Target
from mesh.core.policies.power_of_two import RoundRobin
from schemas.ids import ModelId
from tests.mesh.core.build import MODEL, request


def pick(policy, names, model=MODEL):
    return policy.choose(request(1, model=model), [Target(name, 0) for name in names], 0.0).name


def test_each_in_turn_by_name():
    policy = RoundRobin()
    assert "".join(pick(policy, "cab") for _ in range(7)) == "abcabca"


def test_the_turn_passes_over_absent_targets():
    policy = RoundRobin()
    assert "".join(pick(policy, names) for names in ("abc", "ac", "abc", "b", "abc")) == "acabc"


def test_changing_availability_favours_no_target():
    policy, dice, counts = RoundRobin(), Random(3), Counter()
    for _ in range(6000):
        away = dice.randrange(4)
        counts[pick(policy, [name for place, name in enumerate("abcd") if place != away])] += 1
    assert max(counts.values()) - min(counts.values()) < 0.1 * 6000 / 4


def test_one_models_requests_dont_skip_anothers_turn():
    policy = RoundRobin()
    taken = ""
    for _ in range(4):
        taken += pick(policy, "ac")
        pick(policy, "b", ModelId("other"))
    assert taken == "acac"


def test_turns_are_remembered_for_so_many_models(monkeypatch):
    monkeypatch.setattr(round_robin, "MODELS_MAX", 2)
    policy = RoundRobin()
    picks = [pick(policy, "ab", ModelId(model)) for model in ("x", "y", "x", "z", "y", "x")]
    assert picks == ["a", "a", "b", "a", "a", "a"]
