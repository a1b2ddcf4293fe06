"""Whatever way frames take to a client, it gets what the engine said: in order, once, all of it."""

import asyncio
from random import Random

import pytest

from mesh.adapters.answer import (
    CREDIT_BYTES,
    EVENT_BYTES_MAX,
    PLAIN_BYTES_MAX,
    PROGRESS_S,
    FramesMissing,
)
from mesh.adapters.outlet import BEHIND_BYTES, Outlet
from mesh.core import events as ev
from schemas.exchange import FRAME_HEADER, End, Frame, Outcome, pack_frame, unpack_frame
from schemas.wire import encode
from tests.mesh.adapters.build import EVENTS, JSON, Feeder, ticket

DONE = b"data: [DONE]\n\n"
PIECES = (
    *[b"data: 1\n\n"] * 4, b"data: 2\r\n\r\n", b"data: 3", b"\n", b"\n\n", b"", b"data: 4\n\ndata:",
    DONE, b"x" * 70_000 + b"\n\n",
)  # fmt: skip


class Socket:
    """A transport that is behind when the dice say so."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.closing = False
        self.sent: list[bytes] = []

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.sent.append(data)


class Client:
    """One answer on its way to a client: frames in, bytes out, and a handler that is slow."""

    def __init__(self, dice: Random, kind: str) -> None:
        self.ticket = ticket()
        self.answer = Feeder(self.ticket, kind).answer
        self.socket = Socket()
        self.straight = 0  # frames that went the short way
        self.credits = [0, 0]  # how often it was asked whether one is due, and how often it was
        self._dice = dice
        self._outlet = Outlet(self.socket, self.answer, self._passed, chunked=False)

    def _passed(self) -> None:
        self.credits[0] += 1
        self.credits[1] += self.answer.credit_due() is not None

    async def handle(self) -> None:
        """What the HTTP handler does, a turn of the loop late now and then."""
        await self.ticket.until_startable()
        while chunk := await self.ticket.next_bytes(self._outlet):
            self.socket.write(chunk)
            await self.turns()
            self.socket.unsent_bytes = 0
            self._passed()

    async def turns(self) -> None:
        for _ in range(self._dice.randrange(3)):
            await asyncio.sleep(0)

    def hear(self, parcel: list[bytes], now: float) -> int | None:
        """As it is heard off the bus; the frame that is missed, if one is."""
        missed, fed = None, False
        for frame in parcel:
            if self.answer.end is not None:
                break
            outlet = self.ticket.outlet
            if outlet is not None and outlet.pass_on(frame, now):
                self.straight += 1
                continue
            fed = True
            event = self.answer.feed(unpack_frame(frame), now)
            assert not isinstance(event, ev.AttemptFailed)
            if isinstance(event, FramesMissing):
                missed = event.number
        if fed:
            self.ticket.wake()
        return missed


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
    handling = asyncio.create_task(client.handle())
    while client.answer.end is None:
        if dice.random() < 0.1:
            client.socket.unsent_bytes = dice.choice([0, 2 * BEHIND_BYTES])
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
        await client.turns()
    async with asyncio.timeout(20):
        await handling
    assert b"".join(client.socket.sent) == b"".join(pieces)
    assert client.answer.taken_bytes == sum(map(len, pieces))
    assert client.answer.buffered_bytes == 0


@pytest.mark.parametrize(
    ("kind", "first"), [(EVENTS, b"data: 0\n\n"), (JSON, b"x" * PLAIN_BYTES_MAX)]
)
async def test_the_short_way_is_the_usual_one(kind, first):
    client = Client(Random(1), kind)
    frames = frames_of([first] + [b"data: 1\n\n"] * 100 + [DONE], Random(2))
    handling = asyncio.create_task(client.handle())
    for frame in frames:
        client.hear([frame], 0.0)
        for _ in range(5):
            await asyncio.sleep(0)
    await handling
    assert client.straight > 90


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Frame.DATA, 3, b"data: 1\n\n"),
        pack_frame(Frame.DATA, 1, b"data: 1\n\n"),
        pack_frame(Frame.DATA, 2, b"data: 1\n"),
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
    client = Client(Random(1), EVENTS)
    client.answer.feed(unpack_frame(pack_frame(Frame.DATA, 1, b"data: 0\n\n")), 0.0)
    assert client.answer.take()
    assert not client._outlet.pass_on(frame, 0.1)
    assert (client.socket.sent, client.answer.next_number) == ([], 2)
    assert client._outlet.pass_on(pack_frame(Frame.DATA, 2, b"data: 2\n\n"), 0.1)
    assert client.socket.sent == [b"data: 2\n\n"]


def test_the_core_hears_now_and_then_that_a_stream_flows():
    client = Client(Random(1), EVENTS)
    frames = [pack_frame(Frame.DATA, number, b"data: 1\n\n") for number in range(1, 4)]
    assert client.answer.feed(unpack_frame(frames[0]), 10.0) == ev.AttemptProgressed(1, 1)
    assert client.answer.take()
    assert client._outlet.pass_on(frames[1], 10.0 + 0.9 * PROGRESS_S)
    assert not client._outlet.pass_on(frames[2], 10.0 + PROGRESS_S)


def test_a_client_that_is_gone_is_passed_nothing():
    client = Client(Random(1), EVENTS)
    client.socket.closing = True
    client.answer.feed(unpack_frame(pack_frame(Frame.WORKING, 1, b"")), 0.0)
    assert not client._outlet.pass_on(pack_frame(Frame.DATA, 2, b"data: 1\n\n"), 0.1)
    assert (client.socket.sent, client.answer.next_number) == ([], 2)


def test_credit_is_asked_for_when_it_is_due_and_only_then():
    client = Client(Random(1), EVENTS)
    client.answer.feed(unpack_frame(pack_frame(Frame.WORKING, 1, b"")), 0.0)
    client.answer.credit_due()  # WORKING may mean that one was lost
    event = b"data: " + b"x" * (CREDIT_BYTES // 8 - 8) + b"\n\n"
    for number in range(2, 42):
        assert client._outlet.pass_on(pack_frame(Frame.DATA, number, event), 0.1)
    assert client.credits == [5, 5]


def test_the_end_of_an_event_too_long_to_hold_is_one():
    """Also where a frame's number looks like a line's end: the header is no part of an event."""
    client = Client(Random(1), EVENTS)
    for number in range(1, 9):
        client.answer.feed(unpack_frame(pack_frame(Frame.WORKING, number, b"")), 0.0)
    client.answer.feed(unpack_frame(pack_frame(Frame.DATA, 9, b"x" * EVENT_BYTES_MAX + b"x")), 0.0)
    assert client.answer.take() and not client.answer.is_between_events
    assert ord("\n") == 10
    assert not client._outlet.pass_on(pack_frame(Frame.DATA, 10, b"\n"), 0.1)
    assert client.answer.next_number == 10
    assert client._outlet.pass_on(pack_frame(Frame.DATA, 10, b"x\n\n"), 0.1)
    assert client.answer.is_between_events


def test_nothing_overtakes_what_waits():
    client = Client(Random(1), EVENTS)
    client.answer.feed(unpack_frame(pack_frame(Frame.DATA, 1, b"data: 0")), 0.0)
    assert not client._outlet.pass_on(pack_frame(Frame.DATA, 2, b"\n\n"), 0.1)
    client.answer.feed(unpack_frame(pack_frame(Frame.DATA, 2, b"\n\n")), 0.1)
    assert client.answer.take() == b"data: 0\n\n"
    client.socket.unsent_bytes = BEHIND_BYTES + 1
    assert not client._outlet.pass_on(pack_frame(Frame.DATA, 3, b"data: 1\n\n"), 0.1)
    assert client.answer.next_number == 3
