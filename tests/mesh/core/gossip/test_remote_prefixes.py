"""Which peer region holds how much of a prompt, as its routers announced."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.gossip import remote_prefixes
from mesh.core.gossip.remote_prefixes import (
    LOOK_BLOCKS_MAX,
    NAME_CHARS_MAX,
    NAMES_MAX,
    Origin,
    RemotePrefixes,
)
from mesh.core.prefixes.prefix_index import PrefixIndex

EU1, EU2, AP1 = Origin("eu", "r1"), Origin("eu", "r2"), Origin("ap", "r1")


def told(**paths):
    origins = {"eu1": EU1, "eu2": EU2, "ap1": AP1}
    known = RemotePrefixes()
    for name, blocks in paths.items():
        known.trust(origins[name], True)
        known.add(origins[name], blocks)
    return known


def test_each_region_as_deep_as_announced():
    known = told(eu1=(1, 2, 3), ap1=(1, 2))
    assert known.depths((1, 2, 3, 4), ("eu", "ap", "us")) == {"eu": 3, "ap": 2}
    assert known.depths((1, 2, 3, 4), ("ap",)) == {"ap": 2}
    assert known.depths((9, 1), ("eu", "ap")) == {}
    assert known.depths((), ("eu",)) == {}


def test_the_deepest_of_a_regions_routers_counts():
    known = told(eu1=(1,), eu2=(1, 2, 3), ap1=(1, 2))
    assert known.depths((1, 2, 3), ("ap", "eu")) == {"eu": 3, "ap": 2}
    assert known.depths((1, 2, 3), ("eu",)) == {"eu": 3}


def test_a_path_may_be_announced_in_pieces_by_routers_of_one_region():
    known = told(eu1=(1, 4), eu2=(2, 3), ap1=(3,))
    assert known.depths((1, 2, 3, 4, 5), ("eu", "ap")) == {"eu": 4}
    assert known.not_announced("eu", (1, 2, 9)) == [9]
    known.trust(EU2, False)
    assert known.depths((1, 2, 3, 4), ("eu",)) == {"eu": 1}
    assert known.not_announced("eu", (1, 2, 9)) == [2, 9]


def test_who_is_not_trusted_does_not_count_until_it_is_again():
    known = told(eu1=(1, 2), eu2=(1,))
    known.trust(EU1, False)
    assert known.depths((1, 2), ("eu",)) == {"eu": 1}
    known.trust(EU1, True)
    assert known.depths((1, 2), ("eu",)) == {"eu": 2}


def test_what_is_removed_or_forgotten_is_gone_for_that_origin_alone():
    known = told(eu1=(1, 2), ap1=(1, 2))
    known.remove(EU1, (2, 7))
    assert known.depths((1, 2), ("eu", "ap")) == {"eu": 1, "ap": 2}
    known.forget(AP1)
    known.forget(AP1)
    assert known.depths((1, 2), ("eu", "ap")) == {"eu": 1}
    assert len(known) == 1
    known.trust(EU2, True)  # takes over the bit of the one that is gone
    assert known.depths((1, 2), ("eu", "ap")) == {"eu": 1}


def test_own_depths_are_deepened_only_where_announced_goes_deeper():
    index: PrefixIndex[str] = PrefixIndex(10)
    index.announced = told(eu1=(1, 2), ap1=(1,))
    assert index.deepen({"ap": 2, "sa": 1}, (1, 2), ("eu", "ap")) == {"eu": 2, "ap": 2, "sa": 1}


ORIGINS = st.sampled_from((EU1, EU2, AP1))
BLOCKS = st.lists(st.integers(0, 5), max_size=4)
ACTS = st.tuples(st.sampled_from(("add", "remove", "trust", "doubt", "forget")), ORIGINS, BLOCKS)


@given(st.lists(ACTS, max_size=30), st.permutations(range(6)))
def test_it_agrees_with_plain_sets(acts, path):
    known, sets, trusted = RemotePrefixes(), {}, set()
    for act, origin, blocks in acts:
        if act == "add":
            known.add(origin, blocks)
            sets.setdefault(origin, set()).update(blocks)
        elif act == "remove":
            known.remove(origin, blocks)
            sets.setdefault(origin, set()).difference_update(blocks)
        elif act == "forget":
            known.forget(origin)
            sets.pop(origin, None)
            trusted.discard(origin)
        else:
            known.trust(origin, act == "trust")
            (trusted.add if act == "trust" else trusted.discard)(origin)
    expected = {}
    for region in ("eu", "ap"):
        held = set().union(*(sets.get(o, set()) for o in trusted if o.region == region))
        depth = next((n for n, block in enumerate(path) if block not in held), len(path))
        if depth:
            expected[region] = depth
    assert known.depths(path, ("eu", "ap")) == expected
    assert all(set(known.blocks(origin)) == blocks for origin, blocks in sets.items())
    assert len(known) == len(set().union(*sets.values()))


def test_a_named_replica_holds_as_much_as_names_it():
    known = told()
    known.trust(EU1, True)
    known.add(EU1, (1, 2, 3, 4), ("eu-0", "eu-1"), (3, 3, 1, 0))
    found = known.holders((1, 2, 3, 4, 5), ("eu", "ap"))
    assert found == {"eu": {"": 4, "eu-0": 3, "eu-1": 2}}
    known.add(EU1, (3,), ("eu-1",), (1,))  # gained again: other holders
    assert known.holders((1, 2, 3), ("eu",)) == {"eu": {"": 3, "eu-0": 2, "eu-1": 3}}
    known.add(EU1, (1,))  # nobody is named any more
    assert known.holders((1, 2, 3), ("eu",)) == {"eu": {"": 3}}
    assert known.depths((1, 2, 3, 4), ("eu",)) == {"eu": 4}


def test_routers_of_a_region_name_a_replicas_blocks_together():
    known = told(ap1=(1, 2))
    for origin in (EU1, EU2):
        known.trust(origin, True)
    known.add(EU1, (1, 3), ("eu-0",), (1, 1))
    known.add(EU2, (2,), ("eu-0",), (1,))
    assert known.holders((1, 2, 3), ("eu", "ap")) == {"eu": {"": 3, "eu-0": 3}, "ap": {"": 2}}
    assert known.not_announced("eu", (1, 2, 9), "eu-0") == [9]
    assert known.not_announced("eu", (1, 2, 9), "eu-1") == [1, 2, 9]
    known.trust(EU2, False)
    assert known.holders((1, 2, 3), ("eu",)) == {"eu": {"": 1, "eu-0": 1}}
    known.remove(EU1, (1,))
    assert known.holders((1, 2, 3), ("eu",)) == {}


def test_an_origin_names_so_many_replicas_at_most_and_others_once_those_hold_nothing():
    known = told()
    known.trust(EU1, True)
    for number in range(NAMES_MAX + 1):
        known.add(EU1, (number,), (f"eu-{number}",), (1,))
    assert known.holders((NAMES_MAX - 1,), ("eu",))["eu"] == {"": 1, f"eu-{NAMES_MAX - 1}": 1}
    assert known.holders((NAMES_MAX,), ("eu",)) == {"eu": {"": 1}}
    known.remove(EU1, (0,))
    known.add(EU1, (NAMES_MAX,), (f"eu-{NAMES_MAX}",), (1,))
    assert known.holders((NAMES_MAX,), ("eu",)) == {"eu": {"": 1, f"eu-{NAMES_MAX}": 1}}
    known.add(EU1, (7,), ("x" * (NAME_CHARS_MAX + 1), ""), (3,))
    assert known.holders((7,), ("eu",)) == {"eu": {"": 1}}


def test_blocks_with_the_same_holders_share_one_number(monkeypatch):
    monkeypatch.setattr(remote_prefixes, "SAME_MAX", 3)
    known = told()
    names = tuple(f"eu-{number}" for number in range(20))
    for block in (1, 2):
        known.add(EU1, (block,), names, (2**20 - 1,))
    kept = (known._blocks_of[EU1], known._holders_of)
    assert len({id(numbers[block]) for numbers in kept for block in (1, 2)}) == 1
    for block in range(3, 20):
        known.add(EU1, (block,), names, (block,))
        assert len(known._bits_of[EU1].same) <= 3


class CountedReads(dict):
    """Counts how often all its blocks are read."""

    reads = 0

    def values(self):
        self.reads += 1
        return super().values()


def test_names_that_find_no_room_cost_no_search_until_enough_blocks_have_changed():
    known = told()
    known.add(EU1, range(NAMES_MAX, 4 * LOOK_BLOCKS_MAX))
    for number in range(NAMES_MAX):
        known.add(EU1, (number,), (f"eu-{number}",), (1,))
    blocks = known._blocks_of[EU1] = CountedReads(known._blocks_of[EU1])
    known.remove(EU1, range(NAMES_MAX, NAMES_MAX + 9))
    known.add(EU1, (0,), ("first",), (1,))
    assert blocks.reads == 1
    for number in range(3):  # a lost block each pays for a quarter of a search
        known.add(EU1, (-1 - number,), (f"new-{number}",), (1,))
        known.remove(EU1, (-1 - number,))
        known.add(EU1, (), (f"new-{number}",), ())
    assert blocks.reads == 1
    known.remove(EU1, (1,))
    known.trust(EU1, True)
    known.add(EU1, (-9,), ("last",), (1,))
    assert blocks.reads == 2 and known.holders((-9,), ("eu",)) == {"eu": {"": 1, "last": 1}}


def test_a_name_of_one_origin_takes_nothing_from_another():
    known = told(eu2=(1,))
    known.trust(EU1, True)
    known.add(EU1, (1,), ("eu-0",), (1,))
    known.forget(EU1)
    known.trust(AP1, True)  # takes over bits of the one that is gone
    known.add(AP1, (1,), ("ap-0",), (1,))
    assert known.holders((1,), ("eu", "ap")) == {"eu": {"": 1}, "ap": {"": 1, "ap-0": 1}}
