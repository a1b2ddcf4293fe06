"""A bag: a set with a random draw, whatever came and went."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.view.replica_sampling import SampledSet


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_it_is_a_set(steps):
    bag, expected = SampledSet(), set()
    for comes, thing in steps:
        (bag.add if comes else bag.discard)(thing)
        (expected.add if comes else expected.discard)(thing)
        assert (len(bag), sorted(bag)) == (len(expected), sorted(expected))
        assert [number in bag for number in range(10)] == [n in expected for n in range(10)]


def test_few_are_all_drawn_and_of_many_some():
    bag = SampledSet()
    for number in range(100):
        bag.add(number)
    drawn = bag.draw(40, Random(1))
    assert len(drawn) == 40 and len(set(drawn)) > 20
    assert drawn == bag.draw(40, Random(1)) != bag.draw(40, Random(2))
    assert sorted(bag.draw(100, Random(1))) == sorted(bag)
