"""How many wrong keys an address may try, on a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.http import wrong_keys
from mesh.http.wrong_keys import TRIES, WrongKeys


def looked_at(wrong: WrongKeys, address: str, now: float) -> bool:
    """A wrong key of that address: whether it is looked at."""
    if wrong.is_over(address, now):
        return False
    wrong.count(address, now)
    return True


def test_tries_are_used_up_and_regained():
    wrong = WrongKeys()
    assert [looked_at(wrong, "192.0.2.1", 10.0) for _ in range(int(TRIES))] == [True] * int(TRIES)
    assert not looked_at(wrong, "192.0.2.1", 10.0)
    assert not looked_at(wrong, "192.0.2.1", 10.5), "those that are not looked at cost nothing"
    assert looked_at(wrong, "192.0.2.2", 10.5), "another address has its own"
    assert looked_at(wrong, "192.0.2.1", 11.0)
    assert not looked_at(wrong, "192.0.2.1", 11.0)
    assert [looked_at(wrong, "192.0.2.1", 1e6) for _ in range(int(TRIES))] == [True] * int(TRIES)


@pytest.mark.parametrize(("one", "other", "is_same"), [
    ("2001:db8::1", "2001:db8::ffff:1", True),
    ("2001:db8::1", "2001:db8:0:1::1", False),
    ("fe80::1%eth0", "fe80::2%eth0", True),
    ("not:an:address", "not:another", False),
])  # fmt: skip
def test_a_host_of_ipv6_has_one_count_for_all_its_addresses(one, other, is_same):
    wrong = WrongKeys()
    for _ in range(int(TRIES)):
        wrong.count(one, 0.0)
    assert wrong.is_over(other, 0.0) is is_same


def test_addresses_are_bounded_and_the_one_seen_last_is_kept(monkeypatch):
    monkeypatch.setattr(wrong_keys, "ADDRESSES_MAX", 3)
    wrong = WrongKeys()
    for number in range(100):
        wrong.count("192.0.2.1", 0.0)
        wrong.count(f"198.51.100.{number}", 0.0)
    assert len(wrong) == 3 and wrong.is_over("192.0.2.1", 0.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 100.0)), max_size=300))
def test_no_address_has_more_looked_at_than_its_tries_and_what_it_regains(asked):
    wrong, looked, now = WrongKeys(), {"a": 0, "b": 0}, 0.0
    for address, after_s in asked:
        now += after_s / 50
        looked[address] += looked_at(wrong, address, now)
        assert looked[address] <= TRIES + now * wrong_keys.TRIES_PER_S + 1e-6
