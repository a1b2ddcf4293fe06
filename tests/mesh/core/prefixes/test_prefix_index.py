"""The prefix index against sets, its bound, and the property that makes it a trie."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.core.prefixes.prefix_index import (
    EXPIRED_AT_ONCE,
    OWNERS_AT_ONCE,
    PrefixIndex,
)

OWNERS = ["a", "b", "c"]
# Paths through a small tree: block names hold their whole path, as chained hashes do.
WORDS = st.text(alphabet="xyz", max_size=5)


def chain(word):
    """The chained hashes of a word, one a letter."""
    return [int.from_bytes(word[: end + 1].encode()) for end in range(len(word))]


class PrefixMatch(NamedTuple):
    """How many leading blocks some available owner holds, and its deepest owners."""

    blocks: int
    owners: tuple[object, ...]


def match(index, hashes, available):
    depths = index.depths(hashes, available)
    most = max(depths.values(), default=0)
    return PrefixMatch(most, tuple(owner for owner, depth in depths.items() if depth == most))


def test_the_deepest_available_owner_wins():
    index = PrefixIndex(100)
    index.insert("a", chain("xxxx"), 0.0)
    index.insert("b", chain("xxyy"), 0.0)
    index.insert("c", chain("xxyy"), 0.0)
    assert match(index, chain("xxyz"), OWNERS) == PrefixMatch(3, ("b", "c"))
    assert match(index, chain("xxyz"), ["a", "c"]) == PrefixMatch(3, ("c",))
    assert match(index, chain("xxyz"), ["a"]) == PrefixMatch(2, ("a",))
    assert match(index, chain("zzz"), OWNERS) == PrefixMatch(0, ())
    assert match(index, chain("xx"), ["nobody"]) == PrefixMatch(0, ())


def test_the_oldest_prompt_goes_first_and_shared_prefixes_stay():
    index = PrefixIndex(5)
    index.insert("a", chain("xxx"), 0.0)
    index.insert("a", chain("xyy"), 0.0)
    assert match(index, chain("xxx"), ("a",)).blocks == 3
    index.insert("a", chain("xyz"), 0.0)
    assert match(index, chain("xxx"), ("a",)).blocks == 2
    assert match(index, chain("xyy"), ("a",)).blocks == 3


def test_a_prompt_longer_than_the_bound_keeps_its_beginning():
    index = PrefixIndex(3)
    index.insert("a", chain("xxxxxx"), 0.0)
    assert match(index, chain("xxxxxx"), ("a",)).blocks == 3


def test_a_forgotten_owner_leaves_nothing_and_its_place_to_the_next():
    index = PrefixIndex(100)
    index.insert("a", chain("xyz"), 0.0)
    index.insert("b", chain("xy"), 0.0)
    index.forget("a")
    index.forget("a")
    assert len(index) == 2
    index.insert("c", chain("z"), 0.0)
    assert match(index, chain("xyz"), OWNERS) == PrefixMatch(2, ("b",))
    assert match(index, chain("z"), OWNERS) == PrefixMatch(1, ("c",))
    index.forget("b")
    index.forget("c")
    assert len(index) == 0


def test_hashes_that_are_no_chain_do_no_harm():
    index = PrefixIndex(4)
    index.insert("a", [1, 2, 1, -5, 2, 2**70], 0.0)
    index.insert("a", [], 0.0)
    index.forget("a")
    assert len(index) == 0


def test_what_is_old_goes_and_what_is_used_stays():
    index = PrefixIndex(100, ttl_s=10.0)
    index.insert("a", chain("xyz"), 0.0)
    index.insert("a", chain("xyy"), 8.0)
    index.insert("b", chain("z"), 0.0)
    index.expire(10.0)
    assert match(index, chain("xyz"), ("a",)).blocks == 3
    index.expire(10.1)
    assert index.depths(chain("xyz"), OWNERS) == {"a": 2}
    assert index.depths(chain("z"), OWNERS) == {}
    index.insert("a", chain("zz"), 19.0)
    assert match(index, chain("xyy"), ("a",)).blocks == 0


def test_each_owner_has_a_bound_of_its_own():
    index = PrefixIndex(4)
    index.bound("a", 2)
    index.bound("b", 99)
    for owner in "abc":
        index.insert(owner, chain("xyzxyz"), 0.0)
    assert [index.blocks(owner) for owner in "abcd"] == [2, 4, 4, 0]
    assert [index.bound_of(owner) for owner in "abc"] == [2, 4, 4]
    index.forget("a")
    index.insert("a", chain("xyzxyz"), 0.0)
    assert index.blocks("a") == 4


def test_what_is_old_goes_a_little_at_a_time_of_every_owner():
    index = PrefixIndex(10**6, ttl_s=10.0)
    owners = [f"o{number}" for number in range(2 * OWNERS_AT_ONCE + 1)]
    for number, owner in enumerate(owners):
        start = 10**6 * number
        index.insert(owner, range(start, start + EXPIRED_AT_ONCE + 1), 0.0)
    index.forget(owners[0])
    before = len(index)
    index.expire(10.1)
    assert before - len(index) == OWNERS_AT_ONCE * EXPIRED_AT_ONCE
    for _ in range(5):
        index.expire(10.1)
    assert len(index) == 0


def test_an_eviction_takes_all_that_is_as_old():
    index = PrefixIndex(100)
    for now, word in enumerate(("zz", "xyz", "xyy", "y")):
        index.insert("a", chain(word), float(now))
        index.insert("b", chain(word), float(now))
    assert index.depth("a", chain("xyzz")) == (3, 1.0)
    assert index.depth("a", chain("xy")) == (2, 2.0)
    assert index.depth("a", chain("xx"))[0] == 1
    assert index.depth("nobody", chain("x")) == (0, float("-inf"))
    index.forget_until("a", 1.0)
    index.forget_until("nobody", 1.0)
    depths = [index.depths(chain(word), "ab") for word in ("zz", "xyz", "xyy", "y")]
    assert depths == [{"b": 2}, {"a": 2, "b": 3}, {"a": 3, "b": 3}, {"a": 1, "b": 1}]


def test_what_never_came_is_retracted_and_what_came_since_stays():
    index = PrefixIndex(100)
    index.insert("a", chain("xyz"), 1.0)
    index.insert("a", chain("xy"), 2.0)
    index.retract("a", chain("xyz"), 1.0)
    index.retract("nobody", chain("xyz"), 1.0)
    assert match(index, chain("xyz"), ("a",)).blocks == 2


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_many_owners_need_no_more_bits_than_owners(count, seed):
    index = PrefixIndex(10)
    for number in range(count):
        index.insert(number, chain("x"), 0.0)
    index.forget(seed % count)
    index.insert("new", chain("x"), 0.0)
    names = match(index, chain("x"), [*range(count), "new"]).owners
    assert sorted(map(str, names)) == sorted({*map(str, range(count)), "new"} - {str(seed % count)})


class AgainstSets(RuleBasedStateMachine):
    """The same questions to the index and to one ordered dict of prefixes per owner."""

    LIMIT = 6

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(self.LIMIT)
        self.plain = {}  # owner -> prefixes, the oldest insertion first

    @rule(owner=st.sampled_from(OWNERS), word=WORDS)
    def insert(self, owner, word):
        self.index.insert(owner, chain(word), 0.0)
        held = self.plain.setdefault(owner, [])
        path = [word[:end] for end in range(1, min(len(word), self.LIMIT) + 1)]
        held[:] = [prefix for prefix in held if prefix not in path] + path[::-1]
        del held[: max(0, len(held) - self.LIMIT)]

    @rule(owner=st.sampled_from(OWNERS))
    def forget(self, owner):
        self.index.forget(owner)
        self.plain.pop(owner, None)

    @rule(word=WORDS, available=st.lists(st.sampled_from(OWNERS), unique=True))
    def match(self, word, available):
        depths = {}
        for owner in available:
            held = self.plain.get(owner, [])
            depths[owner] = next(
                (end for end in range(len(word)) if word[: end + 1] not in held), len(word)
            )
        best = max(depths.values(), default=0)
        found = match(self.index, chain(word), available)
        depths = {owner: depth for owner, depth in depths.items() if depth}
        assert self.index.depths(chain(word), available) == depths
        holders = {name: n for n, names in self.index.holders(chain(word)) for name in names}
        assert {name: n for name, n in holders.items() if name in available} == depths
        deepest = {owner for owner, depth in depths.items() if depth == best} if best else set()
        assert (found.blocks, set(found.owners)) == (best, deepest)

    @invariant()
    def the_same_blocks_within_the_bound(self):
        prefixes = {prefix for held in self.plain.values() for prefix in held}
        assert len(self.index) == len(prefixes)
        assert all(len(held) <= self.LIMIT for held in self.plain.values())

    @invariant()
    def who_holds_a_child_holds_its_parent(self):
        for owner in OWNERS:
            for prefix in self.plain.get(owner, []):
                assert match(self.index, chain(prefix), (owner,)).blocks == len(prefix)


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_bound_holds_per_owner(limit):
    index = PrefixIndex(limit)
    for number in range(50):
        index.insert("a", chain("xyz"[number % 3] * (number % 9)), 0.0)
    assert len(index) <= limit


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.text("XY", max_size=6)), max_size=30))
def test_holders_among_some_are_those_of_all_without_the_others(inserted):
    index = PrefixIndex(1000)
    for owner, text in inserted:
        index.insert(owner, chain(text), 0.0)
    hashes, some = chain("XYXYXY"), set("ace")
    every = {name: depth for depth, names in index.holders(hashes) for name in names}
    found = {name: depth for depth, names in index.holders(hashes, some) for name in names}
    assert found == {name: depth for name, depth in every.items() if name in some}
    assert index.owner_count == len({owner for owner, _ in inserted})
