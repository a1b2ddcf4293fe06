import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.decision import (
    HEADER_BYTES_MAX,
    Candidate,
    CandidateKind,
    Decision,
    Placement,
    decode_decision,
    encode_decision,
    header_value,
    rounded,
    without_matches,
)
from schemas.wire import WireError
from tests.schemas.strategies import DECISIONS


def decision(candidates=0, reason="the shortest expected TTFT"):
    return Decision(
        request="r",
        region="us",
        policy="prefix-tree",
        placement=Placement.LOCAL,
        replica="us-0",
        reason=reason,
        considered=candidates,
        candidates=tuple(
            Candidate(name=f"us-{n}", kind=CandidateKind.REPLICA, available=True, seconds=0.1 * n)
            for n in range(candidates)
        ),
    )


@given(DECISIONS)
def test_a_decision_comes_back_from_its_json_to_the_microsecond(made):
    assert decode_decision(encode_decision(made)) == rounded(made)


@given(DECISIONS)
def test_rounding_moves_seconds_by_half_a_microsecond_at_most_and_once(made):
    written = rounded(made)
    assert rounded(written) == written
    assert written.held_s == pytest.approx(made.held_s, abs=5.1e-7, rel=1e-15)
    for one, was in zip(written.candidates, made.candidates, strict=True):
        assert replace(one, seconds=was.seconds, terms=was.terms) == was
        pairs = [
            (one.seconds, was.seconds),
            *zip(one.terms.values(), was.terms.values(), strict=True),
        ]
        for value, exact in pairs:
            assert value == exact or value == pytest.approx(exact, abs=5.1e-7, rel=1e-15)


def test_a_receipt_has_no_digits_beyond_microseconds():
    priced = Candidate(
        name="us-0",
        kind=CandidateKind.REPLICA,
        available=True,
        seconds=0.1 + 0.2,
        terms={"queue_s": 1 / 3, "rtt_s": None},
    )
    made = replace(decision(), candidates=(priced,), held_s=2 / 3)
    for text in (encode_decision(made).decode(), header_value(made)):
        read = json.loads(text)
        assert read["held_s"] == 0.666667
        assert read["candidates"][0]["seconds"] == 0.3
        assert read["candidates"][0]["terms"] == {"queue_s": 0.333333, "rtt_s": None}


@given(st.binary(max_size=100))
def test_any_bytes_are_a_wire_error(data):
    with pytest.raises(WireError):
        decode_decision(data)


@given(DECISIONS)
def test_a_header_value_is_one_line_of_ascii(made):
    text = header_value(made, bytes_max=10**6)
    assert text.isascii() and text.isprintable()
    assert decode_decision(text.encode()) == rounded(made)


def test_a_header_value_leaves_out_the_last_candidates_until_it_fits():
    made = decision(candidates=1000)
    text = header_value(made)
    read = decode_decision(text.encode())
    assert len(text) <= HEADER_BYTES_MAX
    assert 0 < len(read.candidates) < 1000
    assert read.candidates == rounded(made).candidates[: len(read.candidates)]
    assert read.considered == 1000


def test_a_header_value_that_cannot_fit_is_an_error():
    with pytest.raises(WireError, match="does not fit 100"):
        header_value(decision(reason="x" * 200), bytes_max=100)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_term_that_is_no_number_reads_as_unknown(number):
    candidate = Candidate(
        name="a", kind=CandidateKind.PEER, available=True, terms={"rtt_s": number}
    )
    made = Decision(
        request="r",
        region="us",
        policy="p",
        placement=Placement.PEER,
        reason="",
        candidates=(candidate,),
    )
    assert json.loads(header_value(made))["candidates"][0]["terms"] == {"rtt_s": None}
    assert decode_decision(encode_decision(made)).candidates[0].terms == {"rtt_s": None}


def test_a_receipt_without_matches_reveals_nothing_of_prompts():
    terms = {"rtt_s": 0.0, "prefill_s": 0.1}
    here = Candidate(
        name="us-1", kind=CandidateKind.REPLICA, available=True, seconds=0.1, terms=terms,
        matched_tokens=20, pending=3,
    )  # fmt: skip
    there = replace(here, name="us-0", seconds=0.9, matched_tokens=0)
    decision = Decision(
        request="r", region="us", policy="mesh", placement=Placement.LOCAL, replica="us-1",
        reason="first token in 0.1 s", candidates=(here, there), considered=2,
    )  # fmt: skip
    shown = without_matches(decision)
    assert [one.name for one in shown.candidates] == ["us-0", "us-1"], "not in order of price"
    for one in shown.candidates:
        assert (one.matched_tokens, one.seconds, one.terms, one.pending) == (None, None, {}, 3)
    assert (shown.replica, shown.considered) == ("us-1", 2)
    assert "0.1" not in shown.reason
    assert decode_decision(encode_decision(shown)) == shown
