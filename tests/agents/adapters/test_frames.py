"""Frames of one answer: numbered without gaps, and never silent for long."""

import nats.errors
import pytest

from agents.adapters.frames import FRAME_BYTES_MAX, FrameWriter
from schemas.exchange import WORKING_S, Frame, Placed, unpack_frame
from schemas.wire import decode_as


class Sink:
    """Takes frames, or refuses them, and turns a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away = False
        self.frames = []
        self.writer = FrameWriter(self.publish, "inbox", lambda: self.now)

    async def publish(self, subject: str, payload: bytes) -> None:
        assert subject == "inbox"
        if self.away:
            raise nats.errors.OutboundBufferLimitError
        self.frames.append(unpack_frame(payload))

    def numbers(self) -> list[int]:
        return [frame.number for frame in self.frames]


async def test_messages_and_bytes() -> None:
    sink = Sink()
    await sink.writer.say(Frame.PLACED, Placed("us", "g0"))
    await sink.writer.data(b"abc")
    first, second = sink.frames
    assert decode_as(Placed, first.payload) == Placed("us", "g0")
    assert (second.kind, bytes(second.payload)) == (Frame.DATA, b"abc")


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 5 * FRAME_BYTES_MAX])
async def test_very_many_bytes_become_several_frames(size) -> None:
    sink = Sink()
    data = bytes(size)
    await sink.writer.data(data)
    assert b"".join(frame.payload for frame in sink.frames) == data
    assert max(len(frame.payload) for frame in sink.frames) <= FRAME_BYTES_MAX
    assert sink.numbers() == list(range(max(1, -(-size // FRAME_BYTES_MAX))))


async def test_a_frame_that_could_not_go_leaves_a_hole() -> None:
    sink = Sink()
    await sink.writer.data(b"a")
    sink.away = True
    await sink.writer.data(b"b")
    sink.away = False
    await sink.writer.data(b"c")
    assert sink.numbers() == [0, 2]


async def test_silence_is_broken_when_it_has_lasted() -> None:
    sink = Sink()
    sink.now = WORKING_S - 0.1
    await sink.writer.break_silence()
    assert sink.frames == []
    await sink.writer.data(b"a")
    sink.now = 2 * WORKING_S - 0.2
    await sink.writer.break_silence()
    assert sink.numbers() == [0]
    sink.now = 2 * WORKING_S
    await sink.writer.break_silence()
    await sink.writer.break_silence()
    assert [(frame.kind, frame.number) for frame in sink.frames[1:]] == [(Frame.WORKING, 1)]
