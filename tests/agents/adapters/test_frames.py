"""Frames of one answer: numbered without gaps, and never silent for long."""

import pytest

from agents.adapters.outbox import FRAME_BYTES_MAX, FrameWriter
from schemas.exchange import WORKING_S, Frame, Placed, unpack_frame
from schemas.wire import decode_as, encode


class Sink:
    """Takes frames and turns a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.frames = []
        self.urgent = []
        self.writer = FrameWriter(self.post, lambda: self.now)

    def post(self, frame: bytes, urgent: bool) -> None:
        self.frames.append(unpack_frame(frame))
        self.urgent.append(urgent)

    def numbers(self) -> list[int]:
        return [frame.number for frame in self.frames]


def test_messages_and_bytes() -> None:
    sink = Sink()
    sink.writer.send(Frame.PLACED, encode(Placed("us", "g0")))
    sink.writer.data(b"abc")
    first, second = sink.frames
    assert decode_as(Placed, first.payload) == Placed("us", "g0")
    assert (second.kind, bytes(second.payload)) == (Frame.DATA, b"abc")


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 5 * FRAME_BYTES_MAX])
def test_very_many_bytes_become_several_frames(size) -> None:
    sink = Sink()
    data = bytes(size)
    sink.writer.data(data)
    assert b"".join(frame.payload for frame in sink.frames) == data
    assert max(len(frame.payload) for frame in sink.frames) <= FRAME_BYTES_MAX
    assert sink.numbers() == list(range(max(1, -(-size // FRAME_BYTES_MAX))))


def test_only_data_may_wait_for_company() -> None:
    sink = Sink()
    sink.writer.send(Frame.PLACED, encode(Placed("us", "g0")))
    sink.writer.data(b"a")
    sink.now = WORKING_S
    sink.writer.keep_alive()
    assert sink.urgent == [True, False, True]


def looked(sink: Sink, *, every_s: float, until_s: float) -> list[tuple[float, int]]:
    """Data flows: when WORKING was sent, and with which number."""
    found = []
    while sink.now < until_s:
        sink.now += every_s
        sink.writer.data(b"a")
        before = len(sink.frames)
        sink.writer.keep_alive()
        found += [(sink.now, frame.number) for frame in sink.frames[before:]]
    return found


def test_the_agent_is_named_while_data_flows_until_its_router_shows_that_it_knows_it() -> None:
    """Of a stream whose first frames were lost: its router could not cancel it."""
    sink = Sink()
    assert looked(sink, every_s=1.0, until_s=12.0) == [(WORKING_S, 5), (2 * WORKING_S, 11)]
    sink.writer.is_known = True
    assert looked(sink, every_s=1.0, until_s=30.0) == []
    assert sink.numbers() == list(range(len(sink.frames)))


def test_silence_is_broken_whoever_is_known() -> None:
    sink = Sink()
    sink.writer.is_known = True
    sink.writer.data(b"a")
    sink.writer.keep_alive()
    for sink.now in (WORKING_S - 0.1, WORKING_S, WORKING_S + 1.0, 2 * WORKING_S):
        sink.writer.keep_alive()
    kinds = [frame.kind for frame in sink.frames]
    assert kinds == [Frame.DATA, Frame.WORKING, Frame.WORKING]
