"""The searches find what there is, with few questions."""

from collections.abc import Mapping
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.study.plan import apportioned, least, without_spare_replicas

MOST = 512


@given(need=st.integers(1, MOST), guess=st.integers(-5, 2 * MOST))
def test_least_finds_the_need_with_few_simulations(need: int, guess: int) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count >= need

    assert least(fits, guess=guess, most=MOST) == need
    assert len(asked) == len(set(asked)), "no question twice"
    assert need in asked
    assert len(asked) <= 2 * log2(MOST) + 3
    assert need == 1 or need - 1 in asked, "the one below was tried too"


@pytest.mark.parametrize(
    ("guess", "asked"), [(3, [3, 6, 512]), (300, [300, 512]), (256, [256, 512]), (512, [512])]
)
def test_least_ends_soon_when_nothing_fits(guess: int, asked: list[int]) -> None:
    shown: list[int] = []
    assert least(lambda count: bool(shown.append(count)), guess=guess, most=MOST) is None
    assert shown == asked


def test_a_replica_is_taken_first_from_the_first_region_of_the_order() -> None:
    def fits(fleet: Mapping[str, int]) -> bool:
        return sum(fleet.values()) >= 3

    fewer = without_spare_replicas({"us": 2, "eu": 3}, fits, lambda fleet: ["eu", "us"])
    assert fewer == {"us": 2, "eu": 1}


@given(
    fleet=st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), min_size=1),
    needs=st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
)
def test_what_is_left_fits_and_can_spare_nothing(
    fleet: dict[str, int], needs: dict[str, int]
) -> None:
    def fits(replicas: Mapping[str, int]) -> bool:
        return all(count >= needs.get(region, 0) for region, count in replicas.items())

    if not fits(fleet):
        fleet = {region: max(count, needs.get(region, 0)) for region, count in fleet.items()}
    left = without_spare_replicas(fleet, fits, lambda replicas: list(replicas))
    assert fits(left)
    smaller = [left | {region: left[region] - 1} for region in left if left[region]]
    assert not any(fits(each) and sum(each.values()) for each in smaller)


@given(total=st.integers(0, 200), shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_all_replicas_are_apportioned_and_no_region_is_off_by_one(
    total: int, shares: list[float]
) -> None:
    named = dict(enumerate(shares))
    dealt = apportioned(total, named)
    assert sum(dealt.values()) == total
    for name, share in named.items():
        assert abs(dealt[name] - total * share / sum(shares)) < 1 + 1e-9


@pytest.mark.parametrize(("total", "dealt"), [(3, (2, 1)), (4, (2, 2)), (1, (1, 0))])
def test_equal_shares_go_to_the_first_named(total: int, dealt: tuple[int, int]) -> None:
    assert tuple(apportioned(total, {"us": 1.0, "eu": 1.0}).values()) == dealt
