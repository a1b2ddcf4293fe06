"""Whom to ask first: the nearest that is well, and who it stays with."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.client.region_choice import REGIONS_MAX, REST_S, REST_S_MAX, RegionChoice

URLS = ("a", "b", "c")


@pytest.fixture
def choice():
    made = RegionChoice(URLS, Random(1))
    for url, rtt_s in zip(URLS, (0.2, 0.05, 0.1), strict=True):
        made.measured(url, rtt_s)
    return made


def test_the_nearest_goes_first(choice):
    assert choice.order(0.0) == ["b", "c", "a"]


def test_unmeasured_regions_come_last():
    choice = RegionChoice(URLS, Random(1))
    choice.measured("c", 0.3)
    assert choice.order(0.0) == ["c", "a", "b"]


def test_it_stays_until_another_is_clearly_nearer(choice):
    assert choice.order(0.0)[0] == "b"
    choice.measured("c", 0.045)
    assert choice.order(1.0)[0] == "b"
    choice.measured("c", 0.039)
    assert choice.order(2.0)[0] == "c"


def test_a_failed_region_rests_and_returns(choice):
    choice.failed("b", 10.0)
    assert choice.order(10.0) == ["c", "a", "b"]
    assert choice.order(10.0 + REST_S)[0] == "b"
    choice.failed("b", 20.0)
    choice.succeeded("b")
    assert choice.order(20.0)[0] == "b"


def test_each_failure_doubles_the_rest_up_to_a_limit():
    rests = []
    choice = RegionChoice(["a", "b"], Random(3))
    choice.measured("a", 0.01)
    choice.measured("b", 1.0)
    now = 0.0
    for _ in range(12):
        choice.failed("a", now)
        rest = next(s / 100 for s in range(1, 7000) if choice.order(now + s / 100)[0] == "a")
        rests.append(rest)
        now += 1000.0
    for number, rest in enumerate(rests):
        whole = min(REST_S_MAX, REST_S * 2**number)
        assert 0.5 * whole - 0.01 <= rest <= whole + 0.01


def test_a_region_rests_for_its_retry_after(choice):
    choice.failed("b", 0.0, retry_after_s=30.0)
    assert choice.order(29.0)[-1] == "b"
    assert "b" in choice.order(31.0)[:2]


def test_when_all_rest_the_first_to_return_is_called(choice):
    for number, url in enumerate(URLS):
        choice.failed(url, 100.0 + number, retry_after_s=10.0)
    assert choice.order(103.0) == ["a", "b", "c"]


def test_others_are_learned_up_to_a_limit(choice):
    choice.add(["d", "a"])
    assert choice.urls == ("a", "b", "c", "d")
    choice.add(f"x{number}" for number in range(100))
    assert len(choice.urls) == REGIONS_MAX


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["measured", "failed", "answered"]),
        st.sampled_from(URLS),
        st.floats(0.001, 60.0),
    ),
    max_size=40,
)


@given(EVENTS, st.integers(0, 2**32))
def test_every_region_stays_in_the_order_healthy_ones_first(events, seed):
    choice, now, failed = RegionChoice(URLS, Random(seed)), 0.0, set()
    for kind, url, value in events:
        now += value
        if kind == "measured":
            choice.measured(url, value)
        elif kind == "failed":
            choice.failed(url, now)
        else:
            choice.succeeded(url)
        (failed.add if kind == "failed" else failed.discard)(url)
        order = choice.order(now)
        assert sorted(order) == sorted(URLS)
        if kind == "failed" and len(failed) < len(URLS):
            assert order[0] != url
