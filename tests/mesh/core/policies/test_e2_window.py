"""The window H: sums that are those of what is in it, whatever came and went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.request import Served
from mesh.core.policies.base import Speed
from mesh.core.policies.e2_tree import OUTPUT_TOKENS, Assignment, LoadAccount, LoadWindow, RadixNode

ROOT = RadixNode(0, (), None)


def account():
    one = LoadAccount(100)
    one.speed = Speed(1e-3, 0.05, 0.02)
    return one


def give(window, to, missed_tokens, at):
    assignment = Assignment(to, ROOT, None, missed_tokens, at)
    window.add(assignment)
    return assignment


def test_load_is_prefill_of_what_was_missed_and_decoding_of_the_average_answer():
    """L = sum of PREFILLTIME(missed) and DECODETIME(average length in H): Algorithm 2."""
    window, x = LoadWindow(180.0), account()
    first = give(window, x, 100, 0.0)
    give(window, x, 300, 1.0)
    assert x.load_s == pytest.approx(0.15 + 0.35 + 2 * OUTPUT_TOKENS * 0.02)
    window.answered(first, Served(output_tokens=10))
    assert x.load_s == pytest.approx(0.15 + 0.35 + 2 * 10 * 0.02)


def test_the_engines_report_replaces_the_estimate():
    window, x = LoadWindow(180.0), account()
    window.answered(give(window, x, 100, 0.0), Served(1000, 600, 10))
    assert x.prefill_s == pytest.approx(0.05 + 0.4)


def test_what_is_older_than_the_window_is_no_load():
    window, x = LoadWindow(10.0), account()
    early, late = give(window, x, 100, 0.0), give(window, x, 200, 5.0)
    assert window.expire(10.0) == [early]
    assert x.prefill_s == pytest.approx(0.05 + 0.2)
    window.answered(early, Served(output_tokens=1_000_000))  # too late to count
    assert x.answers == 0
    assert window.expire(15.0) == [late]
    assert (x.load_s, len(window)) == (0.0, 0)


def test_too_many_leave_early():
    window, x = LoadWindow(180.0, assignments_max=3), account()
    for at in range(5):
        give(window, x, 10, float(at))
        window.expire(float(at))
    assert (len(window), x.requests, x.given) == (3, 3, 5)


STEPS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(0, 500), st.integers(0, 3), st.integers(0, 99))
)


@given(STEPS)
def test_the_sums_are_those_of_what_counts(steps):
    window, accounts, all_of_them, now = LoadWindow(5.0), (account(), account()), [], 0.0
    for wait_s, tokens, act, pick in steps:
        now += wait_s
        window.expire(now)
        if act < 2:
            all_of_them.append(give(window, accounts[act], tokens, now))
        elif all_of_them and act == 2:
            window.take_back(all_of_them[pick % len(all_of_them)])
        elif all_of_them:
            window.answered(all_of_them[pick % len(all_of_them)], Served(600, tokens, pick))
        for one in accounts:
            counted = [a for a in all_of_them if a.account is one and a.counted]
            lengths = [a.output_tokens for a in counted if a.output_tokens is not None]
            assert all(a.at > now - 5.0 for a in counted)
            assert (one.requests, one.answers) == (len(counted), len(lengths))
            assert one.missed_tokens == sum(a.missed_tokens for a in counted)
            assert one.output_tokens == sum(lengths)
            assert one.load_s == pytest.approx(one.prefill_s + one.decode_s)


def test_a_prompt_alone_is_no_load_of_decoding():
    window, x = LoadWindow(180.0), account()
    alone = Assignment(x, ROOT, None, 100, 0.0, generates=False)
    window.add(alone)
    assert x.load_s == pytest.approx(0.15)
    window.answered(alone, Served(100, 0, 0))
    first = give(window, x, 300, 1.0)
    window.answered(first, Served(output_tokens=10))
    assert x.load_s == pytest.approx(0.15 + 0.35 + 10 * 0.02)
    window.take_back(alone)
    window.take_back(first)
    assert (x.load_s, x.generating, x.answers) == (0.0, 0, 0)
