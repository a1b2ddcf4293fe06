"""Whatever way frames take to a client, it gets what the engine said: in order, once, all of it."""

from random import Random

import pytest

from mesh.core.model import events as ev
from mesh.http.answer_writer import BEHIND_BYTES, AnswerWriter
from mesh.session.answer import (
    CREDIT_BYTES,
    EVENT_BYTES_MAX,
    PLAIN_BYTES_MAX,
    FramesMissing,
)
from mesh.session.client_request import ClientRequest
from schemas.exchange import FRAME_HEADER, End, Frame, Outcome, pack_frame, unpack_frame
from schemas.wire import encode
from tests.mesh.adapters.build import EVENTS, JSON, Feeder, client_request

DONE = b"data: [DONE]\n\n"
PIECES = (
    *[b"data: 1\n\n"] * 4, b"data: 2\r\n\r\n", b"data: 3", b"\n", b"\n\n", b"", b"data: 4\n\ndata:",
    DONE, b"x" * 70_000 + b"\n\n",
)  # fmt: skip


class Socket:
    """A connection, its transport and the front door, in one; it is behind when the dice say so."""

    def __init__(self) -> None:
        self.transport = self
        self.is_paused = False
        self.unsent_bytes = 0
        self.closing = False
        self.sent: list[bytes] = []
        self.due_at: list[float] = []
        self.is_over = False

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """What it holds is what the test says."""

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def wake_by(self, due_at: float) -> None:
        self.due_at.append(due_at)

    def over(self) -> None:
        self.is_over = True

    def started(self, held: ClientRequest) -> None:
        """Only its bytes matter."""

    finished = leave = started


class Client:
    """One answer on its way to a client: frames in, bytes out, and a socket that is slow."""

    def __init__(self, dice: Random, kind: str) -> None:
        self.client_request = client_request(deadline=1.0)
        self.answer = Feeder(self.client_request, kind).answer
        self.socket = Socket()
        self.socket.passed = self._passed
        self.straight = 0  # frames that went past the answer's buffer
        self.credits = [0, 0]  # how often it was asked whether one is due, and how often it was
        self._dice = dice
        over = self.socket.over
        self.writer = AnswerWriter(self.socket, self.socket, {}, over, keep_alive=False, minor=0)
        self.client_request.changed = self.writer.changed
        self.writer.begin(self.client_request)

    @property
    def sent(self) -> bytes:
        """The body that was written."""
        return b"".join(self.socket.sent).partition(b"\r\n\r\n")[2]

    def _passed(self, held: ClientRequest) -> None:
        self.credits[0] += 1
        self.credits[1] += self.answer.credit_due() is not None

    def pause(self) -> None:
        """The client stops reading for a while."""
        self.socket.unsent_bytes = 2 * BEHIND_BYTES
        self.socket.is_paused = True
        self.writer.paused()

    def resume(self) -> None:
        """It has read what was sent."""
        self.socket.unsent_bytes = 0
        self.socket.is_paused = False
        self.writer.resumed()

    def hear(self, parcel: list[bytes], now: float) -> int | None:
        """As it is heard off the bus; the frame that is missed, if one is."""
        missed, fed = None, False
        for frame in parcel:
            if self.answer.end is not None:
                break
            writer = self.client_request.direct_writer
            if writer is not None and writer.pass_on(frame):
                self.straight += 1
                continue
            fed = True
            event = self.answer.feed(unpack_frame(frame), now)
            assert not isinstance(event, ev.AttemptFailed)
            if isinstance(event, FramesMissing):
                missed = event.number
        if fed:
            self.client_request.changed()
        return missed


FIRST = b"data: 0\n\n"


def begun(now: float = 0.0) -> Client:
    """A stream whose first event was sent."""
    client = Client(Random(1), EVENTS)
    client.hear([pack_frame(Frame.DATA, 1, FIRST)], now)
    assert client.sent == FIRST
    return client


def frames_of(pieces: list[bytes], dice: Random) -> list[bytes]:
    """From the first behind the head to the end."""
    frames: list[tuple[Frame, bytes]] = []
    for piece in pieces:
        if dice.random() < 0.05:
            frames.append((Frame.WORKING, b""))
        frames.append((Frame.DATA, piece))
    frames.append((Frame.END, encode(End(Outcome.DONE, "", 9, 4, 2, 0.1))))
    return [pack_frame(kind, number, data) for number, (kind, data) in enumerate(frames, 1)]


@pytest.mark.parametrize("kind", [EVENTS, JSON])
@pytest.mark.parametrize("seed", range(60))
async def test_a_client_gets_what_the_engine_said(seed, kind):
    dice = Random(seed)
    client = Client(dice, kind)
    first = [b"x" * PLAIN_BYTES_MAX] if kind is JSON else []  # or it would wait for its end
    pieces = first + [dice.choice(PIECES) for _ in range(dice.randrange(2, 80))] + [b"\n\n", DONE]
    frames, at, now = frames_of(pieces, dice), 0, 0.0
    while client.answer.end is None:
        if client.socket.is_paused:
            if dice.random() < 0.3:
                client.resume()
        elif client.sent and dice.random() < 0.1:
            client.pause()
        if dice.random() < 0.05:  # said again
            at = max(0, at - dice.randrange(5))
        if dice.random() < 0.05:  # lost
            at += dice.randrange(3)
        several = dice.randrange(1, 5)
        missed = client.hear(frames[at : at + several], now)
        at = at + several if missed is None else missed - 1
        if at >= len(frames):
            at = client.answer.next_number - 1
        now += dice.choice([0.0, 0.01, 0.6])
    if client.socket.is_paused:
        assert not client.socket.is_over
        client.resume()
    assert client.socket.is_over
    assert client.sent == b"".join(pieces)
    assert client.answer.taken_bytes == sum(map(len, pieces))
    assert client.answer.buffered_bytes == 0


