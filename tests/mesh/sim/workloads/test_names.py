"""Names that differ give ids that differ."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.workloads.content import ID_MAX, seeded, segment, segment_id


def test_names_give_as_many_ids_in_range():
    ids = {segment_id("a", *names) for names in product(range(60), repeat=3)}
    assert len(ids) == 60**3
    assert min(ids) >= 0
    assert max(ids) <= ID_MAX


@given(one=st.lists(st.integers() | st.text(max_size=5), min_size=1, max_size=4))
def test_the_same_names_are_the_same_content_and_the_same_chance(one):
    assert segment(7, *one) == segment(7, *one)
    assert seeded(*one).random() == seeded(*one).random()


def test_content_is_at_least_a_token():
    assert segment(0, "x").tokens == 1
