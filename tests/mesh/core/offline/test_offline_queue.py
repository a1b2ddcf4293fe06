"""The offline queue: depth-first order, age, the throw between them, limits; against a model."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.core.offline.offline_queue import (
    DuplicateOffline,
    OfflineQueue,
    OfflineQueueFull,
    UnknownOffline,
    shared_blocks,
)


def queue(utility_ratio: float = 1.0, seed: int = 1, **limits: int) -> OfflineQueue:
    return OfflineQueue(random.Random(seed), utility_ratio=utility_ratio, **limits)


def chained(words: str) -> list[int]:
    """Hashes of a prompt's words, each naming all before it."""
    parts = words.split()
    return [hash(tuple(parts[: end + 1])) for end in range(len(parts))]


def drained(offline: OfflineQueue) -> list[int]:
    order = []
    while (key := offline.first()) is not None:
        offline.take(key)
        offline.forget(key)
        order.append(key)
    return order


PAPER = ["What is ML", "How to code", "What is AI", "How to debug"]


def test_the_papers_example():
    by_prefix, by_arrival = queue(1.0), queue(0.0)
    for key, words in enumerate(PAPER):
        by_prefix.add(key, chained(words))
        by_arrival.add(key, chained(words))
    assert drained(by_prefix) == [0, 2, 1, 3]
    assert drained(by_arrival) == [0, 1, 2, 3]


def test_a_shared_prefix_starves_others_without_the_utility_ratio():
    """The paper's second example, with newcomers that never end."""

    def place_of_the_lonely(utility_ratio: float) -> int:
        offline = queue(utility_ratio)
        offline.add(0, chained("What is ML"))
        offline.add(1, chained("How to code"))
        for turn in range(200):
            offline.add(2 + turn, chained(f"What is X{turn}"))
            key = offline.first()
            assert key is not None
            offline.take(key)
            offline.forget(key)
            if key == 1:
                return turn
        return 200

    assert place_of_the_lonely(1.0) == 200
    assert place_of_the_lonely(0.8) < 40


def test_a_preempted_request_goes_back_to_its_place():
    offline = queue()
    for key, words in enumerate(["a b", "a c", "z", "a d"]):
        offline.add(key, chained(words))
    offline.take(1)
    offline.add(9, chained("a c e"))  # a continuation: behind the shorter prompt
    assert offline.first() == 0
    offline.put_back(1)
    assert drained(offline) == [0, 1, 9, 3, 2]


def test_a_prefix_keeps_its_place_while_one_of_its_requests_runs():
    offline = queue()
    offline.add(0, chained("a b"))
    offline.add(1, chained("z"))
    offline.take(0)
    offline.add(2, chained("a c"))
    assert offline.first() == 2, "'a' is still older than 'z'"
    offline.forget(0)
    offline.forget(2)
    offline.add(3, chained("a d"))
    assert offline.first() == 1, "forgotten by all, 'a' is new again"


def test_the_throw_counts_until_a_request_is_taken():
    offline = queue(0.5, seed=3)
    for key in range(50):
        offline.add(key, chained(f"p{key % 5} q{key}"))
    for _ in range(50):
        assert len({offline.first() for _ in range(20)}) == 1
        key = offline.first()
        assert key is not None
        offline.take(key)


def test_the_utility_ratio_is_the_share_of_choices_by_prefix():
    taken: Counter[bool] = Counter()
    offline = queue(0.7)
    offline.add(0, chained("a"))
    for key in range(1, 3001):
        offline.add(key, chained(f"b{key}"))
        offline.add(10_000 + key, chained(f"a {key}"))  # by prefix these, by age the others
        first = offline.first()
        assert first is not None
        offline.take(first)
        taken[first == 0 or first > 10_000] += 1
    assert taken[True] / 3000 == pytest.approx(0.7, abs=0.03)


def test_limits():
    offline = queue(requests_max=2, blocks_max=5)
    offline.add(1, [1, 2, 3])
    with pytest.raises(OfflineQueueFull, match="3 blocks doesn't fit beside 3"):
        offline.add(2, [7, 8, 9])
    offline.add(2, [1, 2])
    with pytest.raises(OfflineQueueFull, match="2 offline requests"):
        offline.add(3, [])
    offline.take(1)
    with pytest.raises(OfflineQueueFull):
        offline.add(3, [])
    offline.forget(1)
    offline.add(3, [4])
    assert offline.blocks == 3
    assert drained(offline) == [2, 3]
    assert offline.blocks == 0


def test_what_is_not_there_is_refused():
    offline = queue()
    offline.add(1, [1])
    with pytest.raises(DuplicateOffline):
        offline.add(1, [2])
    with pytest.raises(UnknownOffline, match="was not taken"):
        offline.put_back(1)
    offline.take(1)
    with pytest.raises(DuplicateOffline):
        offline.add(1, [2])
    with pytest.raises(UnknownOffline, match="doesn't wait"):
        offline.take(1)
    offline.forget(1)
    for act in (offline.take, offline.put_back, offline.forget):
        with pytest.raises(UnknownOffline):
            act(1)
    assert offline.first() is None


