import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas import wire
from schemas.exchange import (
    BODY_BYTES_MAX,
    FRAME_HEADER,
    WINDOW_BYTES,
    End,
    Frame,
    FrameView,
    Outcome,
    Refusal,
    Refused,
    pack_frame,
    unpack_frame,
)
from schemas.wire import WireError

KINDS = st.sampled_from(Frame)
NUMBERS = st.integers(0, 2**32 - 1)


@given(KINDS, NUMBERS, st.binary())
def test_a_frame_comes_back_from_its_bytes(kind, number, payload):
    view = unpack_frame(pack_frame(kind, number, payload))
    assert (view.kind, view.number, view.payload) == (kind, number, payload)


@given(st.binary(max_size=64))
@example(b"")
@example(b"D\x00\x00\x00")
@example(b"?\x00\x00\x00\x00")
def test_any_bytes_are_a_frame_or_a_wire_error(data):
    try:
        view = unpack_frame(data)
    except WireError:
        return
    assert pack_frame(view.kind, view.number, view.payload) == data


def test_the_payload_keeps_no_message_alive():
    payload = unpack_frame(pack_frame(Frame.DATA, 0, b"x" * 1000)).payload
    assert (type(payload), payload) == (bytes, b"x" * 1000)


@pytest.mark.parametrize(
    ("data", "problem"), [(b"D\x00", r"D\\x00"), (b"?\x00\x00\x00\x00no", r"\?(\\x00){4}'$")]
)
def test_the_error_shows_what_is_wrong(data, problem):
    with pytest.raises(WireError, match=problem):
        unpack_frame(data)


def test_the_layout_of_a_frame():
    data = b"D\x00\x00\x01\x02hi"
    assert pack_frame(Frame.DATA, 258, b"hi") == data
    view = unpack_frame(data)  # made past its constructor
    assert (view.kind, view.number, view.payload) == (Frame.DATA, 258, b"hi")
    assert isinstance(view, FrameView)
    assert FRAME_HEADER.size == 5


@pytest.mark.parametrize("reason", list(Refusal))
def test_a_refusal_travels_as_its_word(reason):
    message = Refused(str(reason), "us", "us-0", 3, -1)
    assert Refusal(wire.decode_as(Refused, wire.encode(message)).reason) is reason


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_outcome_travels_as_its_word(outcome):
    message = End(str(outcome), "", 10, 5, 1, 0.25)
    assert Outcome(wire.decode_as(End, wire.encode(message)).outcome) is outcome


def test_the_limits_fit_together():
    assert WINDOW_BYTES < BODY_BYTES_MAX < 2**31
