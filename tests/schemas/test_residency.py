"""The rules of residency, as tables and as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import RegionId
from schemas.residency import (
    LABELS_MAX,
    TEXT_CHARS_MAX,
    Label,
    ground,
    labels_text,
    narrowed,
    parse_labels,
)
from tests.schemas.strategies import NAMES

US, EU, DE = RegionId("us"), RegionId("eu"), RegionId("de")
GROUND = ground({US: (), EU: ("eu",), DE: ("de", "eu")}, {DE: ("eu",), US: ()})
LABELS = st.frozensets(NAMES.map(Label), max_size=LABELS_MAX)


@given(LABELS.filter(bool))
def test_labels_come_back_from_their_text_in_one_order(labels):
    assert parse_labels(labels_text(labels)) == tuple(sorted(labels))


@pytest.mark.parametrize(
    "text",
    ["", ",", "EU", "eu,", "e u", "eu.x", "*", ">", "eü", "x" * 33, "a," * TEXT_CHARS_MAX],
)
def test_text_that_is_no_list_of_labels_is_an_error(text):
    with pytest.raises(ValueError):
        parse_labels(text)


def test_more_labels_than_anybody_has_are_an_error():
    with pytest.raises(ValueError, match="at most 16"):
        parse_labels(",".join(f"l{number}" for number in range(LABELS_MAX + 1)))


def test_spaces_and_repeats_change_nothing():
    assert parse_labels(" eu , de,eu") == ("de", "eu")


@given(st.lists(LABELS, max_size=4))
def test_all_that_is_given_narrows_and_nothing_widens(given):
    found = narrowed(*given)
    labelled = [labels for labels in given if labels]
    if not labelled:
        assert found is None
    else:
        assert found == frozenset.intersection(*labelled)


def test_the_labels_of_regions_in_the_file():
    assert GROUND.labels == {"de", "eu"}
    assert (GROUND.carried_by(DE), GROUND.carried_by(RegionId("moon"))) == ({"de", "eu"}, set())
    assert (GROUND.confined_to(DE), GROUND.confined_to(EU)) == ({"eu"}, set())


@pytest.mark.parametrize(
    ("speaker", "listener", "may", "labels"),
    [
        (DE, EU, True, ("eu",)),
        (DE, US, False, ()),
        (EU, US, True, ()),
        (EU, DE, True, ("de", "eu")),
        (US, DE, True, ("de", "eu")),
        (DE, RegionId("moon"), False, ()),
    ],
)
def test_who_may_send_prompts_to_whom(speaker, listener, may, labels):
    assert GROUND.may_send(speaker, listener) is may
    assert GROUND.sent(speaker, listener) == labels


def test_a_confined_region_publishes_to_regions_with_its_labels_only():
    assert GROUND.listeners(DE) == (EU,)
    assert GROUND.listeners(EU) == (DE, US)


def test_a_prompt_may_lie_where_one_of_its_labels_is_and_its_home_lets_it():
    there = ground({"a": ("x", "y"), "b": ("y",), "c": ()}, {"a": ("y",)})
    assert there.may_hold("c", "b", ())
    assert not there.may_hold("c", "b", ("y",))
    assert there.may_hold("a", "b", ("x",))
    assert there.may_hold("b", "a", ())  # a lets its prompts go where y is
    assert not there.may_hold("c", "a", ())
    assert not there.may_hold("a", "a", ("z",))
