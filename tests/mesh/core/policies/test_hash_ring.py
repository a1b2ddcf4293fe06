"""The ring: whose key is whose, and what coming and going changes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.policies import consistent_hash as hash_ring
from mesh.core.policies.consistent_hash import POINTS, HashRing, key_of

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [key_of(f"user-{number}") for number in range(4000)]

names = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)
keys = st.integers(0, 2**64 - 1)


def ring_of(known):
    ring = HashRing()
    ring.learn(known)
    return ring


@given(names, keys, st.data())
def test_who_was_not_chosen_may_leave_or_be_away_unnoticed(known, key, data):
    ring = ring_of(known)
    chosen = ring.next(key, known)
    others = data.draw(st.lists(st.sampled_from(known), unique=True))
    left = [name for name in known if name == chosen or name not in others]
    assert ring.next(key, left) == chosen  # away
    for name in known:
        if name not in left:
            ring.forget(name)
    assert ring.next(key, known) == chosen  # gone


@given(names, keys, st.data())
def test_the_order_of_learning_makes_no_difference(known, key, data):
    one, other = ring_of(known), HashRing()
    for name in data.draw(st.permutations(known)):
        other.learn([name])
    assert one.next(key, known) == other.next(key, known)


@given(names, keys)
def test_who_is_away_gets_its_keys_back(known, key):
    ring = ring_of(known)
    chosen = ring.next(key, known)
    others = [name for name in known if name != chosen]
    second = ring.next(key, others)
    assert second in others if others else second is None
    ring.forget(chosen)
    assert ring.next(key, known) == second
    ring.learn([chosen])
    assert ring.next(key, known) == chosen


def test_the_walk_goes_on_at_the_start_of_the_circle():
    ring = ring_of(NAMES)
    assert ring.next(2**64 - 1, NAMES) == ring.next(0, NAMES)


def test_keys_are_shared_out_fairly():
    ring = ring_of(NAMES)
    counts = Counter(ring.next(key, NAMES) for key in KEYS)
    fair = len(KEYS) / len(NAMES)
    assert len(counts) == len(NAMES)
    assert all(0.65 * fair < count < 1.35 * fair for count in counts.values())


def test_a_new_name_takes_its_share_and_moves_nothing_else():
    ring = ring_of(NAMES)
    before = {key: ring.next(key, NAMES) for key in KEYS}
    ring.learn(["new"])
    after = {key: ring.next(key, [*NAMES, "new"]) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {"new"}
    assert 0.5 < len(moved) / (len(KEYS) / 9) < 1.5


def test_one_name_has_so_many_points_however_often_it_is_learnt(monkeypatch):
    ring = HashRing()
    for _ in range(3):
        ring.learn(["a", "a"])
    assert (len(ring), len(ring._points)) == (1, POINTS)
    ring.forget("a")
    ring.forget("a")
    assert (len(ring), len(ring._points), ring.next(1, ["a"])) == (0, 0, None)


def test_a_full_ring_drops_those_that_are_away(monkeypatch):
    monkeypatch.setattr(hash_ring, "NAMES_MAX", 3)
    ring = ring_of(["a", "b", "c"])
    ring.learn(["c", "d"])
    assert len(ring) == 2
    assert {ring.next(key, "abcd") for key in KEYS} == {"c", "d"}
    ring.learn(["a", "b", "c", "d", "e"])  # all are there: all must be reachable
    assert {ring.next(key, "abcde") for key in KEYS} == set("abcde")


@pytest.mark.parametrize("text", ["", "\ud800", "user-1"])
def test_any_text_is_a_key(text):
    assert 0 <= key_of(text) < 2**64
