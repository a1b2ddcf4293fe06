"""SGLang's rule, case by case, at both common settings."""

from random import Random

import pytest

from mesh.core.policies.base import Target
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions
from tests.mesh.core.build import request, spot

LIBRARY, COMMAND_LINE = CacheAwareOptions(), CacheAwareOptions(0.3, 64, 1.5)


def policy(options=LIBRARY):
    policy = CacheAware(Random(1), 100, options)
    for text, name in (("ABCD", "x"), ("ABEE", "y")):
        policy.placed(request(1, text), spot(name), 0.0)
    return policy


def pick(policy, text, loads):
    targets = [Target(name, load) for name, load in loads.items()]
    choice = policy.choose(request(1, text), targets, 0.0)
    return choice.name, choice.matched_blocks


@pytest.mark.parametrize(
    ("options", "text", "loads", "expected"),
    [
        # In balance: more than the threshold binds.
        (LIBRARY, "ABCD", {"x": 9, "y": 0}, ("x", 4)),
        (LIBRARY, "ABCDZ", {"x": 9, "y": 0}, ("x", 4)),
        (LIBRARY, "ABZZ", {"x": 2, "y": 1, "z": 0}, ("z", 0)),  # exactly one half does not
        (COMMAND_LINE, "ABZZ", {"x": 2, "y": 1, "z": 0}, ("y", 2)),  # it is more than 0.3
        (COMMAND_LINE, "AZZZ", {"x": 0, "y": 1, "z": 1}, ("x", 1)),  # a miss; what x has is said
        (LIBRARY, "", {"x": 1, "z": 0}, ("z", 0)),
        (LIBRARY, "ABCD", {"y": 3, "z": 0}, ("z", 0)),  # x holds it all and is not available
        # Out of balance needs both measures.
        (LIBRARY, "ABCD", {"x": 32, "y": 0}, ("x", 4)),  # 32 more is not more than 32
        (LIBRARY, "ABCD", {"x": 33, "y": 0}, ("y", 2)),
        (LIBRARY, "ABCD", {"x": 440, "y": 400}, ("x", 4)),  # 40 more, and not over 1.1 times
        (LIBRARY, "ABCD", {"x": 441, "y": 400}, ("y", 2)),
        (COMMAND_LINE, "ABCD", {"x": 64, "y": 0}, ("x", 4)),
        (COMMAND_LINE, "ABCD", {"x": 65, "y": 0}, ("y", 2)),
        (COMMAND_LINE, "ABCD", {"x": 300, "y": 200}, ("x", 4)),
        (COMMAND_LINE, "ABCD", {"x": 301, "y": 200}, ("y", 2)),
        # Anyone's imbalance counts, the holder's own load does not.
        (LIBRARY, "ABCD", {"x": 1, "y": 0, "z": 40}, ("y", 2)),
    ],
)
def test_who_is_chosen(options, text, loads, expected):
    assert pick(policy(options), text, loads) == expected


def test_the_shortest_queue_gets_the_prompt_entered_too():
    spilt = policy()
    name, _ = pick(spilt, "ABCD", {"x": 40, "z": 0})
    spilt.placed(request(1, "ABCD"), spot(name), 0.0)
    assert pick(spilt, "ABCD", {"x": 20, "z": 1}) == ("z", 4)


def test_reasons_are_for_people():
    asked = policy()
    loads = [{"x": 1, "y": 0}, {"x": 50, "y": 0}]
    said = [
        asked.choose(request(1, "ABCD"), [Target(*one) for one in these.items()], 0.0).reason
        for these in loads
    ]
    assert said == ["holds 100% of the prompt", "imbalance: loads from 0 to 50"]
    miss = asked.choose(request(1, "AZZZ"), [Target("x", 3)], 0.0)
    assert miss.reason == "best match 25%, least load 3"


def test_who_is_gone_is_forgotten():
    asked = policy()
    asked.forget(spot("x"))
    assert pick(asked, "ABCD", {"x": 0, "y": 0})[1] <= 2


@pytest.mark.parametrize(
    "options", [{"cache_threshold": 1.5}, {"balance_abs": -1}, {"balance_rel": 0.9}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CacheAwareOptions(**options)
