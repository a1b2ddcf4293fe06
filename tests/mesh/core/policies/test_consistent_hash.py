"""Consistent hashing: what names a conversation, and who it belongs to."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.policies.base import Target
from mesh.core.policies.consistent_hash import (
    ConsistentHash,
    ConsistentHashOptions,
    conversation,
)
from tests.mesh.core.build import request, spot

loads = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 9), min_size=1)


def ring(seed=1, **options):
    return ConsistentHash(Random(seed), ConsistentHashOptions(**options))


def pick(policy, known, text="ABCDEF", **fields):
    targets = [Target(name, load) for name, load in known.items()]
    return policy.choose(request(1, text, **fields), targets, 0.0)


SIX = dict.fromkeys("abcdef", 0)
LETTERS = [chr(65 + number) for number in range(26)]


def test_turns_of_a_conversation_stay_and_others_go_elsewhere():
    policy = ring()
    turns = {pick(policy, SIX, "ABCD" + "XYZ" * turn).name for turn in range(5)}
    assert len(turns) == 1
    others = {pick(policy, SIX, one + other).name for one in LETTERS for other in LETTERS}
    assert len(others) == 6


def test_a_session_counts_more_than_the_prompt():
    policy = ring()
    here = {pick(policy, SIX, letter * 6, session="ann").name for letter in LETTERS}
    assert len(here) == 1
    users = {pick(policy, SIX, session=f"user-{number}").name for number in range(40)}
    assert len(users) == 6


@pytest.mark.parametrize(
    ("one", "other", "blocks", "same"),
    [
        ("ABCD", "ABCDEF", 4, True),
        ("ABCX", "ABCD", 4, False),
        ("ABCX", "ABCD", 3, True),
        ("AB", "ABCD", 4, False),  # a first turn shorter than the beginning that counts
        ("AB", "AB", 4, True),
    ],
)
def test_so_many_blocks_name_a_conversation(one, other, blocks, same):
    keys = [conversation(request(1, text), blocks)[0] for text in (one, other)]
    assert (keys[0] == keys[1]) is same


def test_who_has_no_name_goes_anywhere():
    policy = ring()
    choices = [pick(policy, SIX, "") for _ in range(60)]
    assert {choice.name for choice in choices} == set(SIX)
    assert choices[0].reason == "at random: no session, and a prompt shorter than a block"


def test_reasons_are_for_people():
    policy = ring()
    assert pick(policy, SIX).reason == "ring: by its prompt's first 4 blocks"
    assert pick(policy, SIX, "AB").reason == "ring: by its prompt's first 2 blocks"
    assert pick(policy, SIX, session="ann").reason == "ring: by its session"


@given(loads, st.text("AB", max_size=5), st.data())
def test_the_removal_of_another_changes_nothing(known, text, data):
    for factor in (0.0, 1.25):
        policy = ring(load_factor=factor)
        first = pick(policy, known, text).name
        assert first in known
        if factor or not text:
            continue
        others = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True))
        left = {name: load for name, load in known.items() if name == first or name not in others}
        assert pick(policy, left, text).name == first
        for name in known:
            if name not in left:
                policy.forget(spot(name))
        assert pick(ring(), left, text).name == first  # nor does it matter who was ever there


def test_who_was_away_for_a_moment_gets_its_own_back():
    policy = ring()
    before = {letter: pick(policy, SIX, letter * 4).name for letter in LETTERS}
    without = {name: 0 for name in SIX if name != "c"}
    during = {letter: pick(policy, without, letter * 4).name for letter in LETTERS}
    after = {letter: pick(policy, SIX, letter * 4).name for letter in LETTERS}
    moved = [letter for letter in LETTERS if before[letter] != during[letter]]
    assert after == before
    assert moved and {before[letter] for letter in moved} == {"c"}


def test_the_plain_ring_does_not_look_at_loads():
    policy = ring()
    own = pick(policy, SIX).name
    assert pick(policy, SIX | {own: 1000}).name == own


@given(loads)
def test_a_bounded_load_is_never_more_than_its_share(known):
    name = pick(ring(load_factor=1.5), known).name
    assert known[name] + 1 <= 1.5 * (sum(known.values()) + 1) / len(known) + 1


def test_the_bound_passes_over_the_overloaded_to_the_next_on_the_ring():
    plain, bounded = ring(), ring(load_factor=1.25)
    own = pick(plain, SIX).name
    second = pick(plain, {name: 0 for name in SIX if name != own}).name
    evenly = dict.fromkeys(SIX, 8)
    # 50 requests with the new one: ceil(1.25 * 50 / 6) = 11 is a target's most, so 10 may take it.
    assert pick(bounded, evenly | {own: 9}).name == own
    assert pick(bounded, evenly | {own: 10}).name == own
    assert pick(bounded, evenly | {own: 12}).name == second


@pytest.mark.parametrize(
    "options", [{"blocks": 0}, {"load_factor": 0.5}, {"load_factor": float("nan")}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ConsistentHashOptions(**options)
