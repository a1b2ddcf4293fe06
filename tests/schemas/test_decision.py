import json

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
def test_a_decision_comes_back_from_its_json(made):
    assert decode_decision(encode_decision(made)) == made


@given(st.binary(max_size=100))
def test_any_bytes_are_a_wire_error(data):
    with pytest.raises(WireError):
        decode_decision(data)


@given(DECISIONS)
def test_a_header_value_is_one_line_of_ascii(made):
    text = header_value(made, bytes_max=10**6)
    assert text.isascii() and text.isprintable()
    assert decode_decision(text.encode()) == made


def test_a_header_value_leaves_out_the_last_candidates_until_it_fits():
    made = decision(candidates=1000)
    text = header_value(made)
    read = decode_decision(text.encode())
    assert len(text) <= HEADER_BYTES_MAX
    assert 0 < len(read.candidates) < 1000
    assert read.candidates == made.candidates[: len(read.candidates)]
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
