"""SkyWalker: SkyWalker's Algorithm 1, and exploring below one half."""

from random import Random

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.policies.base import Target
from mesh.core.policies.skywalker import SkyWalker, SkyWalkerOptions
from schemas.decision import Placement
from tests.mesh.core.build import beat, core, digest, request, spot


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


def places(policy, peer_queue, held):
    """Where a router whose replica is full sends what it holds, as its peer has room."""
    router = core(policy=policy)
    router.handle(ev.HeartbeatSeen(beat("a", pending=1)), 0.0)
    for number in range(held):
        router.handle(ev.RequestArrived(request(number)), 0.0)
    effects = router.handle(ev.DigestSeen(digest("eu", free=9, queue=peer_queue)), 0.05)
    return [it.decision.placement for it in effects if isinstance(it, fx.Decided)]


@pytest.mark.parametrize(
    ("peer_queue", "held", "expected"),
    [
        (0, 2, [Placement.PEER, Placement.PEER]),
        (1, 2, [Placement.PEER, Placement.PEER]),  # the last one finds as many as here
        (2, 3, [Placement.PEER, Placement.PEER]),  # then the peer's queue is the longer one
        (3, 2, []),
        (11, 12, []),  # longer than tau
    ],
)
def test_a_peer_gets_work_while_its_queue_is_no_longer_than_ours(peer_queue, held, expected):
    assert places("skywalker", peer_queue, held) == expected


def test_a_newcomer_counts_itself():
    for policy, queue, expected in (
        ("skywalker", 1, Placement.PEER),
        ("skywalker", 2, Placement.HOLD),
        ("skywalker:0.5/0", 2, Placement.PEER),
    ):
        router = core(policy=policy)
        router.handle(ev.HeartbeatSeen(beat("a", pending=1)), 0.0)
        router.handle(ev.DigestSeen(digest("eu", free=9, queue=queue)), 0.0)
        effects = router.handle(ev.RequestArrived(request(1)), 0.0)
        found = [it.decision.placement for it in effects if isinstance(it, fx.Decided)]
        assert found == [expected], (policy, queue)


def test_the_condition_is_one_or_the_other():
    with pytest.raises(ValueError, match="own_queue is 0 or 1"):
        SkyWalkerOptions(own_queue=2)