@pytest.mark.parametrize("utility_ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_none_is_refused(utility_ratio):
    with pytest.raises(ValueError, match="0 to 1"):
        queue(utility_ratio)


class Trie:
    """The naive model: a real trie, walked from its root at every choice."""

    def __init__(self) -> None:
        self.children: dict[int, Trie] = {}
        self.here: list[int] = []

    def holds_any(self) -> bool:
        return bool(self.here) or any(child.holds_any() for child in self.children.values())

    def insert(self, key: int, blocks: list[int]) -> None:
        node = self
        for block in blocks:
            node = node.children.setdefault(block, Trie())
        node.here.append(key)

    def remove(self, key: int, blocks: list[int]) -> None:
        if not blocks:
            self.here.remove(key)
            return
        child = self.children[blocks[0]]
        child.remove(key, blocks[1:])
        if not child.holds_any():
            del self.children[blocks[0]]

    def walk(self) -> list[int]:
        return [*sorted(self.here), *(k for child in self.children.values() for k in child.walk())]


@settings(max_examples=40, stateful_step_count=40, deadline=None)
class AgainstTheModel(RuleBasedStateMachine):
    """Keys rise with arrival, so age is the key's order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_prefix, self.by_age = queue(1.0), queue(0.0)
        self.trie = Trie()
        self.paths: dict[int, list[int]] = {}
        self.taken: set[int] = set()
        self.next_key = 0

    @rule(path=st.lists(st.integers(0, 2), max_size=5))
    def add(self, path):
        blocks = [int("1" + "".join(map(str, path[: end + 1]))) for end in range(len(path))]
        key, self.next_key = self.next_key, self.next_key + 1
        self.paths[key] = blocks
        self.trie.insert(key, blocks)
        for offline in (self.by_prefix, self.by_age):
            offline.add(key, blocks)

    @precondition(lambda self: len(self.paths) > len(self.taken))
    @rule(data=st.data())
    def take(self, data):
        key = data.draw(st.sampled_from(sorted(self.paths.keys() - self.taken)))
        self.taken.add(key)
        for offline in (self.by_prefix, self.by_age):
            offline.take(key)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data):
        key = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(key)
        for offline in (self.by_prefix, self.by_age):
            offline.put_back(key)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def forget(self, data):
        key = data.draw(st.sampled_from(sorted(self.paths)))
        self.taken.discard(key)
        self.trie.remove(key, self.paths.pop(key))
        for offline in (self.by_prefix, self.by_age):
            offline.forget(key)

    @invariant()
    def the_first_is_the_models(self):
        waiting = [key for key in self.trie.walk() if key not in self.taken]
        assert self.by_prefix.first() == (waiting[0] if waiting else None)
        assert self.by_age.first() == (min(waiting) if waiting else None)
        assert len(self.by_prefix) == len(self.by_age) == len(waiting)
        assert self.by_prefix.blocks == sum(map(len, self.paths.values()))


TestAgainstTheModel = AgainstTheModel.TestCase


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=30))
def test_a_drained_queue_gives_the_depth_first_order(paths):
    offline, trie = queue(), Trie()
    for key, path in enumerate(paths):
        blocks = chained(" ".join(map(str, path)))
        offline.add(key, blocks)
        trie.insert(key, blocks)
    expected = trie.walk()
    assert drained(offline) == expected


@pytest.mark.parametrize(
    ("prompts", "part"),
    [
        ([], None),
        (["a"], ["a"]),
        (["a b", "a c"], ["a c"]),
        (["a b", "a c", "d e", "d f"], ["d e", "d f"]),
        (["a b", "d e", "d f", "d g"], ["d e", "d f", "d g"]),
        (["a b", "a c", "a d", "e f"], ["e f"]),
        (["a b c", "a b d", "a e", "a f"], ["a e", "a f"]),
        (["a", "a b", "a c"], ["a b", "a c"]),
        (["a b", "a b", "a b", "a b"], ["a b", "a b"]),
    ],
)
def test_a_cut_shares_few_blocks(prompts: list[str], part: list[str] | None):
    """`part`: what lies behind the cut."""
    offline = queue()
    for key, words in enumerate(prompts):
        offline.add(key, chained(words))
    cut = offline.cut(None, None)
    assert (cut is None) is (part is None)
    if part is not None:
        assert [prompts[key] for key in offline.waiting(cut, None)] == part


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=2, max_size=12),
    st.integers(0, 11),
    st.integers(0, 11),
)
def test_spans_of_the_order_agree_with_each_other(prompts: list[list[int]], one: int, other: int):
    offline = queue()
    for key, prompt in enumerate(prompts):
        offline.add(key, [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))])
    order = list(offline.waiting(None, None))
    assert order == [offline.place_at(position)[2] for position in range(len(prompts))]
    first, last = sorted((one % len(prompts), other % len(prompts)))
    start, end = offline.place(order[first]), offline.place(order[last])
    assert list(offline.waiting(start, end)) == order[first:last]
    assert offline.count(start, end) == last - first
    assert offline.has_between(start, end) is (last > first)
    cut = offline.cut(start, end)
    if last - first >= 2:
        assert cut is not None
        before, behind = offline.count(start, cut), offline.count(cut, end)
        assert before and behind and before + behind == last - first
        across = shared_blocks(offline.place(order[first + before - 1]), cut)
        least = min(
            shared_blocks(offline.place(order[at]), offline.place(order[at + 1]))
            for at in range(first, last - 1)
        )
        assert across == least
