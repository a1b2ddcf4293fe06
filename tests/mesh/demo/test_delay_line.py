from hypothesis import given
from hypothesis import strategies as st

from mesh.demo.wan_proxy import CHUNK_COST_BYTES, DelayLine, StreamEnd

SENDS = st.lists(
    st.tuples(st.floats(0.0, 0.2), st.one_of(st.binary(max_size=20), st.sampled_from(StreamEnd))),
    max_size=40,
)


def test_an_item_comes_out_after_the_delay_and_not_before():
    line = DelayLine(0.040)
    line.push(b"token", now=10.0)
    assert line.next_due == 10.040
    assert line.pop_due(10.039) == []
    assert line.pop_due(10.040) == [b"token"]
    assert line.next_due is None


def test_items_overlap_in_flight():
    line = DelayLine(0.100)
    for n in range(50):
        line.push(bytes([n]), now=n / 1000)
    assert line.pop_due(0.1495) == [bytes([n]) for n in range(50)]


def test_a_bandwidth_delays_what_is_sent_behind_much_and_nothing_later():
    line = DelayLine(0.040, bytes_per_s=1000.0)
    line.push(bytes(500), now=0.0)
    line.push(bytes(1), now=0.1)
    assert line.pop_due(0.5399) == []
    assert line.pop_due(0.5401) == [bytes(500)]
    assert line.pop_due(0.5411) == [bytes(1)]
    line.push(bytes(1), now=2.0)
    assert line.pop_due(2.0409) == []
    assert line.pop_due(2.0411) == [bytes(1)]


def test_what_is_held_is_counted_with_its_overhead():
    line = DelayLine(1.0)
    line.push(b"12345", now=0.0)
    line.push(StreamEnd.EOF, now=0.0)
    assert line.held_bytes == 2 * CHUNK_COST_BYTES + 5
    line.pop_due(1.0)
    assert line.held_bytes == 0


@given(sends=SENDS, rate=st.sampled_from([None, 100.0]))
def test_order_is_kept_and_nothing_is_lost(sends, rate):
    line = DelayLine(0.040, rate)
    now, entered = 0.0, []
    for gap_s, item in sends:
        now += gap_s
        line.push(item, now)
        entered.append((now, item))
    assert line.next_due is None or line.next_due >= entered[0][0] + 0.040
    assert line.pop_due(now + 10.0) == [item for _, item in entered]
    assert line.held_bytes == 0


@given(sends=SENDS, rate=st.sampled_from([None, 100.0]))
def test_no_item_is_early(sends, rate):
    line = DelayLine(0.040, rate)
    waiting, now = [], 0.0
    for gap_s, item in sends:
        now += gap_s
        for _ in line.pop_due(now):
            assert now >= waiting.pop(0) + 0.040
        line.push(item, now)
        waiting.append(now)
