"""SkyWalker: SkyWalker's Algorithm 1, and exploring below one half."""

from random import Random

import pytest

from mesh.core.policies.base import Target
from mesh.core.policies.skywalker import SkyWalker, SkyWalkerOptions
from tests.mesh.core.build import request, spot


@pytest.fixture
def tree():
    tree = SkyWalker(Random(1), 100, SkyWalkerOptions())
    placed(tree, "ABCD", "x")
    placed(tree, "ABEE", "y")
    return tree


def placed(tree, text, name):
    tree.placed(request(1, text), spot(name), 0.0)


def pick(tree, text, loads):
    targets = [Target(name, load) for name, load in loads.items()]
    choice = tree.choose(request(1, text), targets, 0.0)
    return choice.name, choice.matched_blocks


@pytest.mark.parametrize(
    ("text", "loads", "expected"),
    [
        ("ABCD", {"x": 9, "y": 0, "z": 0}, ("x", 4)),  # the longest, whatever its load
        ("ABCZ", {"x": 9, "y": 0, "z": 0}, ("x", 3)),
        ("ABZZ", {"x": 2, "y": 1, "z": 0}, ("y", 2)),  # equally far: the less loaded of them
        ("ABCD", {"y": 3, "z": 0}, ("y", 2)),  # among the available only; half binds
        ("ABCDZ", {"y": 3, "z": 0}, ("z", 0)),  # two of five is too short: explore
        ("AZZZ", {"x": 0, "y": 1, "z": 2}, ("x", 1)),  # exploring still says what is held
        ("ZZZZ", {"x": 1, "y": 1, "z": 0}, ("z", 0)),
        ("", {"x": 1, "z": 0}, ("z", 0)),  # shorter than a block
    ],
)
def test_who_is_chosen(tree, text, loads, expected):
    assert pick(tree, text, loads) == expected


def test_reasons_are_for_people(tree):
    targets = [Target("x", 2)]
    said = [tree.choose(request(1, text), targets, 0.0).reason for text in ("ABCZ", "AZZZ")]
    assert said == ["holds 75% of the prompt", "explore: best match 25%, least load 2"]


def test_exploring_begins_affinity(tree):
    placed(tree, "ZZZZ", "z")
    assert pick(tree, "ZZZY", {"x": 0, "y": 0, "z": 5}) == ("z", 3)


def test_who_is_gone_is_forgotten(tree):
    tree.forget(spot("x"))
    assert pick(tree, "ABCD", {"x": 5, "y": 9}) == ("y", 2)


def test_a_thousand_owners_of_one_prefix_cost_no_square():
    """Counted, not timed: each target is compared with the owners once."""

    class Name(str):
        compared = 0
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

    tree = SkyWalker(Random(1), 10, SkyWalkerOptions())
    names = [Name(f"replica-{number}") for number in range(500)]
    for name in names:
        placed(tree, "AB", name)
    Name.compared = 0
    copies = [Target(Name(str(name)), 0) for name in names]
    tree.choose(request(1, "AB"), copies, 0.0)
    assert Name.compared < 10 * len(names)
