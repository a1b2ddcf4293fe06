"""Operators' orders at a router: what it reads, and what it says of them."""

import logging
from types import SimpleNamespace

import pytest

from mesh.adapters.access_log import VALUE_CHARS_MAX
from mesh.runtime.control_plane import NAMED_MAX, OperatorOrders
from schemas.control import RegionControl, encode_control
from schemas.exchange import ALL_REPLICAS
from schemas.subjects import STREAM_CONTROL, control, controlled


@pytest.fixture
def orders():
    return OperatorOrders("us", lambda: None, lambda seq, orders: None)


def record(**fields) -> bytes:
    return encode_control(RegionControl(region="us", **fields))


def test_the_last_record_holds_until_another_one_can_be_read(orders, caplog):
    orders.read(3, record(drained=("us-0",)))
    orders.read(4, b"{")
    assert (orders.seq, orders.drained) == (3, ("us-0",))
    assert "orders 4 can't be read" in caplog.text
    orders.read(5, record(all_drained=True))
    assert (orders.seq, orders.drained) == (5, (ALL_REPLICAS,))


def test_a_stream_that_has_lost_its_records_undoes_no_order(orders, caplog):
    orders.read(5, record(drained=("us-0",), at_unix_s=50.0))
    for seq, data in ((0, b""), (2, record(at_unix_s=20.0)), (0, b"")):  # emptied, and an old copy
        orders.read(seq, data)
        assert (orders.seq, orders.drained, orders.is_lost) == (5, ("us-0",), True)
    [line] = [line for line in caplog.records if "the store of orders was lost" in line.msg]
    assert line.levelno == logging.ERROR
    orders.read(5, record(drained=("us-0",), at_unix_s=50.0))
    assert not orders.is_lost, "a backup was restored"
    orders.read(1, record(drained=("us-1",), at_unix_s=60.0))
    assert (orders.seq, orders.drained, orders.is_lost) == (1, ("us-1",), False)


def test_an_order_of_a_stream_that_was_made_anew_is_followed_though_its_number_is_the_same():
    followed = []
    orders = OperatorOrders("us", lambda: None, lambda seq, orders: followed.append(orders.drained))
    orders.read(1, record(drained=("us-0",)))
    orders.read(1, record(drained=("us-0",)))
    orders.read(1, record(drained=("us-1",)))
    assert (orders.seq, orders.drained) == (1, ("us-1",))
    assert followed == [("us-0",), ("us-1",)], "the same record is followed once"


def test_what_the_stream_takes_now_is_an_order_whatever_its_clock_shows(orders):
    orders.read(5, record(drained=("us-0",), at_unix_s=50.0))
    orders.receive(sent(1, record(drained=("us-1",), at_unix_s=20.0)))
    assert (orders.seq, orders.drained, orders.is_lost) == (1, ("us-1",), False)


def test_an_operator_s_words_are_one_short_line_of_the_log(orders, caplog):
    caplog.set_level(logging.WARNING)
    names = tuple(f"us-{number}" for number in range(NAMED_MAX + 3))
    orders.read(1, record(drained=names, by="a@b", reason="fan\nerror: forged" + "x" * 400))
    [line] = caplog.messages
    assert line.isprintable()
    assert "us-15 and 3 more" in line and "fan\\nerror: forged" in line
    assert len(line) < VALUE_CHARS_MAX + 16 * NAMED_MAX


def sent(seq: int, data: bytes):
    """A record as the stream republishes it."""
    place = {"Nats-Stream": STREAM_CONTROL, "Nats-Subject": control("us")}
    headers = {**place, "Nats-Sequence": str(seq)}
    return SimpleNamespace(subject=controlled("us"), headers=headers, data=data)


def test_a_late_answer_does_not_undo_what_the_stream_sent_meanwhile(orders):
    take = orders.reading()
    orders.receive(sent(4, record(drained=("us-1",))))
    take(3, record(drained=("us-0",)))
    assert (orders.seq, orders.drained) == (4, ("us-1",))
    orders.reading()(2, record())
    assert (orders.seq, orders.drained) == (2, ()), "a stream that was made anew since"
