from dataclasses import MISSING, fields

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas import wire
from schemas.exchange import Cancel, Credit, Sketch
from schemas.wire import WireError
from tests.schemas.strategies import JSON, wire_messages

TAGS = st.sampled_from(sorted(wire.registered()))


@given(wire_messages())
def test_a_message_comes_back_from_its_bytes(message):
    assert wire.decode(wire.encode(message)) == message
    assert wire.decode_as(type(message), memoryview(wire.encode(message))) == message


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 2000)  # arrays in arrays
@example(b"\xdd\xff\xff\xff\xff")  # an array of 4 billion items
@example(b"\xd6\xff\x00\x00\x00\x00")  # a timestamp
@example(b"\x93\x06\x01\xa1\xff")  # a string that is not UTF-8
def test_any_bytes_are_a_message_or_a_wire_error(data):
    try:
        message = wire.decode(data)
    except WireError:
        return
    assert type(message) in wire.registered().values()


@given(TAGS, JSON, st.lists(JSON, max_size=9))
def test_any_array_is_a_message_or_a_wire_error(tag, version, values):
    try:
        message = wire.decode(msgpack.packb([tag, version, *values]))
    except WireError:
        return
    assert (tag, version) == (message.TAG, message.VERSION) and type(version) is int


@given(wire_messages(), st.data())
def test_a_changed_byte_never_crashes(message, data):
    raw = bytearray(wire.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(raw))
    except WireError:
        return


@given(wire_messages(), st.lists(JSON, min_size=1, max_size=3))
def test_extra_fields_at_the_end_are_ignored(message, extra):
    array = msgpack.unpackb(wire.encode(message), use_list=True)
    assert wire.decode(msgpack.packb(array + extra)) == message


@given(wire_messages())
def test_a_missing_field_is_an_error(message):
    array = msgpack.unpackb(wire.encode(message), use_list=True)
    required = sum(field.default is MISSING for field in fields(message))
    with pytest.raises(WireError, match="needs"):
        wire.decode(msgpack.packb(array[: 1 + required]))


def test_a_field_with_a_default_may_be_missing(monkeypatch):
    for table in ("_CLASSES", "_FIELD_TYPES", "_ITEMS", "_REQUIRED", "_TUPLES"):
        monkeypatch.setattr(wire, table, {})

    @wire.wire_message(tag=1)
    class Grown(wire.WireMessage):
        old: int
        new: int = 7

    assert wire.decode(msgpack.packb([1, 1, 3])) == Grown(3, 7)
    assert wire.decode(wire.encode(Grown(3, 4))) == Grown(3, 4)


@given(wire_messages(), st.integers() | st.booleans() | st.floats() | st.none())
def test_another_version_is_an_error(message, version):
    array = msgpack.unpackb(wire.encode(message), use_list=True)
    if type(version) is int and (version == message.VERSION or not -(2**63) <= version < 2**64):
        return
    with pytest.raises(WireError, match=r"version .*, this side has"):
        wire.decode(msgpack.packb([array[0], version, *array[2:]]))


@pytest.mark.parametrize(
    "array", [[99, 1, "x"], [True, 1, "x"], ["6", 1, "x"], [None, 1], [6.0, 1, "x"]]
)
def test_an_unknown_tag_is_an_error(array):
    with pytest.raises(WireError, match="unknown message tag"):
        wire.decode(msgpack.packb(array))


@pytest.mark.parametrize(
    ("array", "field"),
    [
        ([Cancel.TAG, 1, 5], "Cancel.inbox"),
        ([Cancel.TAG, 1, b"_INBOX"], "Cancel.inbox"),
        ([Credit.TAG, 1, "x", True], "Credit.consumed_bytes"),
        ([Credit.TAG, 1, "x", 1.0], "Credit.consumed_bytes"),
        ([Sketch.TAG, 1, 5, [1, "2"]], "Sketch.block_hashes"),
    ],
)
def test_a_field_of_another_type_is_an_error_that_names_it(array, field):
    with pytest.raises(WireError, match=field):
        wire.decode(msgpack.packb(array))


def test_a_message_over_the_limit_is_not_even_unpacked():
    with pytest.raises(WireError, match="at most"):
        wire.decode(b"\xc1" * (wire.MESSAGE_BYTES_MAX + 1))


def test_the_wrong_message_is_an_error_that_names_both():
    with pytest.raises(WireError, match="expected Credit, got Cancel"):
        wire.decode_as(Credit, wire.encode(Cancel("x")))


def test_a_tag_belongs_to_one_class():
    with pytest.raises(AssertionError, match="taken"):
        wire.wire_message(tag=Cancel.TAG)(type("Second", (wire.WireMessage,), {}))
