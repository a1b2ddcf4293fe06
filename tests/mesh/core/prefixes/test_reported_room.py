"""What is on its way to an engine that is full will evict the oldest of what it holds."""

import pytest

from mesh.core.prefixes.prefix_index import PrefixIndex

NAME = "a"


def blocks(*prompts: str) -> list[int]:
    """A block a letter."""
    return [ord(letter) for prompt in prompts for letter in prompt]


@pytest.fixture
def index() -> PrefixIndex[str]:
    """Of a replica that reported eight blocks, then that it had evicted two of them."""
    made: PrefixIndex[str] = PrefixIndex(1000)
    made.reports(NAME, reporting=True)
    for at, prompt in enumerate(("ABC", "DEF", "XY")):
        made.insert(NAME, blocks(prompt), float(at))
        made.report(NAME, blocks(prompt), 0, float(at))
    made.evicted(NAME, blocks("XY"))
    return made


def test_nothing_leaves_while_nothing_is_on_its_way(index):
    assert index.leaving(NAME) == set()


def test_as_many_leave_as_are_on_their_way_the_oldest_prompt_from_its_end(index):
    index.insert(NAME, blocks("KL"), 5.0)
    assert index.leaving(NAME) == set(blocks("CB"))
    index.insert(NAME, blocks("DEFGHI"), 6.0)  # three more; the others are used, hence the youngest
    assert index.leaving(NAME) == set(blocks("ABCLK"))


def test_what_it_reports_as_evicted_is_not_counted_twice(index):
    index.insert(NAME, blocks("KL"), 5.0)
    index.evicted(NAME, blocks("CB"))
    assert index.leaving(NAME) == set()


def test_what_was_refused_evicts_nothing(index):
    index.insert(NAME, blocks("KL"), 5.0)
    index.retract(NAME, blocks("KL"), 5.0)
    assert index.leaving(NAME) == set()


def test_a_replica_that_takes_more_without_evicting_was_not_full(index):
    for at, prompt in enumerate(("KL", "MN"), 5):
        index.insert(NAME, blocks(prompt), float(at))
        index.report(NAME, blocks(prompt), 0, float(at))
    assert index.leaving(NAME) == set()
    index.insert(NAME, blocks("Z"), 9.0)
    assert index.leaving(NAME) == set(blocks("C"))


@pytest.mark.parametrize("how", ["cleared", "unfollowed", "gone"])
def test_nothing_is_known_of_a_replica_that_lost_everything(index, how):
    if how == "cleared":
        index.leave_until(NAME, 9.0)
    elif how == "unfollowed":
        index.reports(NAME, reporting=False)
    else:
        index.forget(NAME)
    index.reports(NAME, reporting=True)
    index.insert(NAME, blocks("KLMNOPQRST"), 10.0)
    assert index.leaving(NAME) == set()


def test_an_estimated_replica_is_bounded_and_nothing_leaves():
    estimated: PrefixIndex[str] = PrefixIndex(1000)
    estimated.insert(NAME, blocks("ABC"), 1.0)
    estimated.evicted(NAME, blocks("C"))
    estimated.insert(NAME, blocks("KLM"), 2.0)
    assert estimated.leaving(NAME) == set()


def test_an_index_that_goes_on_from_another_knows_it_too(index):
    index.insert(NAME, blocks("KL"), 5.0)
    later: PrefixIndex[str] = PrefixIndex(1000)
    later.go_on_from(index, copied=True)
    index.insert(NAME, blocks("Z"), 6.0)
    assert later.leaving(NAME) == set(blocks("CB"))