@pytest.mark.parametrize(
    ("kind", "first"), [(EVENTS, b"data: 0\n\n"), (JSON, b"x" * PLAIN_BYTES_MAX)]
)
def test_the_direct_way_is_the_usual_one(kind, first):
    client = Client(Random(1), kind)
    for frame in frames_of([first] + [b"data: {1}\n\n"] * 100 + [DONE], Random(2)):
        client.hear([frame], 0.0)
    assert client.straight > 90


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Frame.DATA, 3, b"data: {1}\n\n"),
        pack_frame(Frame.DATA, 1, b"data: {1}\n\n"),
        pack_frame(Frame.DATA, 2, b"data: {1}\n"),
        pack_frame(Frame.DATA, 2, DONE),
        pack_frame(Frame.DATA, 2, b""),
        pack_frame(Frame.WORKING, 2, b"\n\n"),
        pack_frame(Frame.END, 2, b"\n\n"),
        FRAME_HEADER.pack(ord("?"), 2) + b"\n\n",
        b"\n\n",
        b"",
    ],
)
def test_only_the_next_event_of_a_stream_goes_straight_through(frame):
    client = begun()
    assert not client.writer.pass_on(frame)
    assert (client.sent, client.answer.next_number) == (FIRST, 2)
    assert client.writer.pass_on(pack_frame(Frame.DATA, 2, b"data: {2}\n\n"))
    assert client.sent == FIRST + b"data: {2}\n\n"


def test_what_is_passed_on_is_seen_at_the_next_look():
    """By which the core knows that the stream flows."""
    client = begun()
    client.answer.looked_at()
    assert client.answer.looked_at() is None
    assert client.writer.pass_on(pack_frame(Frame.DATA, 2, b"data: {1}\n\n"))
    assert client.answer.looked_at() == ev.AttemptProgressed(1, 1)
    assert client.answer.looked_at() is None


def test_a_client_that_is_gone_is_passed_nothing():
    client = begun()
    client.socket.closing = True
    assert not client.writer.pass_on(pack_frame(Frame.DATA, 2, b"data: {1}\n\n"))
    assert (client.sent, client.answer.next_number) == (FIRST, 2)


def test_credit_is_asked_for_when_it_is_due_and_only_then():
    client = begun()
    client.answer.credit_due()
    client.credits = [0, 0]
    event = b"data: {" + b"x" * (CREDIT_BYTES // 8 - 10) + b"}\n\n"
    for number in range(2, 42):
        assert client.writer.pass_on(pack_frame(Frame.DATA, number, event))
    assert client.credits == [5, 5]


def test_the_end_of_an_event_too_long_to_hold_is_one():
    """Also where a frame's number looks like a line's end: the header is no part of an event."""
    client = begun()
    for number in range(2, 9):
        client.answer.feed(unpack_frame(pack_frame(Frame.WORKING, number, b"")), 0.0)
    client.answer.feed(unpack_frame(pack_frame(Frame.DATA, 9, b"x" * EVENT_BYTES_MAX + b"x")), 0.0)
    client.client_request.changed()
    assert not client.answer.is_between_events
    assert ord("\n") == 10
    assert not client.writer.pass_on(pack_frame(Frame.DATA, 10, b"\n"))
    assert client.answer.next_number == 10
    assert client.writer.pass_on(pack_frame(Frame.DATA, 10, b"}\n\n"))
    assert client.answer.is_between_events


def test_nothing_overtakes_what_waits():
    client = begun()
    client.hear([pack_frame(Frame.DATA, 2, b"data: {1}")], 0.0)
    assert not client.writer.pass_on(pack_frame(Frame.DATA, 3, b"\n\n"))
    client.hear([pack_frame(Frame.DATA, 3, b"\n\n")], 0.1)
    assert client.sent == FIRST + b"data: {1}\n\n"


def test_what_comes_while_the_client_is_behind_goes_out_in_one_piece():
    client = begun()
    client.pause()
    assert client.client_request.direct_writer is None
    for number in range(2, 6):
        client.hear([pack_frame(Frame.DATA, number, b"data: {1}\n\n")], 0.1)
    assert client.sent == FIRST
    writes = len(client.socket.sent)
    client.resume()
    assert client.sent == FIRST + b"data: {1}\n\n" * 4
    assert len(client.socket.sent) == writes + 1
    assert client.client_request.direct_writer is client.writer


def test_a_broken_stream_takes_no_more_frames() -> None:
    """Those of the attempt that goes on with it are numbered from 0 as well."""
    client = begun()
    assert client.client_request.direct_writer is client.writer
    client.answer.is_wanted = False
    client.client_request.changed()
    assert client.client_request.direct_writer is None
