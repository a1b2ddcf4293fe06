"""Options behind a policy's name."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, Tunable, find_maker, make_policy, read_options
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions


@dataclass(frozen=True)
class Knobs:
    count: int = 3
    part: float = 0.5

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, not {self.count}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4/0.25", Knobs(4, 0.25)),
        ("4", Knobs(4, 0.5)),
        ("/1", Knobs(3, 1.0)),
        ("", Knobs()),
        ("/", Knobs()),
    ],
)
def test_values_fill_the_fields_in_their_order(text, expected):
    assert read_options(Knobs(), text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1/2/3", r"3 options in '1/2/3', at most count/part"),
        ("1.5", "count must be a whole number, not '1.5'"),
        ("1/x", "part must be a number, not 'x'"),
        ("-1", "count must be 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(text, said):
    with pytest.raises(ValueError, match=said):
        read_options(Knobs(), text)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    for name, maker in POLICIES.items():
        if isinstance(maker, Tunable):
            try:
                make_policy(f"{name}:{text}", RouterSettings(), Random(1))
            except ValueError as error:
                assert name in str(error)


def test_a_name_with_options_makes_that_policy_with_them():
    policy = make_policy("cache-aware:0.3/64/1.5", RouterSettings(), Random(1))
    assert isinstance(policy, CacheAware)
    assert policy._options == CacheAwareOptions(0.3, 64, 1.5)
    plain = make_policy("cache-aware", RouterSettings(), Random(1))
    assert plain._options == CacheAwareOptions(0.5, 32, 1.1)


def test_options_of_a_policy_without_any_are_an_error():
    with pytest.raises(ValueError, match="policy 'least-load' has no options"):
        find_maker("least-load:3")


def test_other_makers_may_have_options_too():
    made = []
    makers = {"odd": Tunable(Knobs(), lambda settings, dice, knobs: made.append(knobs))}
    make_policy("odd:7", RouterSettings(), Random(1), makers)
    assert made == [Knobs(7)]
    with pytest.raises(ValueError, match="there are odd"):
        make_policy("cache-aware:1", RouterSettings(), Random(1), makers)
