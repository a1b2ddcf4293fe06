"""Frames on their way out: in order, together where they come together, and nothing kept."""

import asyncio
import contextlib

import nats.errors
import pytest

from agents.adapters.outbox import GATHER_S, Outbox
from schemas.exchange import Frame, pack_frame, unpack_frame
from schemas.parcels import PARCEL, parcelled, unpack_parcel

WAIT_S = 20.0


class Bus:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.away = False
        self.is_there = asyncio.Event()
        self.is_there.set()

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.away:
            raise nats.errors.OutboundBufferLimitError
        self.heard.append((subject, payload))

    @property
    def subjects(self) -> list[str]:
        return [subject for subject, _ in self.heard]

    def frames(self) -> list[tuple[str, str]]:
        """Every frame with its inbox, in order."""
        found = []
        for subject, payload in self.heard:
            router, _, last = subject.rpartition(".")
            if last != PARCEL:
                found.append((subject, text(payload)))
            else:
                posts = unpack_parcel(payload)
                found += [(f"{router}.{stream}", text(frame)) for stream, frame in posts]
        return found


def text(frame: bytes) -> str:
    return bytes(unpack_frame(frame).payload).decode()


@pytest.fixture
def bus():
    return Bus()


@pytest.fixture
async def outbox(bus):
    outbox = Outbox(bus.publish, bus.is_there)
    running = asyncio.create_task(outbox.run())
    yield outbox
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def sent(outbox):
    async with asyncio.timeout(WAIT_S):
        await outbox.sent()


def post(outbox, *streams, router="us.r1", urgent=False, reads_parcels=True):
    for stream in streams:
        name = parcelled(stream) if reads_parcels else stream
        frame = pack_frame(Frame.DATA, 0, stream.encode())
        outbox.post(f"_INBOX.{router}.{name}", frame, urgent=urgent)


async def test_a_frame_alone_goes_to_its_own_inbox(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.p-1-1"]
    assert bus.frames() == [("_INBOX.us.r1.p-1-1", "1-1")]


async def test_a_router_that_reads_no_parcels_gets_frames(outbox, bus):
    post(outbox, "1-1", "2-1", reads_parcels=False)
    post(outbox, "3-1", "4-1")
    post(outbox, "1-1", reads_parcels=False)
    await sent(outbox)
    alone = [f"_INBOX.us.r1.{stream}" for stream in ("1-1", "2-1", "1-1")]
    assert bus.subjects == ["_INBOX.us.r1.parcel", *alone]


async def test_frames_of_one_moment_go_as_one_message_for_each_router(outbox, bus):
    post(outbox, "1-1", "2-1", "1-1")
    post(outbox, "7-1", router="us.r2")
    post(outbox, "8-1", "9-1", router="eu.r1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.parcel", "_INBOX.us.r2.p-7-1", "_INBOX.eu.r1.parcel"]
    assert [said for _, said in bus.frames()] == ["1-1", "2-1", "1-1", "7-1", "8-1", "9-1"]


async def test_a_burst_goes_out_in_two_messages(outbox, bus):
    loop = asyncio.get_running_loop()
    began = loop.time()
    post(outbox, "1-1")
    await sent(outbox)
    for number in range(2, 30):
        post(outbox, f"{number}-1")
    await sent(outbox)
    assert loop.time() - began >= GATHER_S
    assert len(bus.heard) == 2
    assert [said for _, said in bus.frames()] == [f"{n}-1" for n in range(1, 30)]


async def test_urgent_frames_take_along_what_waits(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    post(outbox, "2-1")
    post(outbox, "3-1", urgent=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bus.subjects[1:] == ["_INBOX.us.r1.parcel"]
    assert [said for _, said in bus.frames()] == ["1-1", "2-1", "3-1"]


async def test_what_waits_for_the_bus_goes_in_order(outbox, bus):
    bus.is_there.clear()
    post(outbox, "1-1", "2-1")
    post(outbox, "3-1", urgent=True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert bus.heard == []
    bus.is_there.set()
    await sent(outbox)
    assert [said for _, said in bus.frames()] == ["1-1", "2-1", "3-1"]


async def test_what_was_sent_last_is_said_again_before_all_else(outbox, bus, monkeypatch):
    post(outbox, "1-1")
    await sent(outbox)
    monkeypatch.setattr("agents.adapters.outbox.KEPT_S", 0.0)
    await asyncio.sleep(GATHER_S)
    post(outbox, "2-1", "3-1")
    await sent(outbox)
    bus.is_there.clear()
    post(outbox, "4-1")
    bus.heard.clear()
    outbox.repeat()
    bus.is_there.set()
    await sent(outbox)
    assert [said for _, said in bus.frames()] == ["2-1", "3-1", "4-1"]
    bus.heard.clear()
    monkeypatch.setattr("agents.adapters.outbox.KEPT_S", 60.0)
    outbox.repeat()  # the bus was away once more, and what was repeated is lost as well
    await sent(outbox)
    assert [said for _, said in bus.frames()][-1] == "4-1"
    bus.heard.clear()
    post(outbox, "5-1")
    await sent(outbox)
    assert [said for _, said in bus.frames()] == ["5-1"]


async def test_only_so_many_bytes_are_kept(outbox, bus, monkeypatch):
    monkeypatch.setattr("agents.adapters.outbox.KEPT_BYTES_MAX", 10)
    for stream in ("1-1", "2-1" * 10, "3-1"):
        post(outbox, stream)
        await sent(outbox)
    bus.heard.clear()
    outbox.repeat()
    post(outbox, "4-1")
    await sent(outbox)
    assert [said for _, said in bus.frames()] == ["3-1", "4-1"]


async def test_a_bus_that_is_away_loses_frames_and_no_more(outbox, bus, caplog):
    bus.away = True
    post(outbox, "1-1", "2-1")
    await sent(outbox)
    assert "_INBOX.us.r1.parcel: frames may be lost: OutboundBufferLimitError" in caplog.text
    bus.away = False
    post(outbox, "3-1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.p-3-1"]


async def test_whatever_a_socket_raises_the_next_frames_go(outbox, bus):
    async def reset(subject, payload):
        outbox._publish = bus.publish
        raise ConnectionResetError

    outbox._publish = reset
    post(outbox, "1-1", urgent=True)
    await sent(outbox)
    post(outbox, "2-1", urgent=True)
    await sent(outbox)
    assert bus.frames() == [("_INBOX.us.r1.p-2-1", "2-1")]


async def test_any_mix_comes_out_in_order(outbox, bus):
    expected = {}
    for number in range(400):
        inbox = f"_INBOX.us.r{number % 3}.{parcelled(str(number % 7))}"
        expected.setdefault(inbox, []).append(str(number))
        frame = pack_frame(Frame.DATA, 0, str(number).encode())
        outbox.post(inbox, frame, urgent=number % 11 == 0)
        if number % 5 == 0:
            await asyncio.sleep(0)
    await sent(outbox)
    found = {}
    for inbox, said in bus.frames():
        found.setdefault(inbox, []).append(said)
    assert found == expected
