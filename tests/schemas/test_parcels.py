"""Parcels: every frame comes out as it went in, in order; other bytes are an error."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.exchange import Frame, pack_frame
from schemas.parcels import (
    PARCEL,
    PARCEL_BYTES_MAX,
    PARCEL_FRAMES_MAX,
    STREAM_CHARS_MAX,
    is_parcelled,
    is_stream,
    pack_parcels,
    parcelled,
    unpack_parcel,
)
from schemas.wire import WireError

STREAMS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
FRAMES = st.builds(pack_frame, st.sampled_from(Frame), st.integers(0, 9), st.binary(max_size=300))
POSTS = st.lists(st.tuples(STREAMS, FRAMES), min_size=1, max_size=20)


def unpacked(parcel: bytes) -> list[tuple[str, bytes]]:
    return list(unpack_parcel(parcel))


@given(POSTS)
def test_frames_come_back_from_a_parcel(posts):
    [parcel] = pack_parcels(posts)
    assert unpacked(parcel) == posts


def test_many_bytes_are_several_parcels_in_order():
    frame = bytes(PARCEL_BYTES_MAX // 3)
    posts = [(f"{number}-1", frame) for number in range(5)]
    parcels = list(pack_parcels(posts))
    assert [post for parcel in parcels for post in unpacked(parcel)] == posts
    assert [len(unpacked(parcel)) for parcel in parcels] == [2, 2, 1]


def test_many_frames_are_several_parcels_in_order():
    posts = [(f"{number}-1", pack_frame(Frame.WORKING, 0)) for number in range(5000)]
    parcels = list(pack_parcels(posts))
    assert [post for parcel in parcels for post in unpacked(parcel)] == posts
    assert max(len(unpacked(parcel)) for parcel in parcels) == PARCEL_FRAMES_MAX


@pytest.mark.parametrize(
    "data",
    [
        bytes(PARCEL_BYTES_MAX + 1),
        bytes(1000),  # frames without a stream
        b"\x01\x00\x00\x00\x04aD\x00\x00\x00",  # without a whole head
        b"\x01\x00\x00\x00\x05aW\x00\x00\x00\x00" * (PARCEL_FRAMES_MAX + 1),
    ],
    ids=["too large", "no stream", "no head", "too many"],
)
def test_what_could_keep_a_router_busy_is_no_parcel(data):
    with pytest.raises(WireError):
        unpacked(data)


def test_a_frame_keeps_no_parcel_in_memory():
    [parcel] = pack_parcels([("a", pack_frame(Frame.DATA, 0, b"x")), ("b", bytes(1000))])
    assert isinstance(next(unpack_parcel(parcel))[1], bytes)


def test_routers_that_read_parcels_say_so():
    assert is_parcelled(parcelled("7-1")) and is_stream(parcelled("7-1"))
    assert not is_parcelled("7-1-abc")


@given(st.binary(max_size=64))
@example(b"\x01\x00\x00")
@example(b"\x01\x00\x00\x00\x09a")
@example(b"\xff\xff\xff\xff\xff")
def test_any_bytes_are_a_parcel_or_a_wire_error(data):
    try:
        found = unpacked(data)
    except WireError:
        return
    assert sum(5 + len(frame) for _, frame in found) <= len(data)


def test_frames_before_the_damage_are_received():
    [parcel] = pack_parcels([("a", b"W0000first"), ("b", b"W0000second")])
    frames = unpack_parcel(parcel[:-1])
    assert next(frames)[0] == "a"
    with pytest.raises(WireError, match="a frame up to"):
        next(frames)


def test_the_layout_of_a_parcel():
    """What is on the bus between versions: it must not change."""
    frame = pack_frame(Frame.DATA, 258, b"hi")
    [parcel] = pack_parcels([("7-1", frame)])
    assert parcel == b"\x03\x00\x00\x00\x077-1D\x00\x00\x01\x02hi"


@pytest.mark.parametrize("token", ["", "*", ">", PARCEL, "a" * (STREAM_CHARS_MAX + 1), "\u00e9"])
def test_tokens_that_are_no_stream(token):
    assert not is_stream(token)


def test_tokens_that_are_a_stream():
    assert is_stream("1a-1-0f") and is_stream("a" * STREAM_CHARS_MAX)
