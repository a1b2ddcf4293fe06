"""Receipts: the chosen first, then by price, then the others with their reasons; all counted."""

from mesh.core.model.prompt import Prompt
from mesh.core.placement.candidates import CandidateLayer
from mesh.core.placement.receipt import CANDIDATES_MAX, receipt, unlisted
from mesh.core.policies.base import Choice, Score, Target
from schemas.decision import CandidateKind

PROMPT = Prompt(100, ())
REPLICA, PEER = CandidateKind.REPLICA, CandidateKind.PEER


def layer(free=(), busy=()):
    return CandidateLayer(
        REPLICA, [Target(name, 0) for name in free], [(Target(n, 0), "full") for n in busy]
    )


def test_order_and_count():
    targets = {name: Target(name, 0) for name in "abcde"}
    scores = [Score(targets["c"], 3.0), Score(targets["a"], 1.0, {"rtt_s": 0.4}, 2)]
    choice = Choice(targets["b"], "because", 4, [*scores, Score(targets["b"], 2.0)])
    listed, considered = receipt([layer("abcd", "xy")], choice, Prompt(500, (), 10.0))
    assert considered == 6
    assert [one.name for one in listed] == ["b", "a", "c", "d", "x", "y"]
    assert [one.seconds for one in listed] == [2.0, 1.0, 3.0, None, None, None]
    assert [one.matched_tokens for one in listed] == [40, 20, 0, 0, 0, 0]
    assert [one.why for one in listed] == [None] * 4 + ["full"] * 2


def test_a_replica_and_a_region_of_one_name_are_two():
    both = [Target("us", 0), Target("us", 0, PEER, 0.1)]
    layers = [CandidateLayer(REPLICA, both[:1]), CandidateLayer(PEER, both[1:])]
    listed, considered = receipt(layers, Choice(both[1], "because"), PROMPT)
    assert [one.kind for one in listed] == [PEER, REPLICA] and considered == 2


def test_a_held_receipt_lists_the_unavailable():
    listed, considered = receipt([layer(busy="xyz")], Choice(None, "held"), PROMPT)
    assert [one.available for one in listed] == [False] * 3 and considered == 3


def test_what_a_held_request_waits_for_comes_first():
    near = [Target("a", 0), Target("b", 0)]
    held = Choice(None, "held", scores=[Score(near[0], 1.0), Score(near[1], 1.001)])
    for waits_for in near:
        choice = held._replace(waits_for=waits_for)
        listed, _ = receipt([layer("ab")], choice, PROMPT)
        kept = unlisted([layer("ab")], choice, PROMPT)
        names = [one.name for one in listed], [one.name for one in kept.candidates()]
        assert names[0] == names[1] == sorted("ab", key=lambda name: name != waits_for.name)


def test_only_the_first_few_are_listed():
    names = [f"r{number}" for number in range(50)]
    listed, considered = receipt([layer(names)], Choice(Target("r7", 0), "because"), PROMPT)
    assert (len(listed), considered, listed[0].name) == (CANDIDATES_MAX, 50, "r7")
