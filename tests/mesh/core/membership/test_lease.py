"""One lease as a router sees it, whatever the order of arrival."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.membership.lease import GUARD, HINT_STEP, LeaseState
from schemas.ids import RouterId
from schemas.state import TERM_MAX, Lease
from tests.mesh.core.build import AP, EU, US


def lease(owner, term):
    return Lease(region=US, owner=owner, router=RouterId("r1"), term=term, lease_s=1.0)


def test_the_first_claim_names_no_write_and_takes_the_first_term():
    asked = LeaseState(US).ask(7, EU, 10.0)
    assert (asked.number, asked.expected, asked.term) == (7, 0, 1)


def test_a_renewal_keeps_its_term_and_another_owner_takes_a_higher_one():
    tenure = LeaseState(US)
    tenure.seen(lease(US, 4), 9, 10.0)
    assert (tenure.next_term(US), tenure.next_term(EU)) == (4, 10)


def test_an_owner_counts_from_before_it_asked():
    tenure = LeaseState(US)
    tenure.ask(1, EU, 10.0)
    tenure.granted(EU, 1, 1.0, 10.4)
    assert (tenure.owner, tenure.ours_until) == (EU, 10.0 + GUARD)


def test_a_grant_after_a_later_owners_write_changes_nothing():
    tenure = LeaseState(US)
    tenure.ask(1, EU, 10.0)
    tenure.seen(lease(EU, 1), 1, 10.1)
    tenure.seen(lease(US, 2), 2, 10.2)
    tenure.granted(EU, 1, 1.0, 10.3)
    assert (tenure.owner, tenure.seq, tenure.term) == (US, 2, 2)


def test_a_refusal_names_the_last_write_but_not_its_owner():
    tenure = LeaseState(US)
    tenure.ask(1, EU, 10.0)
    tenure.outdated(6, 10.1)
    assert (tenure.owner, tenure.seq, tenure.seen_at) == (None, 6, 10.1)
    assert tenure.seen(lease(US, 3), 6, 10.2), "and then its owner is known"
    assert tenure.owner == US


def test_a_refusal_changes_nothing_after_a_newer_write():
    tenure = LeaseState(US)
    tenure.ask(1, EU, 10.0)
    tenure.seen(lease(AP, 5), 7, 10.1)
    tenure.outdated(6, 10.2)
    assert (tenure.owner, tenure.seq, tenure.seen_at) == (AP, 7, 10.1)


def test_a_stream_that_began_anew_counts_and_terms_go_on():
    tenure = LeaseState(US)
    tenure.seen(lease(US, 40), 90, 10.0)
    tenure.ask(1, US, 11.0)
    tenure.outdated(0, 11.1)
    asked = tenure.ask(2, US, 11.2)
    assert (asked.expected, asked.term) == (0, 41)
    tenure.granted(US, 1, 1.0, 11.3)
    assert (tenure.owner, tenure.seq, tenure.term) == (US, 1, 41)


def test_an_owner_below_a_reported_term_takes_a_new_one_at_its_next_renewal():
    tenure = LeaseState(US)
    tenure.seen(lease(US, 3), 5, 10.0)
    tenure.saw_term(8)
    assert tenure.next_term(US) == 9


def test_a_reported_term_counts_up_to_a_step_beyond_the_last_write():
    tenure = LeaseState(US)
    tenure.seen(lease(US, 3), 5, 10.0)
    for _ in range(9):
        tenure.saw_term(TERM_MAX)
    assert tenure.next_term(US) == 5 + HINT_STEP + 1
    asked = tenure.ask(1, US, 10.1)
    tenure.granted(US, 6, 1.0, 10.2)
    tenure.saw_term(TERM_MAX)
    assert tenure.next_term(US) == asked.term + HINT_STEP + 1, "and by another with the next"


def test_a_term_beyond_all_terms_is_no_hint():
    tenure = LeaseState(US)
    tenure.saw_term(TERM_MAX + 1)
    assert tenure.next_term(US) == 1


def test_when_terms_are_used_up_the_numbers_of_writes_go_on():
    tenure = LeaseState(US)
    tenure.seen(lease(EU, TERM_MAX), 5, 10.0)
    asked = tenure.ask(1, US, 10.1)
    assert asked.term == TERM_MAX
    tenure.granted(US, 6, 1.0, 10.2)
    assert tenure.owner == US
    assert tenure.seen(lease(AP, TERM_MAX), 7, 10.3) and tenure.owner == AP


def test_without_an_answer_it_is_claimed_again_later():
    tenure = LeaseState(US)
    tenure.ask(1, EU, 10.0)
    tenure.unanswered(10.25)
    assert (tenure.asked, tenure.ask_at) == (None, 10.25)
    assert tenure.ours_until == -inf


@given(st.permutations(range(6)), st.integers(1, 6))
def test_in_any_order_of_arrival_the_last_write_counts(order, told):
    writes = [(lease(owner, term), seq) for seq, (owner, term) in enumerate(STORY, 1)]
    tenure = LeaseState(US)
    for index in [*order, *order[:told]]:
        tenure.seen(*writes[index], 10.0)
    assert (tenure.owner, tenure.term, tenure.seq) == (US, 6, 6)


STORY = ((US, 1), (US, 1), (EU, 3), (EU, 3), (US, 5), (US, 6))
