"""Whose work an agent takes, after which claims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.routers import ADOPTED_S, STEP, Fence
from mesh.core.membership.lease import LeaseState
from schemas.ids import RegionId
from schemas.state import TERM_MAX

US, EU, AP = RegionId("us"), RegionId("eu"), RegionId("ap")


@pytest.fixture
def fence() -> Fence:
    return Fence(US)


@pytest.mark.parametrize("term", [None, 0, 7])
def test_the_own_region_is_believed_with_and_without_a_lease(fence: Fence, term):
    assert fence.admits(US, term, 1.0) and fence.owner(1.0) is None


def test_another_region_without_a_term_owns_nothing(fence: Fence):
    assert not fence.admits(EU, None, 1.0)


def test_only_an_adopters_work_is_taken_until_the_region_claims_a_higher_term(fence: Fence):
    fence.claim(US, 4, 1.0)
    fence.claim(EU, 5, 2.0)
    assert fence.owner(2.0) == EU
    assert fence.admits(EU, 5, 2.1)
    assert not fence.admits(US, 4, 2.1) and not fence.admits(US, None, 2.1)
    fence.claim(US, 6, 2.2)
    assert fence.admits(US, 6, 2.3) and fence.admits(US, None, 2.3)
    assert not fence.admits(EU, 5, 2.3)


def test_work_claims_nothing_whatever_its_term(fence: Fence):
    assert not fence.admits(EU, 5, 1.0)
    assert (fence.owner(1.0), fence.term) == (None, 0)
    fence.claim(EU, 5, 1.1)
    assert not fence.admits(US, 6, 1.2), "its own region says so by a sign of life as well"
    assert fence.owner(1.2) == EU


def test_an_adopters_work_of_an_older_lease_is_refused(fence: Fence):
    fence.claim(EU, 5, 1.0)
    fence.claim(EU, 8, 1.1)
    admitted = [term for term in (None, 5, 7, 8, 9) if fence.admits(EU, term, 1.2)]
    assert admitted == [8, 9]


def test_a_silent_adopter_no_longer_owns_the_replica(fence: Fence):
    fence.claim(EU, 5, 1.0)
    late = 1.0 + ADOPTED_S + 0.01
    assert fence.owner(late) is None and fence.admits(US, None, late)
    assert not fence.admits(EU, 5, late), "its words were on their way for too long"
    fence.claim(EU, 5, late)
    assert fence.admits(EU, 5, late), "but a sign of life says that it is the owner after all"


@given(st.lists(st.tuples(st.sampled_from([US, EU, AP]), st.integers(0, 5), st.floats(0, 0.2))))
def test_of_two_regions_at_most_one_is_admitted(claims):
    fence, now = Fence(US), 0.0
    for owner, term, later_s in claims:
        now += later_s
        fence.claim(owner, term, now)
        admitted = [region for region in (US, EU, AP) if fence.admits(region, 5, now)]
        assert len(admitted) == 1
        assert fence.term == max(term, fence.term)


def test_a_term_beyond_all_terms_is_none(fence: Fence):
    fence.claim(EU, TERM_MAX + 1, 1.0)
    assert (fence.owner(1.0), fence.term) == (None, 0)
    fence.claim(EU, TERM_MAX, 1.0)
    assert (fence.owner(1.0), fence.term) == (EU, STEP)


def test_the_highest_possible_claim_locks_no_region_out(fence: Fence):
    """A peer says 2^48 once: as soon as it stops, the next honest lease is above what it left."""
    fence.claim(EU, 5, 1.0)
    fence.claim(AP, TERM_MAX, 1.1)
    assert fence.owner(1.2) == AP, "as long as it says so, for it could have written the lease"
    over = 1.1 + ADOPTED_S + 0.01
    assert fence.owner(over) is None and fence.admits(US, None, over)
    tenure = LeaseState(US, seq=6, owner=EU, term=5)
    tenure.saw_term(fence.term)  # with the next heartbeat
    term = tenure.next_term(EU)
    fence.claim(EU, term, over)
    assert fence.owner(over) == EU and fence.admits(EU, term, over)


def test_many_highest_claims_raise_it_by_one_step_a_second(fence: Fence):
    for number in range(1000):  # for ten seconds
        fence.claim(AP, TERM_MAX - number % 2, 1.0 + number / 100)
    assert fence.term <= 11 * STEP


def test_an_agent_that_starts_late_believes_an_old_lease_at_once(fence: Fence):
    """Its term is far beyond a step: of two that claim, the higher one counts from the start."""
    old, new = 100 * STEP, 100 * STEP + 1
    fence.claim(EU, old, 1.0)
    fence.claim(AP, new, 1.1)
    for later in range(20):
        fence.claim(EU, old, 1.2 + later / 2)
        fence.claim(AP, new, 1.3 + later / 2)
        assert fence.owner(1.4 + later / 2) == AP
        assert not fence.admits(EU, old, 1.4 + later / 2)
