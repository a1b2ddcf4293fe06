"""The record of operators' orders."""

import pytest

from schemas.control import (
    DRAINED_MAX,
    TEXT_MAX,
    RegionControl,
    decode_control,
    encode_control,
    nothing_ordered,
)
from schemas.exchange import ALL_REPLICAS, Alive
from schemas.wire import WireError, decode, encode


def test_a_record_comes_back_as_it_was_and_unknown_fields_are_passed_over():
    orders = RegionControl(
        region="us", drained=("us-0", "us-1"), command="drain", by="ann@host", at_unix_s=1.5
    )
    assert decode_control(encode_control(orders)) == orders
    assert decode_control(b'{"region":"us","later":1}') == nothing_ordered("us")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"region":"u s"}',
        b'{"region":"us","v":2}',
        b'{"region":"us","drained":["*"]}',
        b'{"region":"us","at_unix_s":NaN}',
        b'{"region":"us","reason":"' + b"x" * (TEXT_MAX + 1) + b'"}',
        b'{"region":"us","drained":[' + b'"a",' * DRAINED_MAX + b'"a"]}',
    ],
)
def test_anything_else_is_an_error(data):
    with pytest.raises(WireError):
        decode_control(data)


def test_one_replica_or_all_are_drained():
    one = RegionControl(region="us", drained=("us-0",))
    assert (one.drains("us-0"), one.drains("us-1")) == (True, False)
    assert RegionControl(region="us", all_drained=True).drains("us-1")


def test_a_keepalive_names_the_drained_and_an_older_one_names_none():
    keepalive = Alive(1, (), (), 7, ("us-0",))
    assert decode(encode(keepalive)) == keepalive
    assert (keepalive.drains("us-0"), keepalive.drains("us-1")) == (True, False)
    assert Alive(1, (), (), 8, (ALL_REPLICAS,)).drains("us-1")
    assert (Alive(1).control_seq, Alive(1).drains("us-0")) == (-1, False)
