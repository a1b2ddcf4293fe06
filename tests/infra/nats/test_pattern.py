"""Patterns against the definition: a pattern is the set of subjects it matches."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infra.nats.permissions import covers, widest
from tests.support.link_speech import overlaps

TOKENS = ("a", "b")
DEPTH = 4
# Every subject of up to DEPTH + 1 tokens. Two letters and one token more than any pattern has are
# enough to tell two patterns apart: a third letter, standing for "another", is the one below.
SUBJECTS = [
    subject
    for depth in range(1, DEPTH + 2)
    for subject in itertools.product((*TOKENS, "other"), repeat=depth)
]

patterns = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]),
    st.lists(st.sampled_from([*TOKENS, "*"]), min_size=0, max_size=DEPTH - 1),
    st.sampled_from([("a",), ("*",), (">",)]),
)


def matched(pattern: str) -> set[tuple[str, ...]]:
    *tokens, last = pattern.split(".")
    if last != ">":
        tokens = [*tokens, last]
    return {
        subject
        for subject in SUBJECTS
        if (len(subject) > len(tokens) if last == ">" else len(subject) == len(tokens))
        and all(token in ("*", word) for token, word in zip(tokens, subject, strict=False))
    }


@given(patterns, patterns)
def test_covers_is_inclusion(wide, narrow):
    assert covers(wide, narrow) == (matched(wide) >= matched(narrow))


@given(patterns, patterns)
def test_overlaps_is_a_shared_subject(a, b):
    assert overlaps(a, b) == bool(matched(a) & matched(b))


@given(st.lists(patterns, max_size=6))
def test_widest_matches_the_same_without_repetition(some):
    kept = widest(some)
    assert set().union(*map(matched, kept)) == set().union(*map(matched, some))
    assert not any(a != b and covers(a, b) for a in kept for b in kept)
