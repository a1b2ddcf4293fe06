"""E2: Preble's algorithms 1 and 2 by hand, and what it does after the assignment."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import make_policy
from mesh.core.policies.base import Target
from mesh.core.policies.e2 import E2, E2Options
from mesh.core.view.replica import Replica
from tests.mesh.core.build import beat, foreign, prompt, request, spot

BLOCK = 100  # tokens; with a millisecond each, a block is a tenth of a second


def asked(key, text, make=request):
    return make(key, prompt=Prompt(BLOCK * len(text), prompt(text).hashes, float(BLOCK)))


def targets(*names, **fields):
    said = {"prefill_s_per_token": 1e-3, "decode_tokens_per_s": 45.0} | fields
    return [Target(name, 0, replica=Replica(beat(name, **said), 0.0)) for name in names]


class World:
    """E2 and three equal targets, whose decoding takes a second an answer."""

    def __init__(self, *names, warm=1000, window_s=180.0, **fields):
        self.e2 = E2(Random(1), blocks_max=1000, window_s=window_s, warm=warm)
        self.targets = targets(*(names or "xyz"), **fields)
        self.key = 0

    def choose(self, text, now=0.0, among=None):
        free = [target for target in self.targets if among is None or target.name in among]
        return self.e2.choose(asked(self.key, text), free, now)

    def give(self, name, text, now=0.0):
        self.key += 1
        one = asked(self.key, text)
        self.e2.placed(one, spot(name), now)
        return one

    def serve(self, name, text, now=0.0, wait_s=0.0, output_tokens=45):
        one = self.give(name, text, now)
        self.e2.began(one, spot(name), now + wait_s)
        self.e2.served(one, spot(name), Served(output_tokens=output_tokens), now + wait_s)
        self.e2.left(one, spot(name), now + wait_s)

    def terms(self, text, **how):
        return {score.target.name: score.terms for score in self.choose(text, **how).scores}


def test_more_cached_than_new_is_exploited():
    world = World()
    world.choose("Z")  # all have been seen
    world.give("x", "AAAAAA")
    choice = world.choose("AAAABB")
    assert (choice.name, choice.matched_blocks) == ("x", 4)
    assert choice.reason == "exploit: 67% of the prompt is cached, load cost 1.80 s"


def test_as_much_new_as_cached_is_explored():
    """Algorithm 1: exploit only when missed_len < cached_len."""
    world = World()
    world.choose("Z")
    world.give("x", "AAAAAA")
    choice = world.choose("AAABBB")
    assert choice.name in ("y", "z") and choice.reason.startswith("explore: load cost 0.60 s")


def test_the_load_cost_by_hand():
    """L: two prompts of 0.6 and 0.2 s missed and a second of decoding each; P: two blocks."""
    world = World()
    world.choose("Z")
    world.give("x", "AAAAAA")
    world.give("x", "AAAABB")
    terms = world.terms("AAAABBCC", among="x")
    assert terms["x"] == {
        "load_s": pytest.approx(0.6 + 0.2 + 2 * 1.0),
        "evict_s": 0.0,
        "prefill_s": pytest.approx(0.2),
    }


def test_evicting_costs_what_requests_that_share_it_will_compute_again():
    """Four blocks of cache: BB goes, which two of three requests share, and half of AA."""
    world = World(kv_capacity_tokens=4 * BLOCK)
    world.choose("Z")
    world.give("x", "BB")
    world.give("x", "BB")
    world.give("x", "AA")
    terms = world.terms("CCC", among="x")
    assert terms["x"]["evict_s"] == pytest.approx((2 * 2 / 3 + 1 * 1 / 3) * 0.1)


def test_of_holders_of_the_key_portion_the_cheapest():
    world = World()
    world.choose("Z")
    for name in ("x", "y"):
        world.give(name, "AAAAA")
    world.give("x", "ZZZ")
    assert world.choose("AAAAAB").name == "y"


def test_what_left_without_a_token_was_no_load():
    world = World()
    world.choose("Z")
    one = world.give("x", "AAAA")
    world.e2.left(one, spot("x"), 1.0)
    assert world.terms("Q", among="x")["x"]["load_s"] == 0.0


def test_a_peers_request_is_load_too():
    world = World()
    world.choose("Z")
    world.e2.placed(asked(7, "AAAA", foreign), spot("x"), 0.0)
    assert world.terms("Q", among="x")["x"]["load_s"] == pytest.approx(1.4)


def test_load_ends_with_the_window():
    world = World(window_s=10.0)
    world.choose("Z")
    world.give("x", "AAAA")
    assert world.terms("Q", now=9.9, among="x")["x"]["load_s"] > 1.0
    assert world.terms("Q", now=10.0, among="x")["x"]["load_s"] == 0.0
    assert world.choose("AAAA", now=10.0).name == "x"  # what it holds it still holds


def test_the_heaviest_sheds_to_the_lightest_until_loads_are_alike():
    world = World("x", "y", warm=1)
    world.choose("Z")
    names = []
    for _ in range(40):
        choice = world.choose("AAAAAAB")
        names.append(choice.name)
        world.serve(choice.name, "AAAAAAB")
    loads = {name: terms["load_s"] for name, terms in world.terms("Q").items()}
    assert set(names[:4]) == {"x", "y"}
    assert max(loads.values()) <= 1.5 * min(loads.values())


def test_the_reason_of_rebalancing_has_both_loads():
    world = World("x", "y", warm=2)
    world.choose("Z")
    for _ in range(4):
        world.serve("x", "AAAA")
    choice = world.choose("AAAA")
    assert (choice.name, choice.reason) == (
        "y",
        "rebalance: 4.4 s of load where it is cached, 0.0 s there",
    )


def test_loads_are_not_compared_while_there_are_few_requests():
    world = World("x", "y", warm=3)
    world.choose("Z")
    for _ in range(4):
        world.serve("x", "AAAA")
    assert world.choose("AAAA").name == "x"


def test_a_prefix_whose_requests_wait_twice_as_long_gets_a_second_home():
    world = World("x", "y", window_s=20.0, warm=1)
    world.choose("Z")
    for now, wait_s in ((11.0, 1.0), (21.0, 3.0)):
        for _ in range(6):
            world.serve("x", "AAAA", now, wait_s)
            world.serve("y", "Z" * 9, now)  # so that rebalancing sees nothing to do
    choice = world.choose("AAAAB", now=25.0)
    assert choice.name == "y" and choice.reason.startswith("replicate: ")
    assert world.choose("AAAAC", now=25.0).name == "x"  # once: then it is judged anew
    world.give("y", "AAAAB", now=25.0)
    assert world.choose("AAAAC", now=25.0).reason.startswith("exploit: ")


def test_explorers_go_where_decoding_exceeds_the_others():
    """x decodes for cached prompts, y and z compute new ones; all have about the same load."""
    world = World(warm=1)
    world.choose("Z")
    for turn in range(10):
        world.serve("x", "AAAA", output_tokens=54)
        for name in "yz":
            world.serve(name, chr(100 + turn) + name * 3, output_tokens=36)
    choice = world.choose("QR")
    assert choice.name == "x" and choice.reason.startswith("explore: it decodes much more")


def test_what_is_shed_by_rebalancing_does_not_come_back_for_its_decoding():
    """The same, but x has twice the load of the others."""
    world = World(warm=1)
    world.choose("Z")
    for turn in range(10):
        world.serve("x", "AAAA", output_tokens=108)
        for name in "yz":
            world.serve(name, chr(100 + turn) + name * 3, output_tokens=36)
    choice = world.choose("QR")
    assert choice.name in ("y", "z") and choice.reason.startswith("explore: load cost")


def test_one_busy_target_among_idle_ones_is_no_imbalance_of_phases():
    world = World(warm=1)
    world.choose("Z")
    for _ in range(10):
        world.serve("x", "AAAA")
    assert world.choose("QRST").name in ("y", "z")


def test_ties_are_broken_at_random():
    world = World()
    assert set(Counter(world.choose("A").name for _ in range(60))) == {"x", "y", "z"}


def test_who_is_gone_is_forgotten():
    world = World()
    world.choose("Z")
    world.give("x", "AAAA")
    world.e2.forget(spot("x"))
    assert world.e2.hit_ratio(asked(9, "AAAA")) == 0.0
    assert world.terms("AAAA", among="x")["x"]["load_s"] == 0.0


def test_hit_ratio_is_of_anyone():
    world = World()
    world.give("x", "AAAA")
    assert [world.e2.hit_ratio(asked(9, text)) for text in ("AAAB", "", "B")] == [0.75, 0.0, 0.0]


EVENTS = st.lists(
    st.tuples(
        st.text("AB", max_size=5),
        st.sampled_from(["", "x", "xy", "yz"]),
        st.sampled_from(["serve", "lose", "wait", "forget"]),
    ),
    max_size=40,
)


@given(EVENTS)
def test_it_always_picks_one_of_its_targets_and_the_window_empties(events):
    world, now = World(warm=2, window_s=10.0, kv_capacity_tokens=4 * BLOCK), 0.0
    for text, among, act in events:
        choice = world.choose(text, now, among or None)
        assert choice.name in (among or "xyz")
        if act == "serve":
            world.serve(choice.name, text, now, wait_s=0.2)
        elif act == "lose":
            world.e2.left(world.give(choice.name, text, now), spot(choice.name), now)
        elif act == "forget":
            world.e2.forget(spot(choice.name))
        now += 1.0
    loads = world.terms("Q", now=now + 11.0)
    assert all(terms["load_s"] == pytest.approx(0.0) for terms in loads.values())


def test_when_loads_are_compared_is_an_option():
    early, late = (make_policy(name, RouterSettings(), Random(1)) for name in ("e2:/3", "e2"))
    assert (early._warm, late._warm) == (3, 50)
    with pytest.raises(ValueError, match="warm must be 0 or more"):
        E2Options(warm=-1)
