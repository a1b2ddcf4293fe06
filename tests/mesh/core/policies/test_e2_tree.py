"""The radix tree against the plain truth: a dict of what each holder was given, in order."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.policies.e2_tree import Holder, RadixTree
from tests.mesh.core.build import prompt


def hashes(text):
    return prompt(text).hashes


def tree_of(*held, capacity=100):
    tree, holders = RadixTree(), {}
    for name, text in held:
        holder = holders.setdefault(name, Holder(capacity))
        tree.insert(holder, hashes(text))
    return tree, holders


def test_a_prompt_is_held_as_far_as_it_agrees():
    tree, holders = tree_of(("x", "AAAABB"), ("y", "AAAACC"))
    x, y = holders.values()
    match = tree.match(hashes("AAAABZ"), [x, y])
    assert (match.blocks, match.blocks_of) == (5, {x: 5, y: 4})
    assert tree.match(hashes("AAAABZ"), [y]).blocks == 4
    assert tree.match(hashes("ZAAA"), [x, y]).blocks_of == {}


def test_the_longest_node_of_the_path_is_the_key_portion():
    """Preble: "the GPU that caches the tree node with the longest tokens", not the deepest."""
    tree, holders = tree_of(("x", "AABBBBBBC"), ("y", "AABBBBBBD"), ("z", "AAZ"))
    x, y, _ = holders.values()
    match = tree.match(hashes("AABBBBBBC"), list(holders.values()))
    assert (match.node.start, len(match.node.hashes), list(match.holders)) == (2, 6, [x, y])
    assert match.blocks_of[x] == 9


def test_a_short_match_inside_a_node_counts_as_far_as_it_goes():
    tree, holders = tree_of(("x", "AABBBBBB"))
    match = tree.match(hashes("AAB"), list(holders.values()))
    assert (match.blocks, len(match.path)) == (3, 1)


def test_what_evicting_costs_is_blocks_times_the_requests_that_share_them():
    tree, x = RadixTree(), Holder(6)
    old = tree.insert(x, hashes("AAB")).leaf
    new = tree.insert(x, hashes("AAC")).leaf
    for leaf, requests in ((old, 3), (new, 1)):
        for _ in range(requests):
            tree.count(x, leaf, 1)
    assert x.blocks == 4  # AA, B, C; two more fit
    assert tree.eviction_cost(x, 2, ()) == 0
    assert tree.eviction_cost(x, 3, ()) == 1 * 3  # B, the least recently used
    assert tree.eviction_cost(x, 4, ()) == 1 * 3 + 1 * 1  # and C
    assert tree.eviction_cost(x, 5, ()) == 1 * 3 + 1 * 1 + 1 * 4  # and half of AA
    assert tree.eviction_cost(x, 3, tree.match(hashes("AAB"), ()).path) == 1 * 1  # its own is kept


def test_a_node_stays_while_a_request_of_late_shares_it():
    tree, x = RadixTree(), Holder(4)
    leaf = tree.insert(x, hashes("AAB")).leaf
    tree.count(x, leaf, 1)
    tree.forget(x)
    assert len(tree.match(hashes("AAB"), ()).path) == 1
    assert tree.held_blocks(hashes("AAB")) == 0
    tree.count(x, leaf, -1)
    assert tree.match(hashes("AAB"), ()).path == []


def test_a_prompt_longer_than_the_cache_is_held_in_part():
    tree, holders = tree_of(("x", "ABCDEFGH"), capacity=3)
    assert tree.held_blocks(hashes("ABCDEFGH")) == holders["x"].blocks == 3


TEXTS = st.text("AB", max_size=7)
GIVEN = st.lists(st.tuples(st.sampled_from("xyz"), TEXTS, st.booleans()), max_size=30)


def lru(given_texts, capacity):
    """Blocks one holder has after these prompts, the longest unused first out."""
    blocks = {}
    for text in given_texts:
        for end in range(min(len(text), capacity), 0, -1):
            blocks.pop(text[:end], None)
            blocks[text[:end]] = None
        while len(blocks) > capacity:
            del blocks[next(iter(blocks))]
    return blocks


@given(GIVEN, TEXTS)
def test_it_agrees_with_the_truth_where_memory_suffices(given_texts, asked):
    tree, holders = tree_of(*((name, text) for name, text, _ in given_texts))
    truth = {
        name: lru([text for who, text, _ in given_texts if who == name], 100) for name in holders
    }
    match = tree.match(hashes(asked), list(holders.values()))
    for name, holder in holders.items():
        held = sum(asked[:end] in truth[name] for end in range(1, len(asked) + 1))
        assert match.blocks_of.get(holder, 0) == held
        assert holder.blocks == len(truth[name])
    assert match.blocks == max(match.blocks_of.values(), default=0)


@given(GIVEN, st.integers(1, 6))
def test_memory_is_bounded_and_paths_have_no_gaps(given_texts, capacity):
    tree, holders, events = RadixTree(), {}, []
    for name, text, expires in given_texts:
        holder = holders.setdefault(name, Holder(capacity))
        leaf = tree.insert(holder, hashes(text)).leaf
        tree.count(holder, leaf, 1)
        events.append((holder, leaf))
        if expires:
            was, its_leaf = events.pop(0)
            tree.count(was, its_leaf, -1)
        assert tree.held_blocks(hashes(text)) >= min(len(text), capacity)
        check(holders.values())
    for holder, leaf in events:
        tree.count(holder, leaf, -1)
    for holder in holders.values():
        tree.forget(holder)
        assert holder.blocks == 0
    assert all(tree.match(hashes(text), ()).path == [] for _, text, _ in given_texts)


def check(holders):
    for holder in holders:
        nodes = list(holder.nodes)
        assert holder.blocks == sum(len(node.hashes) for node in nodes) <= holder.capacity_blocks
        for place, node in enumerate(nodes):
            assert holder in node.owners
            assert node.parent.parent is None or node.parent in nodes[place:]  # parents younger


def test_hits_follow_a_node_that_is_split():
    tree, x = RadixTree(), Holder(100)
    leaf = tree.insert(x, hashes("AAAA")).leaf
    tree.count(x, leaf, 1)
    other = tree.insert(x, hashes("AAB")).leaf
    tree.count(x, other, 1)
    upper, lower = tree.match(hashes("AAAA"), ()).path
    assert (upper.hits, lower.hits, lower) == ({x: 2}, {x: 1}, leaf)
    tree.count(x, leaf, -1)
    assert (upper.hits, lower.hits) == ({x: 1}, {})
