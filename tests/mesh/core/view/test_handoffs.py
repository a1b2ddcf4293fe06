"""What is on its way to one replica: counted once, given back once."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.view.replica import UnseenHandoffs


def test_work_takes_room_until_a_heartbeat_counts_it():
    sent = UnseenHandoffs()
    for number, tokens in ((1, 10), (2, 20), (5, 50)):
        sent.add(number, tokens, tokens, now=0.0)
    assert (len(sent), sent.waiting, sent.tokens) == (3, 3, 80)
    sent.confirm(2)
    assert (len(sent), sent.waiting, sent.tokens) == (1, 1, 50)
    sent.confirm(2)
    assert len(sent) == 1


def test_what_began_waits_no_longer_but_takes_room():
    sent = UnseenHandoffs()
    sent.add(1, 10, 5, now=0.0)
    sent.began(1)
    sent.began(1)
    assert (len(sent), sent.waiting, sent.tokens) == (1, 0, 10)
    sent.over(1)
    assert (len(sent), sent.waiting, sent.tokens) == (0, 0, 0)


def test_numbers_that_are_not_there_change_nothing():
    sent = UnseenHandoffs()
    sent.add(7, 10, 5, now=0.0)
    sent.over(6)
    sent.began(8)
    assert (len(sent), sent.waiting, sent.tokens) == (1, 1, 10)


def test_the_unconfirmed_expire_by_their_own_age():
    sent = UnseenHandoffs()
    sent.add(1, 10, 5, now=0.0)
    sent.add(2, 20, 7, now=1.0)
    sent.expire(sent_before=1.0)
    assert (len(sent), sent.tokens) == (1, 20)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "began", "over", "confirm", "expire"]), st.integers(0, 12)),
    max_size=40,
)


@given(STEPS)
def test_counts_are_those_of_a_plain_list(steps):
    sent, plain, now = UnseenHandoffs(), {}, 0.0
    for verb, number in steps:
        now += 1.0
        if verb == "add":
            fresh = max(plain, default=12) + 1 + number
            sent.add(fresh, number, number // 2, now)
            plain[fresh] = [now, number, True]
        elif verb == "began":
            sent.began(number + 12)
            if number + 12 in plain:
                plain[number + 12][2] = False
        elif verb == "over":
            sent.over(number + 12)
            plain.pop(number + 12, None)
        elif verb == "confirm":
            sent.confirm(number + 12)
            plain = {n: row for n, row in plain.items() if n > number + 12}
        else:
            sent.expire(now - number)
            plain = {n: row for n, row in plain.items() if row[0] >= now - number}
        expected = len(plain), sum(r[2] for r in plain.values()), sum(r[1] for r in plain.values())
        assert (len(sent), sent.waiting, sent.tokens) == expected
