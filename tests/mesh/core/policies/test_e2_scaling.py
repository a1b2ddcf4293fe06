"""Autoscaling: a wait that doubles from one half of the window to the next."""

import pytest

from mesh.core.policies.e2 import PREFIXES_MAX, WAITS_MIN, PrefixScaling


def scaling(before_s, after_s, requests=WAITS_MIN):
    """A window of 10 s: its halves end at 5, 10, ..."""
    one = PrefixScaling(10.0)
    for _ in range(requests):
        one.waited("p", before_s, 6.0)
    for _ in range(requests):
        one.waited("p", after_s, 11.0)
    return one


@pytest.mark.parametrize(
    ("before_s", "after_s", "due"),
    [(1.0, 2.0, True), (1.0, 1.9, False), (0.0, 0.5, True), (0.01, 0.2, False)],
)
def test_it_is_due_when_the_wait_doubles_and_exceeds_a_prefill(before_s, after_s, due):
    assert scaling(before_s, after_s).overloaded("p", 0.5, 12.0) is due


def test_few_requests_prove_nothing():
    assert not scaling(1.0, 9.0, requests=WAITS_MIN - 1).overloaded("p", 0.1, 12.0)


def test_old_halves_are_not_compared():
    assert not scaling(1.0, 9.0).overloaded("p", 0.1, 17.0)  # the later half has just begun
    assert not scaling(1.0, 9.0).overloaded("p", 0.1, 40.0)


def test_a_replicated_prefix_is_judged_anew():
    one = scaling(1.0, 9.0)
    one.replicated("p")
    assert not one.overloaded("p", 0.1, 12.0)


def test_the_longest_unused_prefix_is_forgotten():
    one = scaling(1.0, 9.0)
    for number in range(PREFIXES_MAX):
        one.waited(number, 1.0, 11.0)
    assert not one.overloaded("p", 0.1, 12.0)
